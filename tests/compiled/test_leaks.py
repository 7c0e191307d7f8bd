"""Documents and padded entries are as if each were alone: NaN and infinities in rows that a query
may not see reach nothing of it. Judged by dense attention in fp64 of each alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
import torch

from tests.compiled.test_silent_errors import FAMILIES, problem
from tests.support.splits import backward
from tilegen.check.reference import Inputs, make_inputs
from tilegen.check.verification import run
from tilegen.emit.render import render
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.masks import Mask, causal, documents, full, kv_lengths, prefix_lm
from tilegen.masks.packed import packed
from tilegen.masks.usual import kv_prefix

SCALE = 0.25
CUTS = [0, 21, 51, 64]
SPLIT: dict[Kernel, TileConfig] = {
    "fwd_split": TileConfig(block_m=16, block_n=16, split_kv=32),
    "fwd_combine": TileConfig(block_m=1, block_n=16, num_warps=1, num_stages=1),
    **backward("split_backward", length=32, passes=16),
}
del SPLIT["fwd"]
ONE_PASS = backward("one_pass", length=32, passes=16)
ALL_FAMILIES = {**FAMILIES, "splits": SPLIT, "one pass": ONE_PASS}
BAD = [float("nan"), float("inf"), float("-inf")]


def in_turns(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs of a name and a family: whole heads for each name, the others for every second
    one."""
    return [
        (name, family)
        for i, name in enumerate(names)
        for j, family in enumerate(ALL_FAMILIES)
        if family == "whole_heads" or (i + j) % 2 == 0
    ]


