"""Objects in separate processes with a memory limit, called from outside.

A case that does not fit ends its own process, and is a row. Processes that are timed in turns wait
without using a core.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from tilegen.comparing import memory

NO_MEMORY = ("can't allocate memory", "out of memory", "bad_alloc", "cannot allocate memory")
"""Parts of messages of allocations that failed."""


class DoesNotFit(Exception):
    """The object needed more memory than its process may take."""


class Failed(Exception):
    """The object raised another exception, or its process ended."""


class Worker:
    """An object in a process of its own; `with` ends the process."""

    def __init__(
        self, make: Callable[..., object], *arguments: Any, gib: float, device: str, threads: int
    ) -> None:
        """Start a process with at most `gib` GiB beyond PyTorch itself, and make the object there.

        Raises DoesNotFit and Failed.
        """
        context = multiprocessing.get_context("spawn")
        self._to, child = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(child, make, arguments, gib, device, threads), daemon=True
        )
        self._process.start()
        child.close()
        try:
            self._receive()
        except BaseException:
            self.close()
            raise

    def call(self, name: str, *arguments: Any) -> Any:
        """Return the result of a method. Raises DoesNotFit and Failed; the process is then over."""
        try:
            self._to.send((name, arguments))
        except OSError:
            raise Failed(self._how_it_ended()) from None
        return self._receive()

    def close(self) -> None:
        """End the process."""
        self._to.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self) -> Any:
        try:
            kind, value = self._to.recv()
        except (EOFError, OSError):
            raise Failed(self._how_it_ended()) from None
        if kind == "result":
            return value
        self.close()
        raise (DoesNotFit if kind == "memory" else Failed)(value)

    def _how_it_ended(self) -> str:
        self._process.join(timeout=5)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"the process ended by {signal.Signals(-code).name}"
        return f"the process ended with {code}"


def _serve(
    to: Connection,
    make: Callable[..., object],
    arguments: tuple[Any, ...],
    gib: float,
    device: str,
    threads: int,
) -> None:
    """Create the object and serve calls until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    try:
        torch.set_num_threads(threads)
        _ = torch.ones(256, 256) @ torch.ones(
            256, 256
        )  # threads have their stacks before the limit
        memory.limit(gib * memory.GIB, device)
        served = make(*arguments)
        to.send(("result", None))
        while True:
            name, given = to.recv()
            to.send(("result", getattr(served, name)(*given)))
    except EOFError:
        return
    except Exception as error:
        with contextlib.suppress(OSError):
            to.send(_told(error))


def _end_with_the_parent() -> None:
    """End this process when its parent has ended, whatever it computes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _told(error: Exception) -> tuple[str, str]:
    """Return the kind of an error and a line about it."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    kinds = (MemoryError, torch.OutOfMemoryError)
    if isinstance(error, kinds) or any(part in str(error).lower() for part in NO_MEMORY):
        return "memory", text
    traceback.print_exception(error)
    return "error", text
