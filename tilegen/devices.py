"""Look up devices by name: GPUs and processors of both catalogues, and this machine's processor."""

from __future__ import annotations

from pathlib import Path

from tilegen.cpus import spec as cpus
from tilegen.device import Device
from tilegen.errors import Unsupported
from tilegen.gpus.spec import (
    GpuSpec,
    current_gpu,
    detect,
    gpu,
    parse_size,
    read_gpu,
    with_fast_memory,
)

HERE = "cpu"
"""Name that stands for this machine's processor."""


def device_named(name: str) -> Device:
    """Look up a GPU or a processor; `cpu` is this machine's, and a name that ends in `.toml` that
    of a file (see `read_gpu`). Raises Unsupported."""
    key = name.strip().lower() if isinstance(name, str) else name
    if key == HERE:
        from tilegen.cpus.host import current_cpu

        return current_cpu()
    if isinstance(name, str) and key.endswith(".toml"):
        return read_gpu(Path(name))
    processors = {spec.name: spec for spec in cpus.catalogue()}
    return processors[key] if key in processors else gpu(name)


def device_of(given: Device | str | None, fast_memory: int | str | None = None) -> Device:
    """Return a device unchanged or by its name; for None, the device of a call here: the GPU, or
    else the processor. `fast_memory` replaces a GPU's: see `api.propose`. Raises Unsupported."""
    if given is None:
        given = detect() or HERE
    device = given if isinstance(given, Device) else device_named(given)
    if fast_memory is None:
        return device
    if not isinstance(device, GpuSpec):
        raise Unsupported(
            f"fast_memory is for GPUs, got the processor {device.name}; leave it out, or name a "
            "GPU, such as h200"
        )
    return with_size(device, fast_memory)


def gpu_of(given: Device | str | None, fast_memory: int | str | None = None) -> GpuSpec:
    """Return a GPU as `device_of` does, but for None the H200 on a machine without a GPU. Raises
    Unsupported for a processor."""
    device = current_gpu() if given is None else device_of(given)
    if isinstance(device, GpuSpec):
        return with_size(device, fast_memory)
    name = given if isinstance(given, str) else device.name
    raise Unsupported(
        f"expected a GPU, got the processor {name}; for its tiles and why: "
        f"tilegen explain PROBLEM --gpu {name}"
    )


def with_size(gpu: GpuSpec, fast_memory: int | str | None) -> GpuSpec:
    """Return a GPU with another size of shared memory per program: bytes, or text such as
    `48KiB`. Raises Unsupported."""
    if fast_memory is None:
        return gpu
    size = parse_size(fast_memory) if isinstance(fast_memory, str) else fast_memory
    return with_fast_memory(gpu, size)
