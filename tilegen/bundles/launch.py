"""How a binary is launched: results are allocated, and every argument is found by its name.

README.md beside this file has the same table of names, for programs in other languages.
"""

from __future__ import annotations

import ctypes
import math
import re
import struct
import threading
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, Protocol

import torch

from tilegen.bundles.manifest import Binary
from tilegen.errors import Unsupported
from tilegen.kernels.config import Kernel
from tilegen.kernels.passes import Launch, empty_like

Values = Mapping[str, Any]
"""Tensors and numbers of one launch, by name."""
Rule = Callable[[Values], Any]

# What a launch is given, by position, and what it returns: as `launch` of the emitted kernels.
_GIVEN: dict[Kernel, str] = {
    "fwd": "q k v softmax_scale",
    "fwd_streamed": "q k v softmax_scale",
    "fwd_scores": "q k head_first num_heads row_first num_rows softmax_scale",
    "fwd_values": "weights maxima sums score_width v out lse head_first row_first",
    "bwd_preprocess": "out dout",
    "bwd_dkdv": "q k v dout lse delta softmax_scale",
    "bwd_dq": "q k v dout lse delta softmax_scale",
    "bwd_scores": "q k v dout lse delta head_first num_heads row_first num_rows softmax_scale",
    "bwd_columns": "panel y acc grad head_first row_first begins ends factor",
    "bwd_rows": "ds k dq head_first row_first softmax_scale",
}
_MADE: dict[Kernel, str] = {
    "fwd": "out lse",
    "fwd_streamed": "out lse",
    "fwd_scores": "weights maxima sums",
    "bwd_preprocess": "delta",
    "bwd_dkdv": "dk dv",
    "bwd_dq": "dq",
    "bwd_scores": "weights ds",
}
_PANELS = "weights ds panel"
"""Tensors (heads, rows, columns) that kernels of a panel share, all of the same strides."""
_SIZES: dict[str, tuple[str, int]] = {
    "batch": ("q out dq y", 0),
    "num_heads_q": ("q out dq y", 1),
    "seqlen_q": ("q out dq y", 2),
    "num_heads_kv": ("k v grad", 1),
    "seqlen_kv": ("k v grad", 2),
    "head_dim": ("grad", 3),
    "head_dim_qk": ("k", 3),
    "head_dim_v": ("v", 3),
    "num_heads": (_PANELS, 0),
    "num_rows": (_PANELS, 1),
    "score_tiles": ("maxima", 1),
}
"""Where a size is read: the first of these tensors that the kernel has, and the dimension."""
_STRIDES = {"o": "out", "do": "dout", "g": "grad", "w": _PANELS}
"""What strides belong to, where they are not named like their tensor."""
_EXTRAS = r"(t\d+|d?c\d+|sinks|tiles|starts)_ptr|(tiles_s[bh])"
_FORMATS = {"i32": "i", "fp32": "f"}  # of `struct`; all others are pointers


class Function(Protocol):
    """A kernel that the driver has loaded."""

    def launch(self, grid: int, threads: int, parameters: int, *, device: int, stream: int) -> None:
        """Run `grid` programs; `parameters` is the address of an array of their addresses."""
        ...


def extra_names(binary: Binary) -> tuple[str, ...]:
    """Return what a launch is given by name, for the kernel's mask and score."""
    matches = (re.fullmatch(_EXTRAS, name) for name, _ in binary.arguments)
    return tuple(match[1] or match[2] for match in matches if match)


def launch_of(binary: Binary, load: Callable[[], Function]) -> Launch:
    """Return a function with the parameters and results of the emitted kernel's `launch`.

    `load` is called when it is first needed. Raises Unsupported for arguments nobody here knows.
    """
    return _Launcher(binary, load).launch


