"""Properties of GPUs for the model: `GpuSpec`, the catalogue in gpus.toml, the local device."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from tilegen.device import Device
from tilegen.errors import Unsupported, did_you_mean
from tilegen.gpus.nearest import nearest

MIN_FAST_MEMORY, MAX_FAST_MEMORY = 4 * 1024, 16 * 1024 * 1024
SMEM_RESERVED_PER_PROGRAM = 1024
"""Shared memory that the driver reserves for each resident program, from sm_80 on [bytes]."""


@dataclass(frozen=True, kw_only=True)
class GpuSpec(Device):
    """The properties of a GPU model that the choice of tiles depends on."""

    num_sms: int
    """Streaming multiprocessors (compute units on AMD)."""
    clock_hz: float
    """Boost clock that the peak rates assume [Hz]."""
    smem_per_block: int
    """Maximum shared memory of a program [bytes]."""
    smem_per_sm: int
    """Maximum shared memory of all programs on an SM [bytes]."""
    registers_per_sm: int
    """Number of 32-bit registers of an SM."""
    tensor_memory_per_sm: int
    """Tensor memory of an SM [bytes]; 0 except on sm_100."""
    l2_bytes: int
    """Size of the L2 cache [bytes]."""
    l2_bandwidth: float
    """Rate at which all SMs together can read from L2 [bytes/s]."""
    dram_bandwidth: float
    """Bandwidth of DRAM [bytes/s]."""
    tensor_flops_16: float
    """Peak of dense matrix products with 16-bit inputs and fp32 sums [flop/s]."""
    vector_flops_32: float
    """Peak of fp32 multiply-adds outside the tensor cores, which IEEE products use [flop/s]."""
    exp_per_clk_per_sm: int
    """Exponentials that the special-function units of an SM start each clock."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, low = getattr(self, field.name), field.name not in _MAY_BE_0
            if field.type == "str":
                wanted, right = "text", isinstance(value, str) and value != ""
            else:
                wanted = f"{'an int' if field.type == 'int' else 'a number'} of at least {low:d}"
                is_number = type(value) is int or (field.type == "float" and type(value) is float)
                right = is_number and low <= value < math.inf
            if not right:
                raise Unsupported(f"{field.name} of a GPU must be {wanted}, got {value!r}")
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", self.name):  # records have a folder of the name
            raise Unsupported(
                f"name of a GPU must be letters a to z, digits and hyphens, got {self.name!r}"
            )

    @property
    def on_chip_bytes(self) -> int:
        """Fast memory, the `M` of the bounds [bytes]: the shared memory of a program, and the
        registers and tensor memory of an SM."""
        return self.smem_per_block + 4 * self.registers_per_sm + self.tensor_memory_per_sm

    @property
    def memories(self) -> int:
        """Number of such memories: each SM has its own."""
        return self.num_sms


_MAY_BE_0 = ("registers_per_sm", "tensor_memory_per_sm", "l2_bytes")  # to study one memory alone


def gpu(name: str, *, fast_memory: int | None = None) -> GpuSpec:
    """Look up a GPU model in the catalogue. Raises Unsupported.

    `fast_memory` [bytes] replaces `smem_per_block`, to study a GPU with another fast memory M: it
    limits the tiles, and changes the bounds through `on_chip_bytes`. Registers do not change.
    """
    rows = {spec.name: spec for spec in catalogue()}
    key = (
        name.strip().lower().replace(" ", "-").replace("_", "-") if isinstance(name, str) else name
    )
    if isinstance(name, str) and key not in rows:  # perhaps the driver's name, or an architecture
        key = next((spec.name for spec, pattern in _rows() if re.search(pattern, name)), key)
        if alike := [spec.name for spec in rows.values() if spec.arch == name]:
            raise Unsupported(
                f"expected a GPU, got the architecture {name}, which is that of "
                f"{', '.join(alike)}; name one, such as {_TYPICAL[name]}, which stands for the "
                "architecture where no GPU is named"
            )
    if key not in rows:
        hint = did_you_mean(key, rows) or "; for others, a file such as mine.toml"
        raise Unsupported(f"gpu must be one of {', '.join(rows)}; got {name!r}{hint}")
    spec = rows[key]
    return spec if fast_memory is None else with_fast_memory(spec, fast_memory)


