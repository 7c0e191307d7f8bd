"""Results of paged calls written into the caller's tensor."""

from __future__ import annotations

import pytest
import torch

import tilegen
from tests.pure.calls.test_paged import call
from tilegen.errors import InvalidProblem


def test_out_is_written_in_place() -> None:
    given = call()
    expected = tilegen.attention_paged(**given)
    whole = torch.full((3, 2, 4, 40), 7.0)  # (requests, rows, heads, dim), wider than needed
    out = whole[..., :24].transpose(1, 2)
    assert tilegen.attention_paged(**given, out=out) is out
    assert torch.equal(out, expected)
    assert (whole[..., 24:] == 7).all()
    packed = given | {"q": given["q"].transpose(1, 2).flatten(0, 1)}
    starts = {"q_starts": torch.tensor([0, 2, 4, 6]), "max_q_length": 2}
    rows = torch.empty(6, 4, 24)
    ours, lse = tilegen.attention_paged(**packed, **starts, out=rows, return_lse=True)
    assert ours is rows
    assert torch.equal(rows.unflatten(0, (3, 2)).transpose(1, 2), expected)
    assert lse.shape == (4, 6)
    for wrong, said in (
        (out[:, :1], "out must be"),
        (out.half(), "out must be"),
        (torch.empty(3, 2, 24, 4).permute(0, 3, 1, 2), "dense last dimension"),
    ):
        with pytest.raises(InvalidProblem, match=said):
            tilegen.attention_paged(**given, out=wrong)


@pytest.mark.parametrize("form", ["contiguous", "every other row", "wider"])
def test_out_of_any_strides_is_written(form: str) -> None:
    given = call()
    expected = tilegen.attention_paged(**given)
    requests, heads, rows, dim = expected.shape
    out = torch.full((requests, heads, rows, dim), 7.0)
    if form == "every other row":
        out = torch.full((requests, heads, 2 * rows, dim), 7.0)[:, :, ::2]
    elif form == "wider":
        out = torch.full((requests, heads, rows, 2 * dim), 7.0)[..., :dim]
    assert tilegen.attention_paged(**given, out=out) is out
    assert torch.equal(out, expected)
