"""A call of `attention`: its kernels, chosen when a call of its kind is first made.

The first call of a kind picks configs (records, then the model) and loads the emitted kernels;
every further one is a dictionary look-up and a launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from threading import RLock
from typing import Any

import torch

from tilegen import bundles, pipeline
from tilegen.check import interpreter
from tilegen.disk import say_once
from tilegen.emit.identity import is_aligned
from tilegen.errors import TilegenError, Unsupported
from tilegen.gpus.spec import ASSUMED, GpuSpec, detect, gpu
from tilegen.kernels import passes
from tilegen.kernels.config import BLOCK_SIZES, Kernel
from tilegen.kernels.panels import Launch, rows_for
from tilegen.kernels.spec import Direction
from tilegen.kernels.two_pass import BWD_PREPROCESS
from tilegen.masks.dilation import grouped_mask, step_of
from tilegen.masks.mask import Mask, full
from tilegen.masks.score import Score
from tilegen.masks.shapes import Shape
from tilegen.masks.tensors import check_fit, score_tensors
from tilegen.masks.values import Made
from tilegen.problem import AttentionProblem
from tilegen.runtime import autograd, plans
from tilegen.runtime.autograd import Changes, Gradients, Wanted, addressable, reaching, torch_run
from tilegen.runtime.binding import BoundKernel
from tilegen.runtime.call import (
    ScoreFunction,
    autocast,
    autocast_dtype,
    call_key,
    checked_scale,
    describe,
    is_narrow,
    padded,
    problem_of,
    score_of,
    widened,
)
from tilegen.runtime.dilation import group, ungroup

_FULL = full()
MAX_PROGRAMS = 2**31 - 1  # CUDA's limit on a one-dimensional grid


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask | None = None,
    score: Score | ScoreFunction | None = None,
    kv_lengths: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of a call of `attention`. Raises InvalidProblem or Unsupported, naming the
    call."""
    try:
        if kv_lengths is not None:
            mask = (_FULL if mask is None else mask) & padded(kv_lengths)
        changes = Changes(_FULL if mask is None else mask, score_of(score))
        return _attention(q, k, v, changes, scale)
    except TilegenError as error:
        raise type(error)(
            f"{error}; the call was {describe(q, k, v, mask, score, scale)}"
        ) from None


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, changes: Changes, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse), of a call that is first brought into the form that kernels are for."""
    if (dtype := autocast_dtype(q)) is not None:
        with torch.autocast(q.device.type, enabled=False):
            q, k, v = (autocast(one, dtype) for one in (q, k, v))
            return _attention(q, k, v, changes, scale)
    if is_narrow(q, k, v):
        scale = q.shape[3] ** -0.5 if scale is None else scale
        out, lse = _attention(widened(q), widened(k), widened(v), changes, scale)
        return out[..., : v.shape[3]], lse
    if (step := _step_of(q, changes)) > 1:
        return _regrouped(q, k, v, changes, step, scale)
    key = call_key(q, k, v, changes)
    plan: Plan = plans.by_call.get(key, lambda: _new_plan(q, k, v, changes))
    check_fit(changes.mask, changes.score, Shape.of(q, k))
    factor = plan.default_scale if scale is None else checked_scale(scale)
    if factor < 0:  # kernels take a row's maximum before scaling: the scale must keep the order
        q, factor = -q, -factor
    return reaching(*plan.run(q, k, v, factor, changes), changes)


@dataclass(frozen=True)
class Plan:
    """How calls of one kind are computed."""

    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, Changes], tuple[Any, Any]]
    default_scale: float


def _step_of(q: torch.Tensor, changes: Changes) -> int:
    """Return the step by which a call is regrouped, 1 where it is in normal form already."""
    if not isinstance(changes.mask, Mask) or not isinstance(q, torch.Tensor) or not q.ndim:
        return 1
    return step_of(changes.mask, changes.score.text if changes.score else "", q.shape[0])


def _regrouped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    changes: Changes,
    step: int,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of a dilated mask, rows and columns regrouped by their remainder: the call
    is brought into the form that `AttentionProblem.normal` gives its problem."""
    call_key(q, k, v, changes)  # which refuses what is no tensor
    problem_of(q, k, v, changes)  # and this what does not fit together
    groups = q.shape[0] * step
    mask = grouped_mask(changes.mask, step, k.shape[2], groups, q.device)
    rows = q.shape[2]
    q, k, v = (group(x, step) for x in (q, k, v))
    out, lse = _attention(q, k, v, Changes(mask, changes.score), scale)
    return ungroup(out, step, rows), ungroup(lse, step, rows)


def _new_plan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, changes: Changes) -> Plan:
    problem = problem_of(q, k, v, changes)
    scale = problem.head_dim_qk**-0.5
    if q.device.type == "cpu" and not interpreter.is_active():
        say_once(
            "CPU tensors: computing with PyTorch; "
            "set TRITON_INTERPRET=1 before Python starts to run the emitted kernels"
        )
        return Plan(torch_run, scale)
    if q.device.type in ("cpu", "cuda"):
        if q.device.type == "cpu":
            interpreter.prepare()
        return Plan(_kernel_run(problem, q, k, v), scale)
    raise Unsupported(f"q must be on a CUDA or CPU device, got {q.device}")


