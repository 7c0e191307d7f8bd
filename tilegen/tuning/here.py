"""The device that this machine tunes for."""

from __future__ import annotations

from tilegen import cpu
from tilegen.cpus.host import current_cpu
from tilegen.device import Device
from tilegen.errors import Unsupported
from tilegen.gpus.spec import detect


def tuned_device() -> Device:
    """Return the device that this machine tunes for: the local GPU, or the processor. Raises
    Unsupported if no kernels can be compiled for the processor."""
    if (gpu := detect()) is not None:
        return gpu
    if reason := cpu.why_not():
        raise Unsupported(
            f"tuning measures on a GPU, and PyTorch sees none, or on the processor, but {reason}; "
            "take the model's choice: tilegen propose"
        )
    return current_cpu()
