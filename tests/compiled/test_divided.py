"""The keys of requests divided over their splits: right for lengths far below what the grid is made
for, in as many splits as are meant, and moving the bytes that the model counts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import pytest
import torch

import tilegen
from tests.support.counted import counted, predicted
from tests.support.splits import COMBINE
from tilegen import cpu
from tilegen.check.reference import Inputs
from tilegen.check.verification import judge_all, require
from tilegen.emit.render import render
from tilegen.errors import WrongResult
from tilegen.kernels import passes
from tilegen.kernels.config import TileConfig
from tilegen.kernels.layout import public_lse
from tilegen.kernels.split_kv import Requests
from tilegen.launch.binding import BoundKernel
from tilegen.masks import Mask, causal, from_bool, global_tokens, sliding_window, tree
from tilegen.masks.form import Shape
from tilegen.masks.score import Score, alibi, sinks, softcap
from tilegen.masks.tensors import score_tensors
from tilegen.problem import AttentionProblem

CAPACITY = 2048
LENGTHS = (1, 0, 33, 600, 1000, 64, CAPACITY)
QUERIES = (1, 2, 5, 9, 1, 0, 9)
PARENTS = torch.tensor([-1, 0, 0, 0, 1, 1, 2, 4, 6])
BOTTOM = causal("bottom_right")
SLOPES, SINKS = torch.tensor([1.0, 0.5, 0.25, 0.125]), torch.tensor([0.5, -1.0, 2.0, 0.0])


@dataclass(frozen=True)
class Batch:
    """Requests of given queries and keys, in pages of a cache that has room for `problem`'s."""

    problem: AttentionProblem
    config: TileConfig
    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    mask: Mask
    score: Score | None = None
    change: Callable[[str], str] = str
    """The change of the first kernel's text."""

    @classmethod
    def of(cls, text: str, config: str, lengths: Any, queries: Any, **value: Any) -> Batch:
        """Return the batch; `text` is the problem without batch, mask and score."""
        problem = AttentionProblem.parse(f"b{len(lengths)} {text}")
        mask, score = value.setdefault("mask", problem.mask), value.get("score")
        problem = replace(problem, mask=mask.stand_in, score=score and score.form)
        return cls(problem, TileConfig.parse(config), tuple(lengths), tuple(queries), **value)

    def launch(self, name: str, config: TileConfig, q: Any, reads: Any) -> Any:
        kernel = render(self.problem, config, name, aligned=False)
        if name == "fwd_paged" and (source := self.change(kernel.source)) != kernel.source:
            kernel = replace(
                kernel, source=source, digest=f"{kernel.digest}-{crc32(source.encode())}"
            )
        bound = BoundKernel(cpu.executable(kernel, q.device).launch, self.mask, name, config)
        return bound.given(self.mask, Shape(*self.problem.shape.by_axis.values()), q.device, reads)

    def requests(self, table: torch.Tensor) -> Requests:
        starts = torch.tensor([0, *itertools.accumulate(self.queries)], dtype=torch.int32)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        return Requests(table, lengths, starts, self.problem.seqlen_q, self.problem.seqlen_kv)

    def run(self) -> tuple[list[Inputs], list[dict[str, torch.Tensor]], torch.Tensor]:
        """Return the inputs and results of each request, and the partial lse of all."""
        p, torch_dtype = self.problem, {"fp16": torch.float16, "fp32": torch.float32}
        generator = torch.Generator().manual_seed(1)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(torch_dtype[p.dtype])

        pages = [-(-length // p.page) for length in self.lengths]
        order = torch.randperm(sum(pages) + 1, generator=generator).int()
        table = torch.full((len(pages), -(-p.seqlen_kv // p.page)), 10**6, dtype=torch.int32)
        k = randn(sum(pages) + 1, p.num_heads_kv, p.page, p.head_dim_qk)
        v = k[..., : p.head_dim_v] if p.latent else randn(*k.shape[:3], p.head_dim_v)
        k[order[-1]], v[order[-1]] = float("nan"), float("nan")  # a page of nobody
        q = randn(1, p.num_heads_q, sum(self.queries), p.head_dim_qk)
        results, used, first = list[Inputs](), 0, 0
        for i, (length, rows) in enumerate(zip(self.lengths, self.queries, strict=True)):
            mine = order[used : used + pages[i]]
            used, table[i, : pages[i]] = used + pages[i], mine
            if rest := -length % p.page:
                k[mine[-1], :, p.page - rest :] = float("nan")
                v[mine[-1], :, p.page - rest :] = float("nan")
            own = (x[mine].transpose(0, 1).flatten(1, 2)[None, :, :length] for x in (k, v))
            query = q[:, :, first : first + rows]
            dout = torch.zeros(*query.shape[:3], p.head_dim_v, dtype=q.dtype)
            results.append(Inputs(query, *own, dout))
            first += rows
        by_name: dict[str, Any] = {}
        reads = score_tensors(self.score.captured, self.score.sink_logits) if self.score else {}
        first_of_two = self.launch("fwd_paged", self.config, q, reads)

        def splits(*given: Any) -> Any:
            by_name["partials"] = first_of_two(*given)
            return by_name["partials"]

        launches = {
            "fwd_paged": splits,
            "fwd_combine": self.launch("fwd_combine", COMBINE, q, reads),
        }
        scale = p.head_dim_qk**-0.5
        out, lse = passes.forward(
            launches, q, k, v, scale, panel_rows=1, requests=self.requests(table)
        )
        of_each = [x.split(list(self.queries), 2) for x in (out, public_lse(lse))]
        gets = [{"out": a, "lse": b} for a, b in zip(*of_each, strict=True)]
        return results, gets, by_name["partials"][1]

    def check(self) -> None:
        """Raise WrongResult if a request's result differs from attention over its keys."""
        scale = self.problem.head_dim_qk**-0.5
        inputs, gets, _ = self.run()
        for passed, get in zip(inputs, gets, strict=True):
            rows, length = passed.q.shape[2], passed.k.shape[2]
            if not rows:
                continue
            if not length:
                if get["out"].any() or (self.score is None and get["lse"].isfinite().any()):
                    raise WrongResult("a request without keys got something")
                continue
            mask = self.mask
            if "tree" in self.problem.mask.notation:  # as dense attention has it, spelt out
                mask = drafted(rows, length)
            require(judge_all(get, passed, scale, mask=mask, score=self.score))

    def splits(self) -> list[int]:
        """Return in how many splits each request has keys; in each for every head and row alike."""
        _, _, lse = self.run()
        counts = (lse != float("-inf")).sum(2)  # (1, heads, queries)
        return [int(one.unique()) for one in counts.split(list(self.queries), 2) if one.numel()]


def drafted(rows: int, length: int) -> Mask:
    """Return the mask of a tree as a table of all keys."""
    keep = torch.ones(rows, length, dtype=torch.bool)
    keep[:, length - rows :] = tilegen.ancestors(PARENTS)
    return from_bool(keep)


# --------------------------------------------------------------------------------------------------
# Results

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("d16 fp16", {}),
    "causal": ("d32/16 fp32", {"mask": BOTTOM}),
    "window": ("d16 fp16", {"mask": BOTTOM & sliding_window(300, 0, "bottom_right")}),
    "narrow window": ("d16 fp32", {"mask": sliding_window(20, 5, "bottom_right")}),
    "several": ("d16 fp16", {"mask": global_tokens(40) | sliding_window(90, 9)}),
    "tree": ("d16 fp32", {"mask": tree(PARENTS)}),
    "softcap": ("d16 fp16", {"mask": BOTTOM, "score": softcap(3.0)}),
    "sinks": ("d16 fp32", {"mask": BOTTOM, "score": sinks(SINKS)}),
    "alibi": ("d16 fp32", {"mask": BOTTOM, "score": alibi(SLOPES)}),
    "latent": ("d48/32 fp16", {"mask": BOTTOM}),
}


def case(name: str, keys: int, page: int, **value: Any) -> Batch:
    dims, more = CASES[name]
    heads = "hq4 hkv1" if name == "latent" else "hq4 hkv2"
    tile = {"latent": "m4h4", "alibi": "m16"}.get(name, "m8h2")
    latent = " latent" * (name == "latent")
    text = f"{heads} q9 kv{CAPACITY} {dims} full page{page}{latent}"
    lengths, queries = LENGTHS, QUERIES
    if name == "tree":  # as many tokens for each request as the tree has
        lengths, queries = (len(PARENTS), 33, 600, 1001), (len(PARENTS),) * 4
    return Batch.of(text, f"{tile}n32k{keys}w4s2", lengths, queries, **more, **value)


@pytest.mark.parametrize(
    "name, keys",
    [*zip(CASES, itertools.cycle([64, 256, CAPACITY])), ("causal", 64), ("causal", CAPACITY)],
)
def test_requests_far_below_the_capacity(name: str, keys: int) -> None:
    """In 32 splits, in 8 and in one, in pages smaller and larger than a tile."""
    case(name, keys, 16 if keys == 64 else 64).check()


@pytest.mark.parametrize("page", [1, 32, 256])
def test_pages(page: int) -> None:
    case("causal", 256, page).check()


# --------------------------------------------------------------------------------------------------
# How many splits


@dataclass(frozen=True)
class Count:
    """The splits of requests of 600 keys, 19 tiles, and of 20, in a grid for 4096 keys."""

    splits: list[int]
    config: str
    longest_q: int = 1
    """What the grid is made for, too: programs of 16 queries."""
    values: int = 16
    mask: str | Mask = "full"
    more: str = ""

    def found(self, change: Callable[[str], str] = str) -> list[int]:
        named: str = self.mask if isinstance(self.mask, str) else "full"
        given = {} if named is self.mask else {"mask": self.mask}
        text = f"hq1 hkv1 q{self.longest_q} kv4096 d16/{self.values} fp32 {named}{self.more} page16"
        return Batch.of(text, self.config, (600, 20), (1, 1), change=change, **given).splits()


ENDS = tilegen.predicate(lambda b, h, q, k: (k < 40) | (k >= 500))
COUNTS = {
    "a tile each": Count([19, 1], "m16n32k64w4s2"),
    "all that there are": Count([4, 1], "m16n32k1024w4s2"),  # of 5 tiles
    "as many as fill a GPU": Count([4, 1], "m16n32k256w4s2", longest_q=512),  # of 64 programs each
    "of as many keys as can be": Count([5, 1], "m16n32k128w4s2", longest_q=2048),  # 4 tiles
    "of small results": Count([2, 1], "m16n32k1024w4s2", longest_q=2048, values=8),  # 11 tiles
    "what a window leaves": Count([7, 1], "m16n32k512w4s2", mask="window(199,0,bottom_right)"),
    "all keys": Count([3, 1], "m16n32k512w4s2", mask=ENDS),  # of 7 splits of 3 tiles
    "batch-invariant": Count([3, 1], "m16n32k256w4s2", more=" invariant"),
}


@pytest.mark.parametrize("name", COUNTS)
def test_the_work_is_divided(name: str) -> None:
    assert COUNTS[name].found() == COUNTS[name].splits


# --------------------------------------------------------------------------------------------------
# Mutations

MUTATIONS = {
    "no usual size": (r"(?<=USUAL_TILES = tl.constexpr\()\d+", "9999"),
    "always the usual size": (r"tl.cdiv\(tiles, splits_to_fill\)", "9999"),
    "a GPU is always full": (r"(?<=FILLING = tl.constexpr\()\d+", "1"),
    "of all programs": (r"tl.num_programs\(0\) // num_splits", "tl.num_programs(0)"),
    "keys in no split": (r"tl.cdiv\(tiles, num_splits\)", "tiles // num_splits"),
    "the last tile left out": (r"tile_lo \+ tiles_of_split", "tile_lo + tiles_of_split - 1"),
    "a tile twice": (r"tile_lo \+ tiles_of_split", "tile_lo + tiles_of_split + 1"),
    "beyond the end": (
        r"tl.minimum\(tile_lo \+ tiles_of_split, tile_hi\)",
        "tile_lo + tiles_of_split",
    ),
    "from the first key": (r"tile_lo \+ split \* tiles_of_split", "split * tiles_of_split"),
    "a split for all": (r"split \* tiles_of_split", "tl.minimum(split, 1) * tiles_of_split"),
    "the page of the tile before": (r"keys = \(tile_n \+ 1\)", "keys = tile_n"),
    "the page of the tile after": (r"keys = full_lo \*", "keys = (full_lo + 1) *"),
}
ONLY_IN_RESULTS = {
    *("keys in no split", "a tile twice"),
    *("the page of the tile before", "the page of the tile after"),
}
"""Mutations that leave all counts of splits as they are: a kernel is compiled for each count."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By counts, by results, or by addresses."""
    old, new = MUTATIONS[name]

    def change(source: str) -> str:
        changed, times = re.subn(old, new, source)
        assert times, f"{old} is not in the emitted text; update the mutation"
        return changed

    monkeypatch.setenv("TILEGEN_CHECK", "bounds")
    try:
        for count in () if name in ONLY_IN_RESULTS else COUNTS.values():
            if not count.more and count.mask is not ENDS and count.found(change) != count.splits:
                return
        case("causal", 256, 16, change=change).check()
    except WrongResult:
        return
    pytest.fail("nobody noticed")


# --------------------------------------------------------------------------------------------------
# Bytes


@pytest.mark.parametrize(
    "text, config",
    [
        ("b1 hq2 hkv1 q3 kv1000 d16 fp16 full page16", "m8h2n32k256w4s2"),
        ("b2 hq2 hkv1 q130 kv400 d16 fp16 causal(bottom_right) page64", "m8h2n32k64w4s2"),
        ("b1 hq1 hkv1 q40 kv900 d16 fp16 window(333,0,bottom_right) page16", "m16n32k256w4s2"),
        ("b1 hq2 hkv1 q530 kv530 d16/8 fp16 window(300,0) page64", "m8h2n32k64w4s2"),
        ("b1 hq4 hkv2 q70 kv900 d16 fp16 global(5)|window(40,9) page64", "m8h2n32k256w4s2"),
        ("b3 hq4 hkv1 q40 kv900 d16 fp16 window(333,0,bottom_right) page16", "m16n32k64w4s2"),
        ("b1 hq2 hkv1 q9 kv1000 d16 fp16 full invariant page16", "m8h2n32k256w4s2"),
    ],
)
def test_bytes_equal_the_model(text: str, config: str) -> None:
    problem = AttentionProblem.parse(text)
    kernels = {"fwd_paged": TileConfig.parse(config), "fwd_combine": COMBINE}
    assert counted(problem, kernels) == predicted(problem, kernels)