def _kernel_run(
    problem: AttentionProblem, *tensors: torch.Tensor
) -> Callable[..., tuple[Any, Any]]:
    """Return how a problem runs with emitted kernels, copying first what kernels cannot address."""
    tiles = -(-max(problem.seqlen_q, problem.seqlen_kv) // min(BLOCK_SIZES))
    if problem.batch * problem.num_heads_q * tiles > MAX_PROGRAMS:
        raise Unsupported(
            f"batch * heads * tiles must be at most {MAX_PROGRAMS}, got {problem.batch} * "
            f"{problem.num_heads_q} * {tiles}; split the batch"
        )
    copied = [not addressable(tensor) for tensor in tensors]
    if any(copied):
        names = ", ".join(name for name, copy in zip("qkv", copied, strict=True) if copy)
        say_once(
            f"{names}: copied on every call, since kernels need a dense last dimension; "
            "pass a contiguous tensor"
        )
    tensors = tuple(t.contiguous() if copy else t for t, copy in zip(tensors, copied, strict=True))
    kernels = _kernels(problem.bucket, tensors[0].device, all(map(is_aligned, tensors)))

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, changes: Changes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if any(copied):
            q, k, v = (
                t.contiguous() if copy else t for t, copy in zip((q, k, v), copied, strict=True)
            )
        return autograd.run(q, k, v, scale, changes, kernels)

    return run


class _Kernels:
    """The emitted kernels of one problem bucket on one device; those of a pass are chosen and
    loaded when it first runs."""

    def __init__(self, problem: AttentionProblem, device: torch.device, aligned: bool) -> None:
        self._problem = problem
        self._device = device
        self.aligned = aligned
        self._passes: dict[Direction, tuple[dict[Kernel, BoundKernel], int]] = {}
        self._lock = RLock()

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, changes: Changes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse)."""
        reads = score_tensors(changes.captured, changes.sinks)
        launches, panel_rows = self._launches("forward", changes, reads, q, k)
        return passes.forward(launches, q, k, v, scale, panel_rows=panel_rows)

    def backward(
        self,
        saved: tuple[torch.Tensor, ...],
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        scale: float,
        changes: Changes,
        wanted: Wanted,
    ) -> Gradients:
        """Return the gradients; `saved` are q, k, v, out and lse."""
        q, k, v, out, lse = saved
        trained = self._problem.score.trained if self._problem.score else ()
        # Dense, as kernels need them, whatever the strides of what is trained.
        sizes = {slot: changes.captured[slot].shape for slot in trained}
        gradients = {slot: q.new_zeros(size, dtype=torch.float32) for slot, size in sizes.items()}
        captured = {slot: gradients[slot] for slot in wanted.captured}
        reads = score_tensors(changes.captured, None, gradients)
        launches, panel_rows = self._launches("backward", changes, reads, q, k)
        delta = launches[BWD_PREPROCESS.name](out, dout)
        if dlse is not None:  # d lse / d s = p, as if delta were smaller by dlse
            delta -= dlse
        dq, dk, dv = passes.gradients(
            launches,
            *(q, k, v, dout, lse, delta, scale),
            panel_rows=panel_rows,
            wants_dq=wanted.dq or bool(captured),
            wants_dkdv=wanted.dkdv,
        )
        sinks = None
        if wanted.sinks and changes.sinks is not None:  # a key that weighs exp(sink - lse), value 0
            weights = (changes.sinks.float()[:, None] - lse).exp()
            weights = weights.masked_fill(lse == float("-inf"), 0.0)  # nothing kept, and no sink
            sinks = -(weights * delta).sum((0, 2)).to(changes.sinks.dtype)
        return Gradients(dq, dk, dv, sinks, captured)

    def _launches(
        self,
        direction: Direction,
        changes: Changes,
        reads: Mapping[str, torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
    ) -> tuple[dict[Kernel, Launch], int]:
        """Return the launches of a pass, given what mask and score read, and the rows of its
        panels."""
        kernels, panel_rows = self._passes.get(direction) or self._load(direction)
        shape = Shape.of(q, k)
        made: Made = {}
        read = (changes.mask, shape, self._device, reads, made)
        return {name: one.given(*read) for name, one in kernels.items()}, panel_rows

    def _load(self, direction: Direction) -> tuple[dict[Kernel, BoundKernel], int]:
        """Choose and load the kernels of a pass; return them and the rows of its panels."""
        spec = _spec(self._device)
        with self._lock:
            if direction not in self._passes:
                found = self._from_bundle(spec, direction) or self._compiled_here(spec, direction)
                rows = rows_for(self._problem, spec, direction)
                self._passes[direction] = found, rows
            return self._passes[direction]

    def _compiled_here(self, spec: GpuSpec, direction: Direction) -> dict[Kernel, BoundKernel]:
        on_gpu = self._device.type == "cuda"
        chosen = pipeline.choose(
            self._problem,
            spec,
            direction,
            aligned=self.aligned,
            may_tune=on_gpu,
            may_compile=on_gpu,
        )
        modules = pipeline.load(self._problem, chosen, aligned=self.aligned)
        return {
            kernel: BoundKernel(module.launch, self._problem.mask, kernel, chosen[kernel].config)
            for kernel, module in modules.items()
        }

    def _from_bundle(self, spec: GpuSpec, direction: Direction) -> dict[Kernel, BoundKernel] | None:
        """Return the kernels of a pass from the first bundle that has them."""
        for bundle in bundles.loaded:
            if found := bundle.launches(self._problem, spec, direction, aligned=self.aligned):
                return found
        return None

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Triton launches on the current device; make it that of the tensors."""
        if self._device.type == "cpu" or self._device.index == torch.cuda.current_device():
            return contextlib.nullcontext()
        return torch.cuda.device(self._device)


def _kernels(problem: AttentionProblem, device: torch.device, aligned: bool) -> _Kernels:
    return plans.by_problem.get(
        (problem, device, aligned), lambda: _Kernels(problem, device, aligned)
    )


@cache
def _spec(device: torch.device) -> GpuSpec:
    spec = detect(device.index) if device.type == "cuda" else gpu(ASSUMED)
    if spec is None:
        raise Unsupported(f"expected a GPU that PyTorch sees, got {device}")
    return spec
