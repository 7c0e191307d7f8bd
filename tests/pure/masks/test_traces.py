"""A trace is used while its function reads the same, and no longer."""

from __future__ import annotations

import functools
import gc
import sys
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask

import tilegen
from tilegen.calls.flex import from_block_mask
from tilegen.check.reference import dense_mask
from tilegen.masks import made
from tilegen.masks.score import traced
from tilegen.masks.tracing.reads import Traces
from tilegen.runtime.call import score_of

pytestmark = pytest.mark.oldest

FACTOR = 2
SETTINGS = SimpleNamespace(factor=2)
TABLE = torch.tensor([1.0, 2.0])


def doubled(value: Any) -> Any:
    return FACTOR * value


def by_global(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return doubled(s)


def by_attribute(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return SETTINGS.factor * s


def by_table(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + TABLE[h]


def by_default(s: Any, b: Any, h: Any, q: Any, k: Any, *, factor: float = 2) -> Any:
    return factor * s


class Slotted:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 2

    def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.factor * s


class Scaled(torch.nn.Module):
    kind = 1

    def __init__(self) -> None:
        super().__init__()
        self.factor = 2
        self.names = {"shift": 0}
        self.bias = torch.nn.Parameter(torch.zeros(2))

    def forward(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.change(s + self.bias[h])

    def change(self, s: Any) -> Any:
        return self.factor * s * self.kind + self.names["shift"]


@dataclass(frozen=True)
class Shift:
    """Equal to others with the same number, and hashed by it: a table makes no difference."""

    number: int
    table: Any

    def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + self.number * self.table[h]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shift) and self.number == other.number

    def __hash__(self) -> int:
        return self.number


@dataclass
class Unhashable:
    factor: int

    def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.factor * s


def dense(mask: tilegen.Mask) -> torch.Tensor:
    return dense_mask(mask, 40, 40)


def text(score: Any) -> str:
    actual = score_of(score)
    assert actual is not None
    return actual.text


def test_a_function_that_reads_the_same_is_traced_once() -> None:
    for score in (by_global, by_table, by_default):
        assert score_of(score) is score_of(score)


def test_a_rebound_global_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before, table = text(by_global), score_of(by_table)
    monkeypatch.setitem(globals(), "FACTOR", 3)
    assert (before, text(by_global)) == ("2.0*s", "3.0*s")
    monkeypatch.setitem(globals(), "doubled", lambda value: value - 1)
    assert text(by_global) == "s-1.0"
    monkeypatch.setitem(globals(), "TABLE", TABLE.clone())
    assert score_of(by_table) != table
    assert text(by_attribute) == "2.0*s"
    monkeypatch.setattr(SETTINGS, "factor", 4)
    assert text(by_attribute) == "4.0*s"


def test_a_rebound_closure_variable_and_a_default_are_seen() -> None:
    factor, parts = 2, [1]

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        def inner(value: Any) -> Any:
            return factor * value + parts[0]

        return inner(s)

    assert text(score) == "2.0*s+1.0"
    factor = 3
    assert text(score) == "3.0*s+1.0"
    parts[0] = 0
    assert text(score) == "3.0*s"
    assert text(by_default) == "2.0*s"
    defaults = by_default.__kwdefaults__
    assert defaults is not None
    defaults["factor"] = 5
    try:
        assert text(by_default) == "5.0*s"
    finally:
        defaults["factor"] = 2


def test_changed_attributes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, slotted, plain = Scaled(), Slotted(), Unhashable(2)
    for score in (model, model.forward):
        model.factor = 2
        assert text(score) == "2.0*(s+t0[h])"
        model.factor = 3
        assert text(score) == "3.0*(s+t0[h])"
    model.names["shift"] = 1
    assert text(model) == "3.0*(s+t0[h])+1.0"
    monkeypatch.setattr(Scaled, "kind", 0)
    assert text(model) == "0.0*(s+t0[h])+1.0"
    bias = model.bias = torch.nn.Parameter(torch.ones(2))
    monkeypatch.setattr(Scaled, "kind", 1)
    actual = score_of(model)
    assert actual is not None
    assert actual.captured[0] is bias
    for item in (slotted, plain):
        assert text(item) == "2.0*s"
        item.factor = 3
        assert text(item) == "3.0*s"


class Kind(type):
    factor = 2


class Of(metaclass=Kind):
    """A class that has its number from the class of the class."""


class Made:
    def __init__(self) -> None:
        self.factor = FACTOR


class Lazy:
    @functools.cached_property
    def factor(self) -> int:
        return FACTOR


class Shown:
    def __repr__(self) -> str:
        return str(FACTOR)


class Whole(int):
    factor: int


class Several(list[int]):
    factor: int


class Named(dict[str, int]):
    def __getitem__(self, name: str) -> int:
        return FACTOR


def helper() -> int:
    return 1


def read(item: Any, name: str, reader: Any = getattr) -> Any:
    return reader(item, name)


def test_values_by_ways_that_name_no_attribute_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, several, shown, partial = Whole(1), Several([1]), Shown(), functools.partial(helper)
    texts: dict[str, Any] = {
        "getattr by another name": lambda s, *_: s * read(SETTINGS, "factor"),
        "hasattr": lambda s, *_: s * (3 if hasattr(SETTINGS, "other") else 2),
        "dir": lambda s, *_: s * (3 if "other" in dir(SETTINGS) else 2),
        "a class of a class": lambda s, *_: s * Of.factor,
        "a new object": lambda s, *_: s * Made().factor,
        "a cached property": lambda s, *_: s * Lazy().factor,
        "a text": lambda s, *_: s * int(repr(shown)),
        "an integer's attribute": lambda s, *_: s * whole.factor,
        "a list's attribute": lambda s, *_: s * several.factor,
        "a dict of another kind": lambda s, *_: s * Named()["any"],
        "a function's attribute": lambda s, *_: s * vars_of(helper),
        "a partial's attribute": lambda s, *_: s * vars_of(partial),
        "all modules": lambda s, *_: s * sys.modules[__name__].FACTOR,
    }
    holders: tuple[Any, ...] = (whole, several, helper, partial)
    for holder in holders:
        monkeypatch.setattr(holder, "factor", 2, raising=False)
    assert {text(one) for one in texts.values()} == {"2.0*s"}
    for holder in (*holders, SETTINGS, Kind):
        monkeypatch.setattr(holder, "factor", 3)
    monkeypatch.setattr(SETTINGS, "other", 1, raising=False)
    monkeypatch.setitem(globals(), "FACTOR", 3)
    assert {name: text(one) for name, one in texts.items()} == dict.fromkeys(texts, "3.0*s")


def vars_of(item: Any) -> int:
    return item.factor


class Held:
    """A number that is read by an operator, which names no attribute."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __getitem__(self, name: str) -> int:
        return self.factor


def test_functions_that_cannot_be_compared_are_traced_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    array, queue, held = np.array([2]), deque([2]), Held(2)
    view, get = vars(SETTINGS).values(), vars(SETTINGS).get
    named, width = "factor", functools.lru_cache(lambda: FACTOR)
    texts: dict[str, Any] = {
        "an array": lambda s, *_: s * int(array[0]),
        "a queue": lambda s, *_: s * queue[0],
        "an item": lambda s, *_: s * held["factor"],
        "getattr": lambda s, *_: s * getattr(SETTINGS, "factor"),  # noqa: B009
        "getattr of a name": lambda s, *_: s * getattr(SETTINGS, named),
        "vars": lambda s, *_: s * vars(SETTINGS)["factor"],
        "a cache": lambda s, *_: s * width(),
        "a view": lambda s, *_: s * next(iter(view)),
        "a method": lambda s, *_: s * get("factor"),
        "an import": _importing,
    }
    assert {text(one) for one in texts.values()} == {"2.0*s"}
    array[0] = queue[0] = held.factor = 3
    monkeypatch.setattr(SETTINGS, "factor", 3)
    monkeypatch.setitem(globals(), "FACTOR", 3)
    width.cache_clear()
    assert {name: text(one) for name, one in texts.items()} == dict.fromkeys(texts, "3.0*s")


def _importing(s: Any, *_: Any) -> Any:
    from tests.pure.masks.test_traces import FACTOR as factor  # noqa: N811

    return s * factor


def test_equal_objects_have_traces_of_their_own() -> None:
    tables = torch.ones(2), torch.zeros(2)
    left, other = (Shift(1, table) for table in tables)
    assert left == other
    results = [score_of(shift) for shift in (left, other)]
    assert all(
        score is not None and score.captured[0] is table
        for score, table in zip(results, tables, strict=True)
    )


def test_objects_that_cannot_be_hashed_are_scores() -> None:
    q = torch.randn(1, 2, 9, 16)
    for score in (Unhashable(2), Shift(1, torch.ones(2)), Slotted()):
        out = tilegen.attention(q, q, q, score=score)
        expected = 1.0 if isinstance(score, Shift) else 2.0
        torch.testing.assert_close(out, tilegen.attention(q, q, q, scale=expected / 4))


def test_a_block_mask_with_another_mask_mod_is_another_mask() -> None:
    window = 3

    def near(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k < window

    block_mask = create_block_mask(near, None, None, 40, 40, device="cpu")
    first = from_block_mask(block_mask)
    assert from_block_mask(block_mask) is first
    window = 5
    assert not torch.equal(
        dense_mask(from_block_mask(block_mask), 40, 40), dense_mask(first, 40, 40)
    )
    block_mask.mask_mod = and_masks(near, lambda b, h, q, k: q >= k)
    expected = tilegen.causal() & tilegen.sliding_window(4, None)
    assert torch.equal(
        dense_mask(from_block_mask(block_mask), 40, 40), dense_mask(expected, 40, 40)
    )
    window = 2
    assert dense(from_block_mask(block_mask)).sum(1).max() == 2


def test_traces_keep_nothing_alive_and_are_few() -> None:
    traces = Traces(traced, size=3)  # a score holds what its function captures
    model, factor = Scaled(), 2

    def made() -> Any:
        return lambda s, b, h, q, k: factor * s

    score = made()
    for item in (model, model.forward, score):
        traces(item)
    assert len(traces) == 1
    gone = ref(model), ref(score)
    del model, score, item
    gc.collect()
    assert [one() for one in gone] == [None, None]
    assert len(traces) == 0
    functions = [made() for _ in range(5)]
    for item in functions:
        traces(item)
    assert len(traces) == 3


def test_objects_that_a_function_reads_may_be_cyclic() -> None:
    held: list[Any] = [1]
    held.append(held)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * held[0] if s is not score else held

    assert text(score) == "s"
    held[0] = 2
    assert text(score) == "2.0*s"


def test_functions_are_marked_as_torch_marks_them() -> None:
    def mine() -> int:
        return 1

    def theirs() -> int:
        return 1

    assert vars(made.assume_constant_result(mine)) == vars(
        torch.compiler.assume_constant_result(theirs)
    )