def with_fast_memory(spec: GpuSpec, fast_memory: int) -> GpuSpec:
    """Return `spec` with other shared memory per program [bytes]. Raises Unsupported."""
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
    """Parse a size such as `48KiB` or `49152`; return it in bytes. Raises Unsupported."""
    units = {"kib": 1024, "mib": 1024**2, "kb": 1024, "b": 1, "": 1}
    digits = text.strip().lower().rstrip("kmib ")
    unit = text.strip().lower()[len(digits) :].strip()
    if not digits.isdecimal() or unit not in units:
        raise Unsupported(f"fast memory must look like 48KiB or 49152, got {text!r}")
    return int(digits) * units[unit]


# The GPU model whose tiles an architecture gets if no model is named.
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
    """Return the GPU model that stands for an architecture. Raises Unsupported."""
    if arch not in _TYPICAL:
        raise Unsupported(f"arch must be one of {', '.join(_TYPICAL)}, got {arch!r}")
    return gpu(_TYPICAL[arch])


def catalogue() -> tuple[GpuSpec, ...]:
    """Return the GPU models of gpus.toml, oldest first within a vendor."""
    return tuple(spec for spec, _ in _rows())


ASSUMED = "h200"
"""GPU model for machines without a GPU: commands assume it, and a CPU runs its tiles."""


def current_gpu() -> GpuSpec:
    """Return the GPU of the current device, or `ASSUMED` on a machine without a GPU."""
    return detect() or gpu(ASSUMED)


def detect(index: int | None = None) -> GpuSpec | None:
    """Detect the current GPU, or the GPU with number `index`; None if PyTorch sees no GPU.

    Values of the driver override the GPU's catalogue row. A GPU without a row gets the rates per SM
    of the nearest architecture, which `source` notes.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    return from_driver(
        torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    )


def from_driver(properties: Any) -> GpuSpec:
    """Build a spec from the result of `torch.cuda.get_device_properties`."""
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
    if not is_amd:  # under these names, HIP reports caches and registers of a single die or SIMD
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
    """Return the row of the nearest architecture with the nearest number of SMs."""
    near = nearest(arch, {spec.arch for spec in catalogue()})
    candidates = (spec for spec in catalogue() if spec.arch == near)
    return min(candidates, key=lambda spec: abs(spec.num_sms - num_sms))


@cache
def _rows() -> tuple[tuple[GpuSpec, str], ...]:
    """Load the catalogue: each row, with the pattern of the GPU's name in the driver."""
    table = tomllib.loads((files("tilegen.gpus") / "gpus.toml").read_text(encoding="utf-8"))
    rows: list[tuple[GpuSpec, str]] = []
    for row in table["gpu"]:
        pattern, l2_source = row.pop("driver_name"), row.pop("l2_bandwidth_source")
        row["source"] += f"; L2 bandwidth: {l2_source}"
        rows.append((GpuSpec(**row), pattern))
    return tuple(rows)


def read_gpu(path: Path) -> GpuSpec:
    """Read a GPU model that is not in the catalogue from a TOML file, with the fields of `GpuSpec`.
    Raises Unsupported."""
    try:
        row: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise Unsupported(f"cannot read the GPU in '{path}': {why}") from None
    names = {field.name for field in fields(GpuSpec)}
    wrong = {"missing": names - set(row), "unknown": set(row) - names}
    if any(wrong.values()):
        parts = [f"{what}: {', '.join(sorted(some))}" for what, some in wrong.items() if some]
        raise Unsupported(f"expected the fields of a GpuSpec in '{path}'; {'; '.join(parts)}")
    return GpuSpec(**row)
