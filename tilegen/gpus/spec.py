"""GPUs as the model sees them: `GpuSpec`, the catalogue in gpus.toml, the device at hand."""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

from tilegen.errors import Unsupported
from tilegen.gpus.nearest import nearest

MIN_FAST_MEMORY, MAX_FAST_MEMORY = 4 * 1024, 16 * 1024 * 1024
SMEM_RESERVED_PER_PROGRAM = 1024
"""Bytes of shared memory that the driver keeps for each resident program, from sm_80 on."""


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """One GPU, as far as tile choice needs it."""

    name: str
    """Catalogue key, such as `h200`; also the folder of its tuning records."""
    title: str
    """Name for people, such as `NVIDIA H200 SXM`."""
    arch: str
    """Architecture that Triton compiles for: `sm_90`, `gfx942`."""
    num_sms: int
    """Streaming multiprocessors (compute units on AMD)."""
    clock_hz: float
    """Boost clock that the peak rates assume [Hz]."""
    smem_per_block: int
    """Shared memory that one program may use, at most [bytes]."""
    smem_per_sm: int
    """Shared memory that all programs of an SM use together, at most [bytes]."""
    registers_per_sm: int
    """Registers of an SM, of 32 bits each."""
    tensor_memory_per_sm: int
    """Tensor memory of an SM [bytes]; 0 on everything but sm_100."""
    l2_bytes: int
    """Size of the L2 cache [bytes]."""
    l2_bandwidth: float
    """Rate at which all SMs together can read from L2 [bytes/s]."""
    dram_bandwidth: float
    """Rate at which DRAM delivers [bytes/s]."""
    tensor_flops_16: float
    """Peak of dense matrix products with 16-bit inputs and fp32 sums [flop/s]."""
    vector_flops_32: float
    """Peak of fp32 multiply-adds outside the tensor cores, as for IEEE products [flop/s]."""
    exp_per_clk_per_sm: int
    """Exponentials the special-function units start each clock."""
    source: str
    """Sources of the numbers, and which of the numbers are estimates."""

    @property
    def on_chip_bytes(self) -> int:
        """The `M` of the bounds: shared memory of one program, all registers, tensor memory."""
        return self.smem_per_block + 4 * self.registers_per_sm + self.tensor_memory_per_sm


