"""The deliberate breaks fit the compiler's code, and the command tells noticed from missed."""

import pytest

from tests.compiler.breaks import BREAKS, Break, noticed


@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.name)
def test_the_text_of_a_break_is_there_once(broken: Break) -> None:
    assert broken.path.read_text(encoding="utf-8").count(broken.old) == 1


def test_there_are_enough_breaks_with_names_of_their_own() -> None:
    assert len({broken.name for broken in BREAKS}) == len(BREAKS) >= 30


@pytest.mark.slow
def test_a_break_is_noticed_and_a_harmless_change_is_not() -> None:
    tests = "test_threads.py::test_threads_change_no_bits"
    old = "icmp ult i32 %i, %all"
    assert noticed(Break("skipped", "jit", old, "icmp ult i32 %i, 1", tests))
    assert not noticed(Break("harmless", "jit", old, "icmp ult  i32 %i, %all", tests))
