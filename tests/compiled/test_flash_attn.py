"""flash-attn's functions by emitted kernels, against flash-attn's documentation."""

import pytest
import torch

from tests.pure.calls.test_flash_attn import compare, dense, inputs, of_documents
from tilegen.integrations import flash_attn


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(9, 21), (21, 9)], ids=str)
def test_slopes_of_each_batch_entry_and_a_window(lengths: tuple[int, int]) -> None:
    """Behind a soft cap, at lengths whose rows start behind the first key, or before it."""
    rows, columns = lengths
    given = inputs((2, rows, 4, 16), (2, columns, 2, 16), (2, columns, 2, 16))
    slopes = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))
    options = {"softcap": 2.0, "alibi_slopes": slopes, "window_size": (6, 2)}
    actual = flash_attn.flash_attn_func(*given, return_attn_probs=True, **options)  # type: ignore[arg-type]
    compare(actual, dense(*given, **options), given)  # type: ignore[arg-type]


@pytest.mark.slow
def test_documents_of_different_lengths() -> None:
    cu_q, cu_k = [0, 7, 7, 19], [0, 3, 9, 30]
    given = inputs((19, 4, 16), (30, 2, 16), (30, 2, 16))
    options = {"causal": True, "alibi_slopes": torch.tensor([0.1, 0.2, 0.4, 0.8])}
    out = flash_attn.flash_attn_varlen_func(
        *(*given, torch.tensor(cu_q), torch.tensor(cu_k), 12, 21),
        return_attn_probs=True,
        **options,  # type: ignore[arg-type]
    )
    compare(out, of_documents(given, cu_q, cu_k, options), given)


def test_packed_qkv_is_read_where_it_is() -> None:
    (qkv,) = inputs((1, 20, 3, 2, 16))
    actual = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True)
    compare(actual, dense(*qkv.unbind(2), causal=True), [qkv])
