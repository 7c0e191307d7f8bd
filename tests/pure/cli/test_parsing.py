"""Python's parser in several threads at a time, of CPython 3.11 too."""

from __future__ import annotations

import ast
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tilegen.parsing import collection_paused, parse_expression, parse_module

LINES = "\n".join(f"x{i} = f(a{i}[0] * (b + c * {i}), k={i})" for i in range(40))
PARSES = 60


@pytest.fixture
def busy_collector() -> Iterator[None]:
    """Collect garbage often, with a callback that lets other threads run."""

    def callback(phase: str, info: dict[str, int]) -> None:
        sum(range(50))

    threshold, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(20)
    gc.callbacks.append(callback)
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
    gc.callbacks.remove(callback)
    gc.set_threshold(*threshold)


def repeated(parse: Callable[[str], Any], text: str, depth: int) -> str:
    """Parse again and again, `depth` calls deep; threads of one depth hide each other's fault."""
    if depth:
        return repeated(parse, text, depth - 1)
    return "".join(ast.dump(parse(text))[:1] for _ in range(PARSES))


@pytest.mark.slow
def test_threads_parse_at_the_same_time(busy_collector: None) -> None:
    expression = " + ".join(f"g(y[{i}] * 2)" for i in range(150))

    def paused(text: str) -> ast.AST:
        with collection_paused():
            return ast.parse(text)  # as Triton's front end does

    work = [
        (parse_module, LINES),
        (parse_expression, expression),
        (paused, LINES),
        (parse_module, LINES),
    ]
    with ThreadPoolExecutor(len(work)) as pool:
        jobs = [
            pool.submit(repeated, parse, text, 3 + 6 * place)
            for place, (parse, text) in enumerate(work)
        ]
        assert all(len(job.result()) == PARSES for job in jobs)


def test_collection_resumes_when_the_last_thread_leaves() -> None:
    assert gc.isenabled()
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collection_paused():
            entered.set()
            leave.wait(60)

    with collection_paused():
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(60)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_collection_stays_off_where_the_user_turned_it_off() -> None:
    gc.disable()
    try:
        parse_module("x = 1")
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("parse", [parse_module, parse_expression])
def test_other_texts_are_syntax_errors(parse: Callable[[str], Any]) -> None:
    with pytest.raises(SyntaxError):
        parse("x +")
    assert gc.isenabled()
