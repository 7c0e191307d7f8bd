"""A stand-in for the GPU that Triton launches on: kernels are compiled for an H200, and go no
further than the driver."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from triton.backends.compiler import GPUTarget

from tilegen import cpu


class StandInDriver:
    """A driver for Triton, which notes launches if `notes` is set."""

    def __init__(self, *, notes: bool) -> None:
        self.launches: list[tuple[Any, ...]] = []
        """Launches that were noted: (grid, name of the kernel, values of all arguments)."""
        self.launcher_cls = _noting(self.launches) if notes else _silent
        self.utils = SimpleNamespace(
            load_binary=lambda name, code, shared, device: (1, 2, 64, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
        )

    def get_current_target(self) -> GPUTarget:
        """Return the target that kernels are compiled for."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Return the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0


@contextmanager
def stand_in(*, notes: bool = False) -> Generator[StandInDriver]:
    """Put a stand-in where Triton looks for its driver; CPU tensors go to it as those of a GPU."""
    from triton.runtime import driver

    made = StandInDriver(notes=notes)
    with (
        mock.patch.object(driver, "_active", made),
        mock.patch.object(cpu, "is_interpreting", return_value=True),  # compiles nothing here
    ):
        yield made


def _silent(source: Any, metadata: Any) -> Any:
    return lambda *launch: None


def _noting(launches: list[tuple[Any, ...]]) -> Any:
    """Return a class of launchers as Triton's: of a kernel, called with grid, stream, function,
    metadata and hooks before the arguments."""

    def made(source: Any, metadata: Any) -> Any:
        def launch(grid: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            _, _, _, _, *values = rest
            launches.append((grid, metadata.name, values))

        return launch

    return made
