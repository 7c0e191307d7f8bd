"""The kernels that only add, of experiment E7: an atomic addition loses nothing."""

from benchmarks.study.atomics import ADDITIONS, COLUMNS, ROWS, add


def test_additions_reach_every_word_as_often_as_they_should() -> None:
    tile_bytes = 4 * ROWS.value * COLUMNS.value
    assert (add("atomic", 3 * tile_bytes, "cpu") == ADDITIONS).all()
    assert (add("load_store", 3 * tile_bytes, "cpu") == ADDITIONS).all()  # one after another here
    assert (add("store", 3 * tile_bytes, "cpu") == 1).all()
