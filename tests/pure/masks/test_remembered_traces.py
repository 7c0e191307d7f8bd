"""A function that reads something else since its last call is followed, whatever it reads."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from tilegen.calls.flex import from_block_mask
from tilegen.check.reference import dense_mask
from tilegen.masks.language.evaluation import evaluate
from tilegen.runtime.call import score_of

pytestmark = pytest.mark.oldest

N, BLOCK = 24, 8
WIDTH = 3
Case = tuple[Callable[..., Any], Callable[[], Any]]
"""A mask function, and what changes something that it reads."""


def near(q: Any, k: Any) -> Any:
    return (q - k).abs() < WIDTH


def cell() -> Case:
    width = 3

    def change() -> None:
        nonlocal width
        width = 6

    return lambda b, h, q, k: q - k < width, change


def cell_of_a_nested_function() -> Case:
    width = 3

    def change() -> None:
        nonlocal width
        width = 6

    def inner(x: Any) -> Any:
        return (lambda y: y < width)(x)

    return lambda b, h, q, k: inner(q - k), change


def default() -> Case:
    def keep(b: Any, h: Any, q: Any, k: Any, width: int = 3) -> Any:
        return q - k < width

    return keep, lambda: setattr(keep, "__defaults__", (6,))


def keyword_default() -> Case:
    def keep(b: Any, h: Any, q: Any, k: Any, *, width: int = 3) -> Any:
        return q - k < width

    return keep, lambda: setattr(keep, "__kwdefaults__", {"width": 6})


def global_number() -> Case:
    return lambda b, h, q, k: q - k < WIDTH, lambda: globals().update(WIDTH=6)


def global_of_a_global_function() -> Case:
    return lambda b, h, q, k: near(q, k), lambda: globals().update(WIDTH=6)


def code() -> Case:
    def keep(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    return keep, lambda: setattr(keep, "__code__", (lambda b, h, q, k: q < k).__code__)


def attribute() -> Case:
    settings = SimpleNamespace(inner=SimpleNamespace(width=3))
    return lambda b, h, q, k: q - k < settings.inner.width, lambda: vars(settings.inner).update(
        width=6
    )


class Near:
    def __init__(self) -> None:
        self.width = 3

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.keeps(q - k)

    def keeps(self, x: Any) -> Any:
        return x < self.width


def attribute_of_its_object() -> Case:
    keep = Near()
    return keep, lambda: setattr(keep, "width", 6)


def attribute_of_the_object_of_a_method() -> Case:
    keep = Near()
    return keep.__call__, lambda: setattr(keep, "width", 6)


def list_element() -> Case:
    widths = [[3]]
    return lambda b, h, q, k: q - k < widths[0][0], lambda: widths[0].append(widths[0].pop() + 3)


def dict_element() -> Case:
    widths = {"near": 3}
    return lambda b, h, q, k: q - k < widths["near"], lambda: widths.update(near=6)


def another_tensor() -> Case:
    tables = [torch.arange(N) // 5]
    return lambda b, h, q, k: tables[0][q] == tables[0][k], lambda: tables.append(tables.pop() // 2)


def tensor_in_place() -> Case:
    table = torch.arange(N) // 5
    return lambda b, h, q, k: table[q] == table[k], lambda: table.floor_divide_(2)


def tensor_in_place_under_inference_mode() -> Case:
    with torch.inference_mode():
        table = torch.arange(N) // 5

    def change() -> None:
        with torch.inference_mode():
            table.floor_divide_(2)

    return lambda b, h, q, k: table[q] == table[k], change


def tensor_with_other_memory() -> Case:
    table = torch.arange(N) // 5
    return (
        lambda b, h, q, k: table[2:][q // 2] == table.detach()[k],
        lambda: setattr(table, "data", torch.arange(N) // 3),
    )


def derived_tensor() -> Case:
    table = torch.arange(N)
    return lambda b, h, q, k: (table // 5)[q] == (table // 5)[k], lambda: table.floor_divide_(2)


def element_that_a_tensor_picks() -> Case:
    widths, at = torch.tensor([3, 6]), torch.tensor(0)
    return lambda b, h, q, k: q - k < widths[at], lambda: at.add_(1)


def number_of_a_tensor() -> Case:
    width = torch.tensor(3)
    return lambda b, h, q, k: q - k < int(width), lambda: width.add_(3)


def numbers_of_a_tensor() -> Case:
    widths = torch.tensor([3, 4])
    return lambda b, h, q, k: q - k < widths.tolist()[0], lambda: widths.add_(3)


def array_of_a_tensor() -> Case:
    widths = torch.tensor([3, 4])
    return lambda b, h, q, k: q - k < int(widths.numpy()[0]), lambda: widths.add_(3)


def text_of_a_tensor() -> Case:
    width = torch.tensor(3)
    return lambda b, h, q, k: q - k < float(f"{width}"), lambda: width.add_(3)


def branch_on_a_tensor() -> Case:
    flag = torch.tensor(True)
    return lambda b, h, q, k: q >= k if flag else q < k, lambda: flag.logical_not_()


def number_of_a_tensor_under_inference_mode() -> Case:
    with torch.inference_mode():
        width = torch.tensor(3)

    def change() -> None:
        with torch.inference_mode():
            width.add_(3)

    return lambda b, h, q, k: q - k < width.item(), change


def attribute_of_a_tensor() -> Case:
    table: Any = torch.arange(N)
    table.width = 3
    return lambda b, h, q, k: table[q] - k < table.width, lambda: setattr(table, "width", 6)


def array() -> Case:
    widths = np.array([3])
    return lambda b, h, q, k: q - k < widths[0], lambda: widths.__iadd__(3)


def queue() -> Case:
    widths = deque([3])
    return lambda b, h, q, k: q - k < widths[0], lambda: widths.appendleft(6)


def iterator() -> Case:
    widths = [3]
    drawn = iter(widths.copy, None)
    return lambda b, h, q, k: q - k < next(drawn)[0], lambda: widths.append(widths.pop() + 3)


def cache() -> Case:
    width = functools.lru_cache(lambda: WIDTH)

    def change() -> None:
        globals().update(WIDTH=6)
        width.cache_clear()

    return lambda b, h, q, k: q - k < width(), change


def missing_global() -> Case:
    def keep(b: Any, h: Any, q: Any, k: Any) -> Any:
        return abs(q - k) < 3

    def change() -> None:
        globals().update(abs=lambda x: x)

    return keep, change


def number_type() -> Case:
    table = torch.tensor([2.0 + 1e-9 * k for k in range(N)], dtype=torch.float64)

    def keep(b: Any, h: Any, q: Any, k: Any) -> Any:
        return table[k] > torch.tensor(2 + 4e-9)

    return keep, lambda: torch.set_default_dtype(torch.float64)


def local_import() -> Case:
    def keep(b: Any, h: Any, q: Any, k: Any) -> Any:
        from tests.pure.masks import test_remembered_traces

        return q - k < test_remembered_traces.WIDTH

    return keep, lambda: globals().update(WIDTH=6)


def partial() -> Case:
    widths = [3]
    keep = functools.partial(lambda widths, b, h, q, k: q - k < widths[0], widths)
    return keep, lambda: widths.append(widths.pop() + 3)


def clock() -> Case:
    end = time.monotonic() + 0.5
    return lambda b, h, q, k: q - k < (3 if time.monotonic() < end else 6), lambda: time.sleep(0.6)


def unmade() -> tuple[Any, Callable[[], Any]]:
    """Return an object whose constructor nothing has called, and what changes that constructor."""
    widths = {"near": 3}

    class Wide:
        def __init__(self) -> None:
            self.width = widths["near"]

        @classmethod
        def made(cls) -> Any:
            return cls()

    return Wide.__new__(Wide), lambda: widths.update(near=6)


def constructor_of_the_class_of_an_object() -> Case:
    wide, change = unmade()
    return lambda b, h, q, k: q - k < wide.__class__().width, change


def constructor_by_a_class_method() -> Case:
    wide, change = unmade()
    return lambda b, h, q, k: q - k < wide.made().width, change


CASES = [
    *(cell, cell_of_a_nested_function, default, keyword_default, global_number),
    *(global_of_a_global_function, code, attribute, attribute_of_its_object),
    *(attribute_of_the_object_of_a_method, list_element, dict_element, another_tensor),
    *(tensor_in_place, tensor_in_place_under_inference_mode, tensor_with_other_memory),
    *(derived_tensor, element_that_a_tensor_picks, number_of_a_tensor, numbers_of_a_tensor),
    *(array_of_a_tensor, text_of_a_tensor, branch_on_a_tensor, attribute_of_a_tensor),
    *(number_of_a_tensor_under_inference_mode, array, queue, iterator, cache, partial, clock),
    *(constructor_of_the_class_of_an_object, constructor_by_a_class_method),
    *(missing_global, number_type, local_import),
]


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(globals(), "WIDTH", 3)
    yield
    globals().pop("abs", None)
    torch.set_default_dtype(torch.float32)


def everywhere(keep: Callable[..., Any]) -> BlockMask:
    """Return a BlockMask that asks a function for all pairs."""
    blocks = N // BLOCK
    return BlockMask.from_kv_blocks(
        torch.full((1, 1, blocks), blocks, dtype=torch.int32),
        torch.arange(blocks, dtype=torch.int32).expand(1, 1, blocks, blocks).contiguous(),
        BLOCK_SIZE=BLOCK,
        mask_mod=keep,
        seq_lengths=(N, N),
    )


def kept(keep: Callable[..., Any]) -> torch.Tensor:
    """Return PyTorch's own mask of a function."""
    # PyTorch counts the arguments of functions alone, not of methods.
    return create_mask(lambda b, h, q, k: keep(b, h, q, k), None, None, N, N, device="cpu")[0, 0]


