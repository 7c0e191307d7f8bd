"""The device that this machine tunes for."""

from __future__ import annotations

from tilegen import cpu
from tilegen.device import Device
from tilegen.disk import log
from tilegen.errors import Unsupported


def tuned_device() -> Device:
    """Return the device that this machine tunes for: the local GPU, or the processor. Raises
    Unsupported if no kernels can be compiled for the processor."""
    from tilegen.cpus.host import current_cpu
    from tilegen.gpus.spec import detect

    if (gpu := detect()) is not None:
        return gpu
    if reason := cpu.why_not():
        raise Unsupported(
            f"tuning measures on a GPU, and PyTorch sees none, or on the processor, but {reason}; "
            "take the model's choice: tilegen propose"
        )
    return current_cpu()


def planned_device() -> Device:
    """Return the device that a dry run plans for: the one to tune for, or else a usual GPU."""
    from tilegen.gpus.spec import ASSUMED, gpu

    try:
        return tuned_device()
    except Unsupported:
        log.warning("no GPU that PyTorch can use here: this is the plan for %s", ASSUMED)
        return gpu(ASSUMED)
