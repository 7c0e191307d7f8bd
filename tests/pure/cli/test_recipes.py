"""The recipes' code runs and prints what is shown; their commands, too."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from tests.support.bundles import as_if_compiled
from tilegen.cli.main import app
from tilegen.compiling.workers import Pool

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "tilegen" / "integrations" / "recipes"
PAGES = {
    "transformers": "transformers",
    "flex_attention": None,
    "flex_on_a_cpu": None,
    "packed_documents": "transformers",
    "serving": None,
    "ship_kernels": None,
}
"""Pages with code, and the package that each needs besides."""


def page(name: str) -> str:
    return (RECIPES / f"{name}.md").read_text(encoding="utf-8")


def test_all_recipes_are_run() -> None:
    assert {path.stem for path in RECIPES.iterdir()} == {*PAGES, "tune_once", "tune_in_a_cluster"}


@pytest.mark.parametrize("name", PAGES)
def test_code_prints_as_shown(
    name: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if package := PAGES[name]:
        reason = f"needs the package {package} (pip install 'tilegen[integrations]')"
        pytest.importorskip(package, reason=reason)
    monkeypatch.chdir(tmp_path)
    if name == "flex_on_a_cpu":
        monkeypatch.delenv("TILEGEN_CPU")
    monkeypatch.setattr(  # binaries take a minute, and nobody looks into them
        Pool, "compile", lambda self, rendered, arch, **_: as_if_compiled(rendered, arch)
    )
    code, shown = (
        re.findall(rf"^```{language}\n(.*?)^```", page(name), re.MULTILINE | re.DOTALL)
        for language in ("python", "text")
    )
    assert len(code) == len(shown)
    module = ModuleType(f"recipe_{name}")  # FlexAttention looks functions up in theirs
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block, expected in zip(code, shown, strict=True):
        exec(block, vars(module))
        assert capsys.readouterr().out == expected


def test_commands_print_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```console\n(.*?)^```", page("tune_once"), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("/tmp/tilegen-recipe", str(tmp_path)).splitlines()
    monkeypatch.chdir(ROOT)
    said: list[str] = []
    for line in lines:
        if match := re.match(r"\$ export (\w+)=(.*)", line):
            monkeypatch.setenv(*match.groups())
            said.append(line)
        elif line.startswith("$ tilegen "):
            words = shlex.split(line.removeprefix("$ tilegen "))
            result = CliRunner().invoke(app, words, catch_exceptions=False)
            said += [line, *(one.rstrip() for one in result.stdout.splitlines())]
    assert said == lines


@pytest.mark.parametrize("name", [*PAGES, "tune_once"])
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page(name)):
        assert (RECIPES / target).exists(), target
