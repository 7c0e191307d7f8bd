"""CPU time of a warm call of `attention` up to the driver, beside SDPA.

Triton and its compiler are real and only the driver is a stand-in, so no GPU is needed. Tensors are
on the CPU, where PyTorch allocates as fast as from a GPU's cache. SDPA computes one row of one
head, nearly all of it dispatch. Times are of this thread alone, so other programs hardly disturb
them, and ratios are comparable between machines.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import cycle
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import scaled_dot_product_attention

import tilegen
from benchmarks.stand_in import StandInDriver, stand_in
from tilegen import attention, attention_paged, cpu, pipeline
from tilegen.bounded_cache import BoundedCache
from tilegen.choose.choice import Shortlist
from tilegen.emit import kernel_files
from tilegen.environment import current
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.operators.call import crossing
from tilegen.runtime import paged_call, plans
from tilegen.task import KernelTask

BASELINE = "SDPA of one row"
PLAIN_CALLS = {"kv_lengths": "the same without", "paged": "a plain call"}
"""The call of `attention` to compare a kind of call with, by the start of its name."""
TILE = TileConfig(block_m=16, block_n=16)
SPLIT: dict[Kernel, TileConfig] = {
    "fwd_split": TileConfig(block_m=16, block_n=16, split_kv=256),
    "fwd_paged": TileConfig(block_m=4, heads=4, block_n=16, split_kv=256),
    "fwd_combine": TileConfig(block_m=1, block_n=16),
}
HEADS, ROWS, HEAD_DIM = 8, 16, 64
REQUESTS, PAGE = 4, 16
LONGEST = 2**13
"""Keys of the longest cache that is decoded from; each step has another length."""


def kinds() -> dict[str, Callable[[], object]]:
    """Return all kinds of measured calls, by name."""
    q, k, v = (torch.zeros(1, HEADS, ROWS, HEAD_DIM) for _ in "qkv")
    trained = q.clone().requires_grad_()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    one_row, cache = (torch.zeros(1, HEADS, rows, HEAD_DIM) for rows in (1, LONGEST))
    *others, same = [cache[:, :, :length] for length in range(ROWS, LONGEST)]
    longer = cycle(others)
    lengths = torch.tensor([ROWS - 3])
    short = lengths.int()
    causal, window = tilegen.causal(), tilegen.sliding_window(7, 0)

    crossed_mask = crossing(causal, None, None)
    crossed = crossed_mask.text, crossed_mask.tensors, HEAD_DIM**-0.5, 0.0, None
    operator = torch.ops.tilegen.forward

    def decode() -> object:
        keys = next(longer)
        return attention(one_row, keys, keys)

    return {
        "forward": lambda: attention(q, k, v, mask=causal),
        "with gradients": lambda: attention(trained, k, v, mask=causal),
        "forward and backward": differentiated(partial(attention, *leaves, mask=causal), leaves),
        "as an operator": lambda: operator(q, k, v, *crossed),
        "as an operator, with gradients": lambda: operator(trained, k, v, *crossed),
        "full": lambda: attention(q, k, v),
        "window": lambda: attention(q, k, v, mask=window),
        "kv_lengths": lambda: attention(q, k, v, kv_lengths=short),
        "kv_lengths of 64 bits": lambda: attention(q, k, v, kv_lengths=lengths),
        "decode, the same length": lambda: attention(one_row, same, same),
        "decode, a new length": decode,
        **_paged_kinds(),
    }


def _paged_kinds() -> dict[str, Callable[[], object]]:
    """Return calls over pages: of one query for each request, packed, and of a tree of drafts."""
    pages = torch.zeros(2, 32, PAGE, HEADS // 4, HEAD_DIM)
    table = torch.arange(32, dtype=torch.int32).view(REQUESTS, 8)
    lengths = torch.tensor([100, 3, 50, 128], dtype=torch.int32)
    starts = torch.arange(REQUESTS + 1, dtype=torch.int32)
    q = torch.zeros(REQUESTS, HEADS, 1, HEAD_DIM)
    packed = q.transpose(1, 2).flatten(0, 1)
    cache = *pages, table, lengths
    options: dict[str, Any] = {"q_starts": starts, "max_q_length": 1}
    causal = tilegen.causal("bottom_right")
    tree = tilegen.tree(torch.ones(1, 1, dtype=torch.bool))
    return {
        "paged": lambda: attention_paged(q, *cache),
        "paged, packed queries": lambda: attention_paged(packed, *cache, mask=causal, **options),
        "paged, a tree": lambda: attention_paged(packed, *cache, mask=tree, **options),
    }


def sdpa(*, gradients: bool) -> Callable[[], object]:
    """Return the call of SDPA to compare with."""
    row = torch.zeros(1, 1, 1, 8)
    first = row.clone().requires_grad_(gradients)
    return lambda: scaled_dot_product_attention(first, row, row)


def differentiated(
    call: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor]
) -> Callable[[], object]:
    """Return a call with its backward, from a dense gradient."""
    dout = torch.ones_like(call())
    return lambda: torch.autograd.grad(call(), leaves, dout)


@contextmanager
def as_on_a_gpu(*, notes: bool = False) -> Generator[StandInDriver]:
    """Send CPU tensors the way of GPU tensors, up to a stand-in for the driver."""

    def ranked(_: object, task: KernelTask, **__: object) -> Shortlist:
        config = SPLIT.get(task.kernel, TILE)
        return Shortlist(task, (config,), "agreement", "the benchmark")

    # As `has_values` of tensors on a GPU.
    def unseen(tensor: torch.Tensor) -> bool:
        return (not tensor.is_cpu or current().check) and not tensor.is_meta

    with (
        stand_in(notes=notes) as driver,
        mock.patch.object(import_module("tilegen.launch.changes"), "has_values", unseen),
        mock.patch.object(import_module("tilegen.masks.values"), "has_values", unseen),
        mock.patch.object(import_module("tilegen.masks.tensors"), "has_values", unseen),
        mock.patch.object(paged_call, "is_checked", unseen),
        mock.patch.multiple(cpu, serves_calls=lambda: True, is_interpreting=lambda: True),
        mock.patch.object(plans, "by_call", BoundedCache(plans.MAX_PLANS)),
        mock.patch.object(plans, "by_problem", BoundedCache(9)),
        # Triton keeps what it compiled with the functions of a module, and its launcher with that.
        mock.patch.object(kernel_files, "_modules", BoundedCache(9)),
        mock.patch.object(pipeline, "rank", ranked),
    ):
        yield driver


def microseconds(*functions: Callable[[], object], calls: int, repeats: int) -> list[float]:
    """Return the median CPU time of a call of each, measured in turns."""
    for function in functions:
        function()
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, samples in zip(functions, times, strict=True):
            for _ in range(calls // 10):  # the run before has filled the caches
                function()
            start = time.thread_time()
            for _ in range(calls):
                function()
            samples.append(1e6 * (time.thread_time() - start) / calls)
    return [statistics.median(samples) for samples in times]


def measured(*, calls: int, repeats: int) -> Generator[tuple[str, float, str, float]]:
    """Yield (name, microseconds, name and microseconds of the comparison) of each kind of call."""
    measure = partial(microseconds, calls=calls, repeats=repeats)
    with as_on_a_gpu():
        named, row = kinds(), torch.zeros(1, 1, 1, 8)
        leaves = [row.clone().requires_grad_() for _ in "qkv"]
        plain, trained, both, *times = measure(
            sdpa(gradients=False),
            sdpa(gradients=True),
            differentiated(partial(scaled_dot_product_attention, *leaves), leaves),
            *named.values(),
        )
        its_own = {"with gradients": trained, "forward and backward": both}
        for name, microseconds_ in zip(named, times, strict=True):
            what, base = BASELINE, plain
            for ending, of_ending in its_own.items():
                if name.endswith(ending):
                    what, base = f"{BASELINE}, {ending}", of_ending
            yield f"attention() up to the driver, {name}", microseconds_, what, base
            for start, plain_call in PLAIN_CALLS.items():
                if name.startswith(start):
                    whole = times[list(named).index("full")]
                    yield f"attention() up to the driver, {name}", microseconds_, plain_call, whole
