"""tilegen's registration with transformers, and the masks made from its building blocks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

REASON = "needs the package transformers (pip install 'tilegen[integrations]')"
transformers = pytest.importorskip("transformers", reason=REASON)

from transformers import masking_utils  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

import tilegen  # noqa: E402
from tilegen.errors import Unsupported  # noqa: E402
from tilegen.integrations import model_masks  # noqa: E402
from tilegen.integrations import transformers as integration  # noqa: E402
from tilegen.masks.usual import BLOCK_SPARSE  # noqa: E402

# --------------------------------------------------------------------------------------------------
# The contract with transformers


def test_attention_and_masks_are_registered() -> None:
    """Without the mask function transformers would leave out every mask, in silence."""
    version = f"transformers {transformers.__version__} has moved"
    masks = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    assert ALL_ATTENTION_FUNCTIONS["tilegen"] is integration.attention_forward, version
    assert masks["tilegen"] is model_masks.model_mask, version
    theirs = masking_utils.sdpa_mask.__code__
    names = set(theirs.co_varnames[: theirs.co_argcount])
    ours = model_masks.model_mask.__code__
    assert names <= {*ours.co_varnames[: ours.co_argcount]}, version


def test_all_building_blocks_of_masks_are_known() -> None:
    """One that has come to mean something else is computed as a bool tensor: right, but slow."""
    version = f"transformers {transformers.__version__} has moved"
    assert len(model_masks._known) == 8, version
    assert len(model_masks._code_of_packed) == 2, version
    with torch.device("meta"):  # as within a model's __init__, where someone imports this
        assert len(model_masks.known_blocks()) == 8


BLOCKS: dict[str, Any] = {
    "causal": masking_utils.causal_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(4),
    "window of one": masking_utils.sliding_window_causal_mask_function(1),
    "both ways": masking_utils.sliding_window_bidirectional_mask_function(2),
    "chunks": masking_utils.chunked_causal_mask_function(3, torch.tensor([0, 2])),
    "blocks": masking_utils.or_masks(
        masking_utils.causal_mask_function,
        masking_utils.blockwise_overlay(
            torch.tensor([[0, 0, -1, 1, 1, -1, 0, 0, 1, 2], [2, 1] * 5])
        ),
    ),
    "everything": masking_utils.bidirectional_mask_function,
}  # fmt: skip
PLACES = {  # queries, keys, offsets of both
    "prefill": (10, 10, 0, 0),
    "a step": (1, 10, 9, 0),
    "two steps": (2, 8, 8, 2),
    "a static cache": (3, 10, torch.tensor(4), 0),
    "a static cache that is not full": (3, 10, 2, 0),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("block", BLOCKS)
def test_masks_keep_the_same_pairs_as_transformers(block: str, place: str) -> None:
    seqlen_q, seqlen_kv, q_offset, kv_offset = PLACES[place]
    is_token = torch.tensor([[1] * 9 + [0], [0, 0] + [1] * 8]).bool()
    for padding in (None, is_token):
        given = (2, seqlen_q, seqlen_kv, q_offset, kv_offset, BLOCKS[block], padding)
        expected = masking_utils.sdpa_mask(*given, allow_is_causal_skip=False)
        made = model_masks.model_mask(*given)
        assert not any(mask.form is BLOCK_SPARSE for mask in (made.mask, *made.mask.parts))
        assert torch.equal(dense(made.mask, seqlen_q, seqlen_kv), expected.expand(2, 1, -1, -1))


@pytest.mark.parametrize("place", [one for one in PLACES if one != "a step"])
@pytest.mark.parametrize("block", BLOCKS)
def test_rows_of_a_mask_are_masks(block: str, place: str) -> None:
    """Gemma 4 computes the last rows alone in layers that share keys."""
    seqlen_q, seqlen_kv, q_offset, kv_offset = PLACES[place]
    is_token = torch.tensor([[1] * 9 + [0], [0, 0] + [1] * 8]).bool()
    given = (2, seqlen_q, seqlen_kv, q_offset, kv_offset, BLOCKS[block], is_token)
    whole = model_masks.model_mask(*given)
    expected = dense(whole.mask, seqlen_q, seqlen_kv)
    assert whole[:, :, -0:, :] is whole
    for rows in (slice(-1, None), slice(-2, None), slice(0, 1)):
        made = whole[:, :, rows, :]
        count = expected[:, :, rows].shape[2]
        assert made.shape == (2, 1, count, seqlen_kv)
        assert torch.equal(dense(made.mask, count, seqlen_kv), expected[:, :, rows])


def test_rows_of_a_mask_of_packed_documents_are_masks() -> None:
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 0]])
    packed = masking_utils.packed_sequence_compatibility_function(
        masking_utils.causal_mask_function, positions, ids
    )
    whole = model_masks.model_mask(2, 8, 8, mask_function=packed)
    assert torch.equal(dense(whole[:, :, -2:, :].mask, 2, 8), dense(whole.mask, 8, 8)[:, :, -2:])


TENSORS: dict[str, Callable[[Any], Any]] = {
    "added": lambda mask: torch.zeros(1, 2, 5, 5) + mask,
    "filled": lambda mask: torch.zeros(1, 2, 5, 5).masked_fill(mask, 0.0),
    "cast": lambda mask: mask.to(torch.bool),
    "sized": lambda mask: mask.size(),
    "without heads": lambda mask: mask[:, 0, :, :],
    "of fewer columns": lambda mask: mask[:, :, :, :4],
}


@pytest.mark.parametrize("case", TENSORS)
def test_models_that_compute_attention_themselves_are_refused(case: str) -> None:
    """As BLOOM, MPT, Doge, MVP, DeepSeek V3.2 and Longformer do with their masks."""
    mask = model_masks.model_mask(1, 5, 5)
    with pytest.raises(Unsupported, match='use attn_implementation="eager"') as error:
        TENSORS[case](mask)
    assert "\n" not in str(error.value)
    assert not hasattr(mask, "to")
    assert copy.deepcopy(mask) == pickle.loads(pickle.dumps(mask)) == mask


def dense(mask: tilegen.Mask, seqlen_q: int, seqlen_kv: int) -> torch.Tensor:
    b, h, q, k = (
        torch.arange(n).view(-1, *[1] * (3 - axis))
        for axis, n in enumerate((2, 1, seqlen_q, seqlen_kv))
    )
    return mask.kept(q, k, seqlen_q, seqlen_kv, b, h).expand(2, 1, seqlen_q, seqlen_kv)


def test_a_function_that_is_not_known_is_spelled_out() -> None:
    odd = masking_utils.and_masks(
        masking_utils.causal_mask_function, lambda b, h, q, k: (q + k) % 2 == 0
    )
    made = model_masks.model_mask(2, 5, 5, 0, 0, odd)
    expected = masking_utils.sdpa_mask(2, 5, 5, 0, 0, odd, allow_is_causal_skip=False)
    assert made.mask.form is BLOCK_SPARSE
    assert torch.equal(dense(made.mask, 5, 5), expected)


def test_a_block_that_means_something_else_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    def overlay(sliding_window: int) -> Any:
        def inner_mask(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
            return kv_idx >= q_idx - sliding_window  # one token more

        return inner_mask

    monkeypatch.setattr(masking_utils, "sliding_window_overlay", overlay)
    monkeypatch.setattr(model_masks, "_known", model_masks.known_blocks())
    made = model_masks.model_mask(1, 6, 6, mask_function=overlay(2))
    assert made.mask.form is BLOCK_SPARSE
    at = torch.arange(6)
    assert torch.equal(dense(made.mask, 6, 6)[0, 0], at >= at[:, None] - 2)


def test_masks_are_made_without_a_look_at_values() -> None:
    """Which would wait for a GPU; tensors on the device "meta" have none."""
    ids = torch.zeros(2, 10, dtype=torch.int64, device="meta")
    offset = torch.tensor(4, device="meta")
    packed = masking_utils.packed_sequence_compatibility_function(
        masking_utils.sliding_window_causal_mask_function(4), ids, ids
    )
    functions: list[tuple[Any, Any]] = [
        (masking_utils.causal_mask_function, offset),
        (masking_utils.sliding_window_causal_mask_function(4), offset),
        (masking_utils.chunked_causal_mask_function(3, ids[:, 0]), offset),
        (masking_utils.blockwise_overlay(ids), offset),
        (packed, 0),
    ]
    for function, q_offset in functions:
        rows = 10 if function is packed else 3
        given = (2, rows, 10, q_offset, 0, function, ids.bool())
        made = model_masks.model_mask(*given, device="meta")
        assert made.mask.form is not BLOCK_SPARSE
        assert all(one.tensor.device.type == "meta" for one in made.mask.tables)


@pytest.mark.parametrize("name", ["Falcon", "GPTJ", "GPTNeo"])
def test_models_with_attention_classes_of_their_own_are_refused_in_one_line(name: str) -> None:
    import transformers

    make = getattr(transformers, f"{name}ForCausalLM")._from_config
    config = getattr(transformers, f"{name}Config")()
    with pytest.raises(Unsupported, match=rf"{name}ForCausalLM takes its attention from .*CLASSES"):
        make(config, attn_implementation="tilegen")