def changed(score: Any) -> torch.Tensor:
    actual, at, zero = score_of(score), torch.arange(N), torch.zeros(1, 1, dtype=torch.int64)
    assert actual is not None
    pair = {"b": zero, "h": zero, "q": at[:, None], "k": at[None], "s": torch.zeros(N, N)}
    expr = actual.form.expression()
    return evaluate(expr, actual.captured, seqlen_q=N, seqlen_kv=N, **pair).expand(N, N)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_changed_function_is_followed(case: Callable[[], Case]) -> None:
    keep, change = case()
    block_mask = everywhere(keep)

    def score(s: Any, *pair: Any) -> Any:
        return torch.where(keep(*pair), s, s - 1)

    seen: list[torch.Tensor] = []
    for _ in range(2):
        for _ in range(2):  # the second time from memory, where it may be
            expected = kept(keep)
            seen.append(expected)
            assert torch.equal(dense_mask(from_block_mask(block_mask), N, N), expected)
            assert torch.equal(changed(score) == 0, expected)
        change()
    assert not torch.equal(seen[0], seen[-1])


def within(block_mask: Any, keep: Callable[..., Any]) -> torch.Tensor:
    """Compute the pairs that FlexAttention keeps: all pairs of whole blocks, and in listed blocks
    those that a function keeps."""
    asked = torch.zeros(N, N, dtype=torch.bool)
    whole = asked.clone()
    for actual, counts, indices in (
        (asked, block_mask.kv_num_blocks, block_mask.kv_indices),
        (whole, block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    ):
        for row, count in enumerate(counts[0, 0].tolist()):
            for column in indices[0, 0, row, :count].tolist():
                actual[row * BLOCK :, column * BLOCK :][:BLOCK, :BLOCK] = True
    return whole | (asked & kept(keep))


@pytest.mark.parametrize("inference", [False, True])
def test_blocks_and_tables_that_are_changed_in_place(inference: bool) -> None:
    """Blocks stay as they are while the tables that they were made of change, and may change by
    themselves."""
    with torch.inference_mode(inference):
        table = torch.arange(N) // 5

        def keep(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (table[q] == table[k]) & (k <= q)

        block_mask: Any = create_block_mask(keep, None, None, N, N, device="cpu", BLOCK_SIZE=BLOCK)
        seen: list[torch.Tensor] = []
        for change in (
            lambda: table.floor_divide_(2),
            lambda: block_mask.kv_num_blocks.sub_(1).clamp_(min=1),
            lambda: None,
        ):
            mask = from_block_mask(block_mask)
            assert from_block_mask(block_mask) is mask
            seen.append(within(block_mask, keep))
            assert torch.equal(dense_mask(mask, N, N), seen[-1])
            change()
        assert not torch.equal(seen[0], seen[1])
        assert not torch.equal(seen[1], seen[2])


def test_functions_that_draw_are_not_remembered() -> None:
    for draw in (torch.rand, torch.randn, lambda n: torch.zeros(n).uniform_()):
        block_mask = everywhere(lambda b, h, q, k, draw=draw: draw(N)[q] < draw(N)[k])
        assert from_block_mask(block_mask) is not from_block_mask(block_mask)


def test_functions_that_are_understood_are_remembered() -> None:
    for case in (cell, default, cell_of_a_nested_function, tensor_in_place, derived_tensor):
        keep, _ = case()
        block_mask = everywhere(keep)
        assert from_block_mask(block_mask) is from_block_mask(block_mask), case.__name__
