"""A warm call over pages takes the road of a plain call: the same functions from the public name to
the launch, and at most twice the work."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import tilegen
from benchmarks.call_cost import as_on_a_gpu, kinds
from tilegen.calls.entry import attend
from tilegen.launch.kernels import Kernels
from tilegen.runtime import plans
from tilegen.runtime.call import facts_of
from tilegen.runtime.dispatch import plan_of, planned

PACKAGE = str(Path(tilegen.__file__).parent)
SHARED = (attend, planned, plan_of, facts_of, plans.by_call.recall, Kernels.forward)
VIEWS = {"as_strided", "transpose", "view", "reshape", "squeeze", "unsqueeze", "flatten", "select"}


def steps(call: Callable[[], object]) -> tuple[list[CodeType], list[str]]:
    """Return the functions of tilegen that a warm call enters, and the names of all functions and
    methods in C that it calls."""
    entered: list[CodeType] = []
    called: list[str] = []

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith((PACKAGE, "<launch")):
            entered.append(frame.f_code)
        elif event == "c_call":
            called.append(function.__name__)

    for _ in range(2):
        call()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered, called


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paged", "paged, packed queries"])
def test_a_paged_call_takes_the_road_of_a_plain_call(name: str) -> None:
    with as_on_a_gpu(), torch.no_grad():
        calls = kinds()
        plain, paged = steps(calls["forward"]), steps(calls[name])
    for function in SHARED:
        for entered, _ in (plain, paged):
            assert entered.count(function.__code__) == 1, function
    assert not VIEWS & {*paged[1]}
    assert len(paged[0]) <= 2 * len(plain[0])
    assert len(paged[1]) <= 2 * len(plain[1])