class _Launcher:
    """Packs the arguments of one binary."""

    def __init__(self, binary: Binary, load: Callable[[], Function]) -> None:
        self._binary = binary
        self._load = load
        self._function: Function | None = None
        self._given = _GIVEN[binary.kernel].split()
        self._made = _MADE.get(binary.kernel, "").split()
        self._has = {*self._given, *self._made, *extra_names(binary)}
        names = [name for name, _ in binary.arguments]
        # Strides are read three at a time, all else name by name.
        self._strided: dict[str, list[str]] = {}
        self._rules: list[tuple[str, Rule]] = []
        for name in dict.fromkeys([*names, *(size for size, _ in binary.grid)]):
            if match := re.fullmatch(r"stride_([a-z]+)[bhmn]", name):
                of = self._first(_STRIDES.get(match[1], match[1]), name)
                self._strided.setdefault(of, []).append(name)
            elif name not in self._has:
                self._rules.append((name, self._rule(name)))
        for strides in self._strided.values():
            if "".join(name[-1] for name in strides) not in ("bhm", "bhn", "hm"):
                raise self._unknown(", ".join(strides))
        self._pick = itemgetter(*names)
        self._struct = struct.Struct("".join(_FORMATS.get(t, "P") for _, t in binary.arguments))
        self._memory = threading.local()

    def launch(self, *given: Any, **extras: Any) -> Any:
        """Allocate what is returned, and launch on the current stream of the tensors' device."""
        values = dict(zip(self._given, given, strict=True))
        made = {name: self._new(name, values) for name in self._made}
        self._run({**values, **made, **extras}, given[0].device)
        results: list[Any] = list(made.values())
        if self._binary.kernel == "fwd_scores":  # which says how wide its score tiles are
            results.append(self._binary.config.block_n)
        return results[0] if len(results) == 1 else tuple(results) or None

    def _run(self, values: dict[str, Any], device: torch.device) -> None:
        for name, rule in self._rules:
            values[name] = rule(values)
        for of, names in self._strided.items():
            values.update(zip(names, _strides(values[of], self._binary.stride_unit), strict=True))
        grid = 1
        for size, divisor in self._binary.grid:
            grid *= -(-values[size] // divisor)
        memory, addresses = self._buffers()
        try:
            self._struct.pack_into(memory, 0, *self._pick(values))
        except struct.error as error:
            name = self._binary.function
            raise Unsupported(f"{name}: a size or stride is too large: {error}") from None
        if self._function is None:
            self._function = self._load()
        self._function.launch(
            grid,
            self._binary.threads,
            addresses,
            device=device.index or 0,
            stream=torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0,
        )

    def _buffers(self) -> tuple[Any, int]:
        """Return this thread's memory for arguments, and the address of their addresses."""
        if not hasattr(self._memory, "array"):
            memory = ctypes.create_string_buffer(self._struct.size)
            formats, start = self._struct.format, ctypes.addressof(memory)
            places = [
                start + struct.calcsize(formats[: i + 1]) - struct.calcsize(one)
                for i, one in enumerate(formats)
            ]
            self._memory.array = (ctypes.c_void_p * len(places))(*places)
            self._memory.buffers = memory, ctypes.addressof(self._memory.array)
        return self._memory.buffers

    def _new(self, name: str, given: Values) -> torch.Tensor:
        """Return an uninitialised tensor for a result."""
        if name == "out":
            return empty_like(given["q"], given["v"].shape[3])
        if name in ("dq", "dk", "dv"):
            like = given[name[1:]]
            return empty_like(like, like.shape[3])
        if name in ("lse", "delta"):
            like = given["q" if name == "lse" else "out"]
            return torch.empty(like.shape[:3], device=like.device, dtype=torch.float32)
        q, seqlen_kv = given["q"], given["k"].shape[2]
        heads, rows = given["num_heads"], given["num_rows"]
        if name in _PANELS.split():
            unit = self._binary.stride_unit
            return q.new_empty((heads, rows, -(-seqlen_kv // unit) * unit))
        shape = heads, -(-seqlen_kv // self._binary.config.block_n), rows
        return torch.empty(shape, device=q.device, dtype=torch.float32)  # maxima and sums

    def _rule(self, name: str) -> Rule:
        """Return how an argument or a size follows from the values of a launch."""
        unit = self._binary.stride_unit
        if re.fullmatch(r"scratch_\d+", name):
            return lambda values: 0
        if name == "softmax_scale_log2":
            return lambda values: values["softmax_scale"] * math.log2(math.e)
        if name == "head_dim_units":
            return lambda values: values["grad"].shape[3] // unit
        if (match := re.fullmatch(r"(\w+)_ptr", name)) and match[1] in self._has:
            return lambda values, it=match[1]: values[it].data_ptr()
        if (match := re.fullmatch(r"([tc]\d+)_n(\d)", name)) and match[1] in self._has:
            return lambda values, it=match[1], axis=int(match[2]): values[it].shape[axis]
        if name in _SIZES:
            names, axis = _SIZES[name]
            it = self._first(names, name)
            return lambda values: values[it].shape[axis]
        raise self._unknown(name)

    def _first(self, names: str, argument: str) -> str:
        """Return the first tensor that the kernel has."""
        for one in names.split():
            if one in self._has:
                return one
        raise self._unknown(argument)

    def _unknown(self, argument: str) -> Unsupported:
        return Unsupported(
            f"{self._binary.file} takes {argument!r}, which a {self._binary.kernel} of this "
            "tilegen does not; generate the bundle again"
        )


def _strides(tensor: torch.Tensor, unit: int) -> tuple[int, ...]:
    """Return all strides but the last in units; a dimension of (batch, heads, seqlen) with size 1
    has none."""
    if tensor.ndim == 3:  # a panel
        head, row, _ = tensor.stride()
        return head // unit, row // unit
    (batches, heads, rows, _), (batch, head, row, _) = tensor.shape, tensor.stride()
    batch, head, row = batches > 1 and batch, heads > 1 and head, rows > 1 and row
    if batch % unit or head % unit or row % unit:
        raise Unsupported(
            f"expected strides that are multiples of {unit} elements, got {tensor.stride()}"
        )
    return batch // unit, head // unit, row // unit
