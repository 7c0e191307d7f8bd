"""The suite's own configuration: tiers that stay apart, goldens that fail until accepted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import has_gpu_device

TESTS = Path(__file__).parents[1]

PURE = """
def test_text(golden):
    golden({text!r}, ".py")
"""
INTERPRET = "def test_interpreted(): pass\n"
ON_GPU = "def test_on_gpu(): assert False, 'ran without a GPU'\n"


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A copy of the configuration over one small test in every tier."""
    for tier, text in (("interpret", INTERPRET), ("gpu", ON_GPU), ("compile_only", INTERPRET)):
        (tmp_path / "tests" / tier).mkdir(parents=True)
        (tmp_path / "tests" / tier / f"test_{tier}.py").write_text(text)
    (tmp_path / "tests" / "pure").mkdir()
    shutil.copy(TESTS / "conftest.py", tmp_path / "tests")
    shutil.copy(TESTS.parent / "pyproject.toml", tmp_path)
    write_pure(tmp_path, "a = 1\n")
    return tmp_path


def write_pure(suite: Path, text: str) -> None:
    (suite / "tests" / "pure" / "test_sample.py").write_text(PURE.format(text=text))


def pytest_in(suite: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Return exit code and output of pytest in the copy, on a machine without a GPU."""
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # none that are installed is asked
    return spread_pytest_in(suite, *arguments, **alone, **environment)


def spread_pytest_in(suite: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Run pytest as `pytest_in` does, with workers allowed."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=suite,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode, result.stdout + result.stderr


@pytest.mark.slow
def test_golden_is_missing_then_accepted_then_differs(suite: Path) -> None:
    golden = suite / "tests" / "golden" / "sample" / "text.py"
    code, output = pytest_in(suite, "tests/pure")
    assert code == 1
    assert "no golden file tests/golden/sample/text.py" in output
    assert "--update-golden" in output
    assert "a = 1" in output
    assert not golden.exists()

    assert pytest_in(suite, "tests/pure", "--update-golden")[0] == 0
    assert golden.read_text() == "a = 1\n"
    assert pytest_in(suite, "tests/pure")[0] == 0

    write_pure(suite, "a = 2\n")
    code, output = pytest_in(suite, "tests/pure")
    assert code == 1
    assert "differs" in output
    assert golden.read_text() == "a = 1\n"


@pytest.mark.slow
def test_plain_pytest_leaves_the_interpreter_out_and_skips_the_gpu(suite: Path) -> None:
    _, output = pytest_in(suite, "-v", "--update-golden")
    assert "test_text PASSED" in output
    assert "test_interpreted PASSED" in output  # of compile_only
    assert "tests/interpret" not in output
    assert "2 passed, 1 skipped" in output
    assert "no CUDA device on this machine" in output


def test_interpret_tier_alone_runs_when_interpreting(suite: Path) -> None:
    code, output = pytest_in(suite, "-v", TRITON_INTERPRET="1")
    assert code == 0
    assert "tests/interpret/test_interpret.py::test_interpreted PASSED" in output
    assert "1 passed" in output


def test_interpret_tier_is_refused_without_the_variable(suite: Path) -> None:
    code, output = pytest_in(suite, "tests/interpret/test_interpret.py::test_interpreted")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "TRITON_INTERPRET=1" in output


@pytest.mark.slow
def test_folders_are_spread_over_the_cores_and_files_are_not(suite: Path) -> None:
    pytest.importorskip("xdist")
    if has_gpu_device():
        pytest.skip("tests are not spread on a machine with a GPU")
    code, output = spread_pytest_in(suite, "tests/compile_only")
    assert code == 0
    assert re.search(r"^\d+ workers? \[1 item\]", output, re.MULTILINE)
    assert re.search(r"^=+ 1 passed in .* =+$", output, re.MULTILINE)
    for arguments in (["tests/compile_only/test_compile_only.py"], ["-n0", "tests/compile_only"]):
        code, output = spread_pytest_in(suite, *arguments)
        assert code == 0
        assert " worker" not in output


LONG = """
import pytest

@pytest.mark.parametrize("number", range(30))
def test_one_list(number): ...

@pytest.mark.parametrize("row", range(6))
@pytest.mark.parametrize("column", "abcde")
def test_rows_and_columns(row, column): ...

@pytest.mark.parametrize("number", range(3))
def test_few(number): ...

@pytest.mark.sampled
@pytest.mark.parametrize("number", range(200))
def test_sampled(number): ...

@pytest.mark.slow
@pytest.mark.parametrize("number", range(90))
def test_slow(number): ...
"""


@pytest.mark.slow
def test_of_long_lists_some_cases_run_and_others_for_each_commit(suite: Path) -> None:
    (suite / "tests" / "compiled").mkdir()
    (suite / "tests" / "compiled" / "test_long.py").write_text(LONG)

    def ran(name: str, *arguments: str, seed: str = "1") -> set[str]:
        code, output = pytest_in(suite, "-v", "tests/compiled", *arguments, TESTS_SEED=seed)
        assert code == 0
        return set(re.findall(rf"::test_{name}\[(\S+)\] PASSED", output))

    first, second = ran("one_list"), ran("one_list", seed="2")
    assert len(first) == len(second) == 6
    assert first != second
    assert ran("one_list") == first
    cells = ran("rows_and_columns")
    assert 6 <= len(cells) < 30
    assert {cell[0] for cell in cells} == set("abcde")
    assert {cell[-1] for cell in cells} == set("012345")
    assert ran("few") == set("012")
    assert 5 < len(ran("sampled")) < 50
    assert 5 < len(ran("slow")) < 40
    for everything in (["--all"], ["-k", "one_list"]):
        assert len(ran("one_list", *everything)) == 30
    assert len(ran("one_list", "-k", "not few")) == 6
