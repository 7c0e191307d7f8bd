"""Whatever is no tensor, or one of other dimensions, in place of each argument of each call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import tilegen
from tilegen.errors import InvalidProblem, TilegenError
from tilegen.integrations import flash_attn, sdpa

ROWS, TOKENS = torch.randn(2, 8, 4, 16), torch.randn(8, 4, 16)
PAGES, CACHE = torch.randn(6, 8, 4, 16), torch.randn(2, 16, 4, 16)
TABLE, LENGTHS = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([3, 4])
STARTS, NEW = torch.tensor([0, 8]), torch.randn(2, 1, 4, 16)
Call = tuple[Callable[..., Any], dict[str, Any]]
CALLS: dict[str, Call] = {
    "attention": (
        tilegen.attention,
        dict(q=ROWS, k=ROWS, v=ROWS, mask=None, score=None, kv_lengths=None, dropout_p=0.0),
    ),
    "varlen": (
        tilegen.attention_varlen,
        dict(q=TOKENS, k=TOKENS, v=TOKENS, cu_seqlens_q=STARTS, mask=None, dropout_p=0.0),
    ),
    "paged": (
        tilegen.attention_paged,
        dict(q=ROWS, k_pages=PAGES, v_pages=PAGES, block_table=TABLE, kv_lengths=LENGTHS)
        | dict(mask=None, layout="NHD", out=None),
    ),
    "paged, packed": (
        tilegen.attention_paged,
        dict(q=TOKENS[:2], k_pages=PAGES, v_pages=PAGES, block_table=TABLE, kv_lengths=LENGTHS)
        | dict(q_starts=torch.arange(3), max_q_length=1),
    ),
    "append": (
        tilegen.append_paged,
        dict(
            k=NEW.transpose(1, 2),
            v=NEW.transpose(1, 2),
            k_pages=PAGES,
            v_pages=PAGES,
            block_table=TABLE,
        )
        | dict(kv_lengths=LENGTHS, layout="NHD"),
    ),
    "flex": (
        tilegen.flex_attention,
        dict(query=ROWS, key=ROWS, value=ROWS, score_mod=None, block_mask=None, return_aux=None),
    ),
    "sdpa": (
        sdpa.scaled_dot_product_attention,
        dict(query=ROWS, key=ROWS, value=ROWS, attn_mask=None, dropout_p=0.0),
    ),
    "flash": (
        flash_attn.flash_attn_func,
        dict(q=ROWS, k=ROWS, v=ROWS, window_size=(-1, -1), softcap=0.0, alibi_slopes=None)
        | dict(dropout_p=0.0),
    ),
    "flash, packed": (flash_attn.flash_attn_qkvpacked_func, dict(qkv=torch.randn(2, 8, 3, 4, 16))),
    "flash, packed keys": (
        flash_attn.flash_attn_kvpacked_func,
        dict(q=ROWS, kv=torch.randn(2, 8, 2, 4, 16)),
    ),
    "flash, varlen": (
        partial(flash_attn.flash_attn_varlen_func, max_seqlen_q=8, max_seqlen_k=8),
        dict(q=TOKENS, k=TOKENS, v=TOKENS, cu_seqlens_q=STARTS, cu_seqlens_k=STARTS),
    ),
    "flash, a cache": (
        flash_attn.flash_attn_with_kvcache,
        dict(q=ROWS[:, :1], k_cache=CACHE, v_cache=CACHE, k=NEW, v=NEW, cache_seqlens=LENGTHS)
        | dict(cache_batch_idx=torch.arange(2)),
    ),
    "flash, pages": (
        flash_attn.flash_attn_with_kvcache,
        dict(q=ROWS[:, :1], k_cache=PAGES, v_cache=PAGES, k=NEW, v=NEW, cache_seqlens=LENGTHS)
        | dict(block_table=TABLE),
    ),
}
FITTING = {
    ("window_size", "list"),
    ("softcap", "number"),
    ("softcap", "scalar"),
    ("dropout_p", "scalar"),
    ("attn_mask", "scalar"),
    ("cache_seqlens", "nothing"),
    ("cache_seqlens", "number"),
    ("cache_batch_idx", "nothing"),
    ("max_q_length", "number"),
}
"""Valid arguments, of other kinds."""
MISFITS: dict[str, Any] = {
    "nothing": None,
    "text": "x",
    "number": 3,
    "list": [1, 2],
    "scalar": torch.tensor(1.0),
    "row": torch.randn(3),
    "object": object(),
}


def called(name: str, **changed: Any) -> None:
    """Make a call, with tensors of its own, since some are written to."""
    function, given = CALLS[name]
    own = {k: x.clone() if isinstance(x, torch.Tensor) else x for k, x in given.items()}
    function(**own | changed)


@pytest.mark.parametrize(
    "name, argument", [(name, one) for name in CALLS for one in CALLS[name][1]]
)
def test_misfits_are_refused_in_a_line(name: str, argument: str) -> None:
    for misfit, call in MISFITS.items():
        if (argument, misfit) in FITTING or (call is None and is_optional(name, argument)):
            continue
        with pytest.raises(TilegenError) as caught:
            called(name, **{argument: call})
        assert "\n" not in str(caught.value), misfit


def is_optional(name: str, argument: str) -> bool:
    """Return True if an argument may be None."""
    return CALLS[name][1][argument] is None or (name, argument) == ("flash, pages", "block_table")


def test_misfits_beside_jagged_tensors_are_refused() -> None:
    jagged = torch.nested.nested_tensor(
        [torch.randn(3, 2, 16), torch.randn(5, 2, 16)], layout=torch.jagged
    ).transpose(1, 2)
    for misfit in MISFITS.values():
        for given in ((jagged, misfit, jagged), (jagged, jagged, misfit)):
            with pytest.raises(InvalidProblem, match="must be a jagged nested tensor"):
                tilegen.attention(*given)


def test_the_calls_are_right_as_they_stand() -> None:
    """So that it is the misfit that is refused."""
    for name in CALLS:
        called(name)
