"""The deliberate breaks fit the code, and the command tells noticed from missed."""

import pytest

from tests.strength import BREAKS, Break, noticed


@pytest.mark.parametrize("broken", BREAKS, ids=str)
def test_the_text_of_a_break_is_there_once(broken: Break) -> None:
    assert broken.path.read_text(encoding="utf-8").count(broken.old) == 1


def test_breaks_have_names_of_their_own() -> None:
    assert len({str(broken) for broken in BREAKS}) == len(BREAKS)


@pytest.mark.slow
def test_a_break_is_noticed_and_a_harmless_change_is_not() -> None:
    old, tests = "if int(cu[-1]) > length:", "masks/test_values.py"
    assert noticed(Break("pure", "wrong", "masks/packed", old, f"{old[:-1]} + 1:", tests))
    assert not noticed(Break("pure", "harmless", "masks/packed", old, f"{old[:-1]} + 0:", tests))
