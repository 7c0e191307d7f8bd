"""Fixtures of the tests of threads."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Have launches take two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def in_a_child() -> Callable[[Callable[[], bool]], bool]:
    """Return a function that calls another in a forked child, which it ends after a minute."""

    def run(is_right: Callable[[], bool]) -> bool:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks under threads
            child = os.fork()
        if child == 0:
            status = 1  # also where the function raises
            try:
                status = 0 if is_right() else 1
            finally:
                os._exit(status)
        deadline = threading.Timer(60, os.kill, (child, 9))
        deadline.start()
        _, status = os.waitpid(child, 0)
        deadline.cancel()
        return os.waitstatus_to_exitcode(status) == 0

    return run
