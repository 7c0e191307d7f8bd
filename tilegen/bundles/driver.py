"""Binaries in the CUDA driver, by NVIDIA's own Python bindings."""

# cuda-bindings is compiled and has no types:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from tilegen.errors import BuildFailed, Unsupported

MAX_STATIC_SHARED = 48 * 1024
"""Shared memory that a program may use without asking [bytes]."""

_thread = threading.local()


class Function:
    """A kernel of a binary, loaded once for all devices of the process."""

    def __init__(self, code: bytes, name: str, shared_bytes: int) -> None:
        """Raises Unsupported without driver or bindings, BuildFailed for code it refuses."""
        self._driver = driver()
        self._shared_bytes = shared_bytes
        self._library: Any = self._call("cuLibraryLoadData", code, [], [], 0, [], [], 0)
        kernel: Any = self._call("cuLibraryGetKernel", self._library, name.encode())
        self._kernel = kernel
        # The driver takes a kernel wherever it takes a function of the current context.
        self._function = self._driver.CUfunction(int(kernel))
        self._prepared: set[int] = set()
        self._lock = threading.Lock()

    def launch(self, grid: int, threads: int, parameters: int, *, device: int, stream: int) -> None:
        """Run `grid` programs of `threads` on a stream of the current device; `parameters` is the
        address of an array of their addresses."""
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
        """Give a new thread a context, as PyTorch does unless it had nothing to ask the driver."""
        if not int(self._call("cuCtxGetCurrent")):
            context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", device))
            self._call("cuCtxSetCurrent", context)
        _thread.has_context = True

    def _prepare(self, device: int) -> None:
        """Allow the kernel its shared memory on a device."""
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
    """Return `cuda.bindings.driver`, ready for use. Raises Unsupported where there is none."""
    try:
        from cuda.bindings import driver as bindings
    except ImportError:
        raise Unsupported(
            "a bundle is launched through NVIDIA's Python bindings of the CUDA driver, which are "
            "not installed: pip install 'tilegen[bundle]'"
        ) from None
    try:
        (error,) = bindings.cuInit(0)
    except RuntimeError as problem:  # there is no driver, or not this function in it
        raise Unsupported(f"expected NVIDIA's driver: {' '.join(str(problem).split())}") from None
    if error:
        raise Unsupported(f"expected a GPU for NVIDIA's driver: {_named(bindings, error)}")
    return bindings


def _named(bindings: Any, error: Any) -> str:
    _, text = bindings.cuGetErrorString(error)
    return f"{error.name}, {text.decode() if text else 'no description'}"
