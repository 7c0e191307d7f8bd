"""The footprint of lists of tiles and captured tables."""

import pytest

from tests.support.problems import tiled
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.model.footprint import footprint
from tilegen.model.lists_and_tables import lists_and_tables
from tilegen.problem import AttentionProblem

TILE = TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=3)
TABLE = "score(s+t0[h,max(-9,k-q)+9],float32{})"


def adds(text: str, kernel: Kernel = "fwd") -> tuple[int, int]:
    problem = AttentionProblem.parse(f"hq8 q4096 d64 bf16 {text}")
    return lists_and_tables(tiled(kernel, problem, TILE))


@pytest.mark.parametrize(
    "text",
    [
        "full",
        "causal&window(9,9)",
        "documents(@q:64)",
        "causal score(9.0*tanh(s))",
        "full score(s*t0[h],float32)",
    ],
)
def test_closed_forms_and_scores_without_tables_add_nothing(text: str) -> None:
    assert adds(text) == (0, 0)


def test_a_list_buffers_a_stage_more() -> None:
    assert adds("dilated(3)") == (32 * 128 * 2, 0)


def test_where_columns_stay_a_list_is_looked_up_a_step_ahead_and_buffers_bytes_of_a_tile() -> None:
    assert adds("dilated(3)", "bwd_dkdv") == (64 * 32, 0)


def test_a_tree_buffers_a_tile_of_keys_or_of_its_table() -> None:
    """As compiled for sm_90: `fwd` 64 x 32 x 128 takes 8192 bytes more than causal, `bwd_dq`
    2048."""
    assert adds("tree(@:64)") == (32 * 64 * 2, 0)
    assert adds("tree(@:64)&window(9,0)", "bwd_dq") == (64 * 32, 0)


def test_a_table_is_buffered_like_keys() -> None:
    tile = 64 * 32
    assert adds(f"full {TABLE.format('')}") == (3 * tile * 4, tile // 128)
    assert adds(f"full {TABLE.format('')}", "bwd_dq") == (3 * tile * 4, 2 * tile // 128)
    assert adds(f"full {TABLE.format('+')}", "bwd_dq") == (3 * tile * 4, 3 * tile // 128)


def test_a_table_may_be_looked_up_by_another() -> None:
    tile = 64 * 32
    assert adds("full score(s+t0[k,t1[q]],float32,int32)") == (3 * tile * 4, tile // 128)
    assert adds("full score(s+t0[t1[q],k],float32,int32)") == (3 * tile * 4, tile // 128)


def test_the_footprint_counts_it() -> None:
    plain, tabled = (
        footprint(
            tiled("fwd", AttentionProblem.parse(f"hq8 q4096 d64 bf16 full{score}"), TILE, "sm_90")
        )
        for score in ("", f" {TABLE.format('')}")
    )
    assert tabled.smem_bytes - plain.smem_bytes == 3 * 64 * 32 * 4
    assert tabled.registers > plain.registers