def gpu(name: str, *, fast_memory: int | None = None) -> GpuSpec:
    """Return the catalogue row `name`; `fast_memory` asks what a GPU with another M would choose.

    `fast_memory` (bytes) replaces `smem_per_block`, so it limits the tiles, and enters the bounds
    through `on_chip_bytes`; registers stay as they are. Raises Unsupported.
    """
    rows = {spec.name: spec for spec in catalogue()}
    key = (
        name.strip().lower().replace(" ", "-").replace("_", "-") if isinstance(name, str) else name
    )
    if key not in rows:
        close = difflib.get_close_matches(str(key), rows, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else "unknown GPU"
        raise Unsupported(f"gpu must be one of {', '.join(rows)}; got {name!r} ({hint})")
    spec = rows[key]
    return spec if fast_memory is None else with_fast_memory(spec, fast_memory)


def with_fast_memory(spec: GpuSpec, fast_memory: int) -> GpuSpec:
    """Return `spec` with another amount of shared memory per program, in bytes."""
    if (
        isinstance(fast_memory, bool)
        or not isinstance(fast_memory, int)
        or not MIN_FAST_MEMORY <= fast_memory <= MAX_FAST_MEMORY
    ):
        raise Unsupported(
            f"fast_memory must be an int of {MIN_FAST_MEMORY}..{MAX_FAST_MEMORY} bytes, "
            f"got {fast_memory!r}"
        )
    return replace(
        spec,
        smem_per_block=fast_memory,
        smem_per_sm=max(spec.smem_per_sm, fast_memory + SMEM_RESERVED_PER_PROGRAM),
        source=f"{spec.source}; shared memory per program set to {fast_memory} bytes by hand",
    )


def parse_size(text: str) -> int:
    """Return the bytes that `48KiB` or `49152` stands for. Raises Unsupported."""
    units = {"kib": 1024, "mib": 1024**2, "kb": 1024, "b": 1, "": 1}
    digits = text.strip().lower().rstrip("kmib ")
    unit = text.strip().lower()[len(digits) :].strip()
    if not digits.isdecimal() or unit not in units:
        raise Unsupported(f"fast memory must look like 48KiB or 49152, got {text!r}")
    return int(digits) * units[unit]


# The GPU whose tiles an architecture gets where nobody names one.
_TYPICAL = {
    "sm_70": "v100",
    "sm_75": "t4",
    "sm_80": "a100",
    "sm_86": "rtx3090",
    "sm_89": "rtx4090",
    "sm_90": "h200",
    "sm_100": "b200",
    "sm_120": "rtx5090",
    "gfx942": "mi300x",
    "gfx950": "mi350x",
}


def gpu_for(arch: str) -> GpuSpec:
    """Return the GPU that stands for an architecture. Raises Unsupported."""
    if arch not in _TYPICAL:
        raise Unsupported(f"arch must be one of {', '.join(_TYPICAL)}, got {arch!r}")
    return gpu(_TYPICAL[arch])


def catalogue() -> tuple[GpuSpec, ...]:
    """Return every GPU of gpus.toml, oldest first within a vendor."""
    return tuple(spec for spec, _ in _rows())


ASSUMED = "h200"
"""The GPU that commands assume, and whose tiles a CPU runs, where there is none."""


def current_gpu() -> GpuSpec:
    """Return the GPU that calls on the current device choose for, the assumed one without any."""
    return detect() or gpu(ASSUMED)


def detect(index: int | None = None) -> GpuSpec | None:
    """Return the GPU at hand (the current one, or number `index`), or None where PyTorch sees none.

    What the driver knows overrides the catalogue row with the same name; a GPU without a row takes
    the rates per SM of the nearest architecture, and says so in `source`.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    return from_driver(
        torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    )


def from_driver(properties: Any) -> GpuSpec:
    """Return the GPU that `torch.cuda.get_device_properties` describes."""
    amd_arch = str(getattr(properties, "gcnArchName", "") or "").split(":")[0]
    is_amd = amd_arch.startswith("gfx")
    arch = amd_arch if is_amd else f"sm_{properties.major}{properties.minor}"
    title = str(properties.name)
    base = next((spec for spec, pattern in _rows() if re.search(pattern, title)), None)
    num_sms = int(properties.multi_processor_count)
    spec = base or _stand_in(arch, num_sms)

    clock_hz = 0.0 if base else 1e3 * float(getattr(properties, "clock_rate", 0) or 0)
    sms, clock = num_sms / spec.num_sms, (clock_hz / spec.clock_hz if clock_hz else 1.0)
    known: dict[str, Any] = {
        "arch": arch,
        "num_sms": num_sms,
        "clock_hz": spec.clock_hz * clock,
        "tensor_flops_16": spec.tensor_flops_16 * sms * clock,
        "vector_flops_32": spec.vector_flops_32 * sms * clock,
        "l2_bandwidth": spec.l2_bandwidth * sms * clock,
        "source": f"{spec.source}; sizes as the driver reports them",
    }
    if base is None:
        known |= {
            "name": re.sub(
                r"[^a-z0-9]+", "-", re.sub(r"(?i)\b(nvidia|amd)\b", "", title).lower()
            ).strip("-"),
            "title": title,
            "source": f"not in gpus.toml: rates per SM of {spec.title}; sizes from the driver",
        }
    if not is_amd:  # HIP reports the caches and registers of one die or one SIMD under these names
        memory_clock, bus_bits = (
            float(getattr(properties, key, 0) or 0)
            for key in ("memory_clock_rate", "memory_bus_width")
        )
        known |= {
            field: int(value)
            for field, attribute in _DRIVER_SIZES.items()
            if (value := getattr(properties, attribute, 0))
        }
        if memory_clock and bus_bits:
            known["dram_bandwidth"] = (
                2 * 1e3 * memory_clock * bus_bits / 8
            )  # kHz, two transfers a clock
    return replace(spec, **known)


_DRIVER_SIZES = {
    "smem_per_block": "shared_memory_per_block_optin",
    "smem_per_sm": "shared_memory_per_multiprocessor",
    "registers_per_sm": "regs_per_multiprocessor",
    "l2_bytes": "L2_cache_size",
}


def _stand_in(arch: str, num_sms: int) -> GpuSpec:
    """Return the row of the nearest architecture whose number of SMs is nearest."""
    near = nearest(arch, {spec.arch for spec in catalogue()})
    alike = (spec for spec in catalogue() if spec.arch == near)
    return min(alike, key=lambda spec: abs(spec.num_sms - num_sms))


@cache
def _rows() -> tuple[tuple[GpuSpec, str], ...]:
    """Return each catalogue row with the pattern of its name in the driver."""
    names = {field.name for field in fields(GpuSpec)}
    table = tomllib.loads((files("tilegen.gpus") / "gpus.toml").read_text(encoding="utf-8"))
    rows: list[tuple[GpuSpec, str]] = []
    for row in table["gpu"]:
        values = {name: row[name] for name in names}
        values["source"] = f"{row['source']}; L2 bandwidth: {row['l2_bandwidth_source']}"
        rows.append((GpuSpec(**values), row["driver_name"]))
    return tuple(rows)