def alone(*given: torch.Tensor, keep: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the results of q, k, v and dout, (heads, rows, dim), in fp64; one key-value head."""
    q, k, v = (x.double().clone().requires_grad_() for x in given[:3])
    s = (q @ k.mT * SCALE).masked_fill(~keep, float("-inf"))
    out = torch.softmax(s, -1) @ v
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), given[3].double())
    return {"out": out.detach(), "lse": s.logsumexp(-1).detach(), "dq": dq, "dk": dk, "dv": dv}


def found(
    mask: Mask, inputs: Inputs, configs: Mapping[Kernel, TileConfig], dtype: str = "fp32"
) -> dict[str, torch.Tensor]:
    what = problem(mask, *(x.shape[2] for x in (inputs.q, inputs.k)), batch=inputs.q.shape[0])
    kernels = {name: render(replace(what, dtype=dtype), one, name) for name, one in configs.items()}
    return run(kernels, inputs, SCALE, mask=mask)


def agree(name: str, ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(
        ours.double(), expected, atol=2e-5, rtol=2e-5, msg=lambda text: f"{name}: {text}"
    )


PACKED: dict[str, Mask] = {
    "whole": documents([i for i in range(3) for _ in range(CUTS[i], CUTS[i + 1])]),
    "causal": packed(torch.tensor(CUTS), mask=causal()),
    "two cu_seqlens": packed(torch.tensor(CUTS), torch.tensor(CUTS)),
    "any mask": packed(torch.tensor(CUTS), mask=prefix_lm(5)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name, family", in_turns(PACKED))
@pytest.mark.parametrize("poisoned", [0, 1, 2])
def test_documents_do_not_reach_each_other(name: str, family: str, poisoned: int) -> None:
    mask = PACKED[name]
    inputs = make_inputs(problem(mask, 64, 64))
    rows = slice(CUTS[poisoned], CUTS[poisoned + 1])
    for x in (inputs.q, inputs.k, inputs.v, inputs.dout):
        x[..., rows, 3:5] = BAD[poisoned]
    ours = found(mask, inputs, ALL_FAMILIES[family])
    for i in {0, 1, 2} - {poisoned}:
        here = slice(CUTS[i], CUTS[i + 1])
        each = (x[0, :, here] for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
        length = CUTS[i + 1] - CUTS[i]
        q, k = torch.arange(length)[:, None], torch.arange(length)
        keep = {"causal": k <= q, "any mask": (k <= q) | (k < 5)}.get(name, k == k)
        for result, expected in alone(*each, keep=keep.expand(length, length)).items():
            if result in ours:
                agree(f"{result} of document {i}", ours[result][0, :, here], expected)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_ids_in_any_order_do_not_reach_each_other(family: str) -> None:
    ids = torch.arange(40) % 3
    mask = documents(ids.tolist())
    inputs = make_inputs(problem(mask, 40, 40))
    for x in (inputs.q, inputs.k, inputs.v, inputs.dout):
        x[..., ids == 1, :] = float("nan")
    ours = found(mask, inputs, ALL_FAMILIES[family])
    for i in (0, 2):
        each = (x[0][:, ids == i] for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
        length = int((ids == i).sum())
        keep = torch.ones(length, length, dtype=torch.bool)
        for result, expected in alone(*each, keep=keep).items():
            if result in ours:
                agree(result, ours[result][0][:, ids == i], expected)


@pytest.mark.parametrize("kind, family", in_turns(["full", "causal", "not causal"]))
def test_keys_beyond_the_lengths_reach_nothing(kind: str, family: str) -> None:
    """The last of the masks has no single range of tiles."""
    lengths = [40, 21, 0]
    masks = {"full": kv_lengths(lengths), "causal": kv_lengths(lengths) & causal()}
    mask = masks.get(kind, kv_lengths(lengths) & ~causal())
    inputs = make_inputs(problem(mask, 40, 40, batch=3))
    for b, length in enumerate(lengths):
        inputs.k[b, :, length:], inputs.v[b, :, length:] = float("nan"), float("-inf")
    ours = found(mask, inputs, ALL_FAMILIES[family])
    q, k = torch.arange(40)[:, None], torch.arange(40)
    keep = {"full": k == k, "causal": k <= q}.get(kind, k > q).expand(40, 40)
    for b, length in enumerate(lengths):
        sees = keep[:, :length].any(-1)
        here = inputs.q[b][:, sees], inputs.k[b, :, :length], inputs.v[b, :, :length]
        if length:
            expected = alone(*here, inputs.dout[b][:, sees], keep=keep[sees, :length])
            for result, tensor in expected.items():
                if result in ours:
                    mine = ours[result][b]
                    mine = mine[:, :length] if result in ("dk", "dv") else mine[:, sees]
                    agree(f"{result} of entry {b}", mine, tensor)
        for result in {"out", "dq", "dk", "dv"} & set(ours):
            mine = ours[result][b]
            rest = mine[:, length:] if result in ("dk", "dv") else mine[:, ~sees]
            assert (rest == 0).all(), f"{result} of entry {b}"


@pytest.mark.slow
@pytest.mark.parametrize("which", ["q", "dout"])
@pytest.mark.parametrize("kind", ["full", "one length", "causal", "not causal"])
@pytest.mark.parametrize("family", [name for name in ALL_FAMILIES if name != "streamed"])
def test_nan_of_a_query_reaches_the_keys_that_it_sees(family: str, kind: str, which: str) -> None:
    """And no key beyond the lengths, although tiles hold both."""
    lengths, row = [40, 21], 18
    mask = {"causal": causal(), "not causal": ~causal()}.get(kind, full()) & kv_lengths(lengths)
    if kind == "one length":
        lengths, mask = [21, 21], kv_prefix(21)
    inputs = make_inputs(problem(mask, 40, 40, batch=2))
    getattr(inputs, which)[:, :, row, 3] = float("nan")
    ours = found(mask, inputs, ALL_FAMILIES[family])
    q, k = torch.arange(40)[:, None], torch.arange(40)
    keep = {"causal": k <= q, "not causal": k > q}.get(kind, k == k).expand(40, 40)
    for b, length in enumerate(lengths):
        sees, seen = keep[:, :length].any(-1), keep[row, :length]
        here = inputs.q[b][:, sees], inputs.k[b, :, :length], inputs.v[b, :, :length]
        expected = alone(*here, inputs.dout[b][:, sees], keep=keep[sees, :length])
        for result in ("dk", "dv"):
            mine, theirs = ours[result][b], expected[result][:, seen]
            assert theirs.isnan().any()
            torch.testing.assert_close(
                mine[:, :length][:, seen].double(), theirs, atol=2e-5, rtol=2e-5, equal_nan=True
            )
            assert (mine[:, length:] == 0).all(), f"{result} of entry {b}"


@pytest.mark.slow
@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("dtype, family", in_turns(["bf16", "fp16"]))
def test_a_document_keeps_its_own_nan(dtype: str, which: str, family: str) -> None:
    """Wherever the document alone has one."""
    mask = PACKED["whole"]
    inputs = make_inputs(replace(problem(mask, 64, 64), dtype=dtype))
    getattr(inputs, which)[..., 30, 7] = float("nan")
    ours = found(mask, inputs, ALL_FAMILIES[family], dtype)
    here = slice(CUTS[1], CUTS[2])
    each = (x[0, :, here] for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    expected = alone(*each, keep=torch.ones(30, 30, dtype=torch.bool))
    for result in set(ours) - {"lse"}:
        mine = ours[result][0]
        assert mine[:, here][expected[result].isnan()].isnan().all(), result
        others = torch.cat([mine[:, : CUTS[1]], mine[:, CUTS[2] :]], 1)
        assert others.isfinite().all(), result
