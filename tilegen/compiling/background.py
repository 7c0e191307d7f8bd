"""Threads that do not delay the exit of their process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """Threads that run calls in the order of submission.

    A process waits for the threads of `concurrent.futures` before it exits. After Ctrl-C, that may
    be a search of seconds, or a compiler that hangs. It does not wait for these threads.
    """

    def __init__(self, threads: int) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._is_closed = False
        self._threads = threads
        for _ in range(threads):
            threading.Thread(target=self._work, name="tilegen-background", daemon=True).start()

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Submit a call; return the future of its result."""
        future: Future[T] = Future()
        self._calls.put((future, partial(function, *arguments)))
        return future

    def close(self) -> None:
        """Cancel calls that have not begun, and end the threads after their present calls."""
        self._is_closed = True
        for _ in range(self._threads):
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, run = call
            if self._is_closed or not future.set_running_or_notify_cancel():
                future.cancel()
                continue
            try:
                future.set_result(run())
            except BaseException as error:  # `Future.result` raises it in its caller
                future.set_exception(error)
