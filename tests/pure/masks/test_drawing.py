"""Masks drawn: as text, and the picture of `explain --plot`."""

import pytest
import torch

import tilegen
from tilegen.errors import InvalidProblem
from tilegen.explaining.plot import mask_picture
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem


def test_a_causal_mask_in_tiles_of_two() -> None:
    drawn = tilegen.causal().show(4, block_m=2, block_n=2).splitlines()
    assert drawn[:7] == [
        "+--+--+",
        "|+.|  |",
        "|++|  |",
        "+--+--+",
        "|##|+.|",
        "|##|++|",
        "+--+--+",
    ]
    assert "1 full, 2 partial, 1 empty tiles" in drawn[-1]


def test_ragged_tiles_are_never_full() -> None:
    drawn = tilegen.full().show(3, 5, block_m=2, block_n=2).splitlines()
    assert drawn[:6] == [
        "+--+--+-+",
        "|##|##|+|",
        "|##|##|+|",
        "+--+--+-+",
        "|++|++|+|",
        "+--+--+-+",
    ]


def test_tensors_and_stand_ins_are_drawn() -> None:
    ids = torch.tensor([0, 0, 1, 1])
    drawn = tilegen.documents(ids).show(4, block_m=4, block_n=4).splitlines()
    assert drawn[1:5] == ["|++..|", "|++..|", "|..++|", "|..++|"]
    assert "documents(@q:" in tilegen.documents(ids).stand_in.show(8)


def test_large_masks_are_refused() -> None:
    with pytest.raises(InvalidProblem, match="1 to 128"):
        tilegen.causal().show(129)


def test_the_picture_has_a_shade_for_each_class() -> None:
    problem = AttentionProblem.parse("b1 hq1 hkv1 q64 kv64 d64 bf16 causal")
    picture = mask_picture(problem, TileConfig(block_m=32, block_n=32), 64, 64)
    assert (picture[32:, :32] == 3).all()
    assert (picture[:32, 32:] == 0).all()
    assert picture[0, 0] == 2
    assert picture[0, 1] == 1
