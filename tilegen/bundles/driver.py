"""Binaries in the CUDA driver, through NVIDIA's Python bindings."""

# cuda-bindings is compiled and has no types:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from tilegen.errors import BuildFailed, Unsupported

MAX_STATIC_SHARED = 48 * 1024
"""Shared memory that a program may use without an attribute of its kernel [bytes]."""

_thread = threading.local()


class DriverFunction:
    """A kernel of a binary, loaded once for all devices of the process."""

    def __init__(self, code: bytes, name: str, shared_bytes: int) -> None:
        """Load the code. Raises Unsupported without a driver or its bindings, and BuildFailed if
        the driver rejects the code."""
        self._driver = driver()
        self._shared_bytes = shared_bytes
        self._library: Any = self._call("cuLibraryLoadData", code, [], [], 0, [], [], 0)
        kernel: Any = self._call("cuLibraryGetKernel", self._library, name.encode())
        self._kernel = kernel
        # cuLaunchKernel takes a kernel's handle in place of a function of the current context.
        self._function = self._driver.CUfunction(int(kernel))
        self._prepared: set[int] = set()
        self._lock = threading.Lock()

    def launch(self, grid: int, threads: int, parameters: int, *, device: int, stream: int) -> None:
        """Launch `grid` programs of `threads` threads on a stream of the current device.

        `parameters` is the address of an array, which holds the address of each argument.
        """
        if device not in self._prepared:
            self._prepare(device)
        if not hasattr(_thread, "has_context"):
            self._enter(device)
        (error,) = self._driver.cuLaunchKernel(
            *(self._function, grid, 1, 1, threads, 1, 1),
            *(self._shared_bytes, stream, parameters, 0),
        )
        if error:
            raise BuildFailed(f"cuLaunchKernel failed: {_named(self._driver, error)}")

    def _enter(self, device: int) -> None:
        """Give a new thread the primary context: PyTorch sets it only when it calls the driver."""
        if not int(self._call("cuCtxGetCurrent")):
            context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", device))
            self._call("cuCtxSetCurrent", context)
        _thread.has_context = True

    def _prepare(self, device: int) -> None:
        """Raise the kernel's limit of shared memory on a device."""
        with self._lock:
            if self._shared_bytes > MAX_STATIC_SHARED:
                attribute = self._driver.CUfunction_attribute
                which = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                handle: Any = self._call("cuDeviceGet", device)
                self._call("cuKernelSetAttribute", which, self._shared_bytes, self._kernel, handle)
            self._prepared.add(device)

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *results = getattr(self._driver, name)(*arguments)
        if error:
            raise BuildFailed(f"{name} failed: {_named(self._driver, error)}")
        return results[0] if results else None


@cache
def driver() -> Any:
    """Import and initialise `cuda.bindings.driver`. Raises Unsupported without bindings, driver or
    GPU."""
    try:
        from cuda.bindings import driver as bindings
    except ImportError:
        raise Unsupported(
            "a bundle is launched through NVIDIA's Python bindings of the CUDA driver, which are "
            "not installed: pip install 'tilegen[bundle]'"
        ) from None
    try:
        (error,) = bindings.cuInit(0)
    except RuntimeError as problem:  # no driver, or a driver without this function
        raise Unsupported(f"expected NVIDIA's driver: {' '.join(str(problem).split())}") from None
    if error:
        raise Unsupported(f"expected a GPU for NVIDIA's driver: {_named(bindings, error)}")
    return bindings


def _named(bindings: Any, error: Any) -> str:
    _, text = bindings.cuGetErrorString(error)
    return f"{error.name}, {text.decode() if text else 'no description'}"
