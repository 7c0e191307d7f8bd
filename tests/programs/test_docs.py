"""Documentation that cannot rot: README blocks run, and everything users can touch is described."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tilegen
from benchmarks import recordings
from tests.pure.bundles.test_bundle_launch import CONFIGS
from tests.pure.cli.test_cli import COMMANDS
from tests.support import warm
from tilegen import environment, resources
from tilegen.bundles.manifest import Binary, Served
from tilegen.cli.main import app
from tilegen.emit.render import _context, render
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.problem import AttentionProblem

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CALLS = (ROOT / "tilegen" / "calls" / "README.md").read_text(encoding="utf-8")
CLI = (ROOT / "tilegen" / "cli" / "README.md").read_text(encoding="utf-8")
TOUR = (ROOT / "tilegen" / "README.md").read_text(encoding="utf-8")
TUNING = (ROOT / "tilegen" / "tuning" / "README.md").read_text(encoding="utf-8")
LEGEND = (ROOT / "templates" / "README.md").read_text(encoding="utf-8")
BUNDLES = (ROOT / "tilegen" / "bundles" / "format.md").read_text(encoding="utf-8")
EXPLAINING = (ROOT / "tilegen" / "explaining" / "README.md").read_text(encoding="utf-8")
INTEGRATIONS = (ROOT / "tilegen" / "integrations" / "README.md").read_text(encoding="utf-8")
THEORY = (ROOT / "tilegen" / "theory" / "README.md").read_text(encoding="utf-8")
MASKS = (ROOT / "tilegen" / "masks" / "README.md").read_text(encoding="utf-8")


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "page",
    [README, TOUR, CALLS, CLI, MASKS, INTEGRATIONS, THEORY],
    ids=["readme", "tour", "calls", "cli", "masks", "integrations", "theory"],
)
def test_python_blocks_print_as_shown(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEGEN_CPU")  # they run kernels, as users see them
    code, shown = blocks("python", page), blocks("text", page)
    assert len(code) == len(shown)
    assert warm.output("\n".join(code)) == "".join(shown)


def test_the_catalogue_on_its_page_is_tuned_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another folder; the recording says itself that nobody measured it."""
    (block,) = [one for one in blocks("console", TUNING) if "--replay" in one]
    assert block.startswith("$ export TILEGEN_CACHE_DIR=/tmp/tilegen-example/own\n")
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.chdir(ROOT)
    lines = block.replace("/tmp/tilegen-example", str(tmp_path)).splitlines()[1:]
    said: list[str] = []
    for line in lines:
        if line.startswith("$ tilegen "):
            words = shlex.split(line.removeprefix("$ tilegen "))
            result = CliRunner().invoke(app, words, catch_exceptions=False)
            said += [line, *(one.rstrip() for one in result.stdout.splitlines())]
    assert said == lines
    for recording in (ROOT / "benchmarks" / "example").rglob("*.jsonl"):
        assert recordings.read(recording).session.source.startswith("made up")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_is_on_its_page(command: str) -> None:
    assert f"| `tilegen {command}` |" in CLI


def test_every_mask_and_score_is_on_its_page() -> None:
    homes = {name for name, home in tilegen._HOME.items() if home.startswith("tilegen.masks")}
    for name in homes - {"Mask", "Score", "score"}:
        assert f"{name}(" in MASKS, name


def test_every_setting_is_on_its_page_and_there_are_few() -> None:
    names = [
        value for name, value in vars(environment).items() if str(value).startswith("TILEGEN_")
    ]
    assert 1 <= len(names) <= 9
    for name in names:
        assert f"| `{name}` |" in CLI


def test_shown_output_is_real(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a terminal of so many columns as a comment at the command says."""
    seen: set[int] = set()
    for page in (README, EXPLAINING, CLI):
        for block in blocks("console", page):
            command, *shown = block.splitlines()
            width = int((re.findall(r"# (\d+) columns$", command) or [0])[0])
            seen.add(width)
            for module in ("options", "main", "compare"):
                monkeypatch.setattr(f"tilegen.cli.{module}.columns", lambda width=width: width)
            words = shlex.split(command.removeprefix("$ tilegen "), comments=True)
            result = CliRunner().invoke(app, words, catch_exceptions=False)
            assert shown == [line.rstrip() for line in result.stdout.splitlines()]
            assert not width or max(map(len, shown)) <= width
    assert seen == {0, 80, 120}


@pytest.mark.slow
def test_the_step_in_the_readme_is_emitted() -> None:
    (command,) = re.findall(r"`tilegen show \"(.*)\" --gpu h200` prints", README)
    shown = tilegen.show(command, "h200", kernel="fwd")
    (step,) = blocks("triton")
    assert step in shown.source


def test_the_readme_is_read_in_five_minutes() -> None:
    prose = re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^\|.*$", "", prose, flags=re.MULTILINE)
    assert len(prose.split()) < 700
    assert README.count("\n") < 190


def test_every_template_variable_is_in_the_legend() -> None:
    problem = AttentionProblem.parse("hq8 hkv2 q64 d72 bf16 window(9,9)")
    context = _context(problem, TileConfig(block_m=64, block_n=64), KERNELS["fwd"], True)
    for name in context:
        assert f"`{name}`" in LEGEND, name
    chunk, ranges, slices = context["qk_chunks"][0], context["ranges"], context["qk_dim"]
    for field in (*vars(chunk), *vars(ranges), *vars(slices)):
        assert f"`{field}`" in LEGEND, field


def test_every_constant_of_emitted_kernels_is_in_the_legend() -> None:
    for template in resources.data_dir("templates").rglob("*.jinja"):
        for name in re.findall(r"^([A-Z][A-Z0-9_]*) = tl\.constexpr", template.read_text(), re.M):
            assert f"`{name}`" in LEGEND, name


def test_changes_begin_with_the_version() -> None:
    changes = (ROOT / "tilegen" / "CHANGES.md").read_text(encoding="utf-8").splitlines()
    assert re.fullmatch(
        rf"Version {re.escape(tilegen.__version__)}, \d{{4}}-\d\d-\d\d\.", changes[2]
    )


def test_both_set_up_commands_are_there_once() -> None:
    commands = re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)
    assert len(commands) == 2
    assert commands[0].endswith("tilegen demo")
    assert commands[1].endswith("/pytest")


FLATTENED = {
    "passes": ("forward", "backward"),
    "resources": ("registers", "spill_bytes", "shared_bytes"),
}


def test_every_field_of_a_manifest_is_on_its_page() -> None:
    for record in (Binary, Served):
        for field in dataclasses.fields(record):
            names = FLATTENED.get(field.name, (field.name,))
            for name in names:
                assert f"`{name}`" in BUNDLES, name


def test_every_argument_of_a_kernel_is_on_the_page_of_bundles() -> None:
    names: set[str] = set()
    for kernel in (name for name, spec in KERNELS.items() if not spec.specialised):
        for text in (
            "hq8 hkv2 q64 d64 bf16 causal",
            "hq8 q64 d64 bf16 score(s+t0[k-q+64],float32+,sinks)",
        ):
            problem = AttentionProblem.parse(text)
            names |= {name for name, _ in render(problem, CONFIGS[kernel], kernel).signature}
    strides = {name for name in names if re.fullmatch(r"stride_[a-z]+[bhmn]", name)}
    for name in names - strides:
        assert f"`{name}`" in BUNDLES, name
    assert {name[7:-1] for name in strides} == {
        *("q", "k", "v", "o", "do", "dq", "dk", "dv"),
        *"wyg",
    }


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "benchmarks/README.md",
        "benchmarks/results/h200/README.md",
        "cache/README.md",
        "cache/operations.md",
        "templates/README.md",
        "templates/variants.md",
        "tests/README.md",
        "tests/gluon/README.md",
        "tests/gluon/memory_model/README.md",
        "tilegen/CHANGES.md",
        "tilegen/README.md",
        "tilegen/bundles/README.md",
        "tilegen/bundles/format.md",
        "tilegen/calls/README.md",
        "tilegen/choose/README.md",
        "tilegen/cli/README.md",
        "tilegen/integrations/README.md",
        "tilegen/cpu/README.md",
        "tilegen/emit/README.md",
        "tilegen/explaining/README.md",
        "tilegen/kernels/README.md",
        "tilegen/masks/README.md",
        "tilegen/model/README.md",
        "tilegen/runtime/README.md",
        "tilegen/store/README.md",
        "tilegen/theory/README.md",
        "tilegen/tuning/README.md",
    ],
)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text(encoding="utf-8"))
    for target in links:
        assert (path.parent / target).exists(), target


def test_the_tour_names_symbols_of_the_files_that_it_links_to() -> None:
    named = re.findall(r"((?:`\w+`(?: and )?)+) (?:in|of) \[[^\]]*\]\(([^)]+\.py)\)", TOUR)
    assert len(named) >= 20
    for symbols, target in named:
        text = (ROOT / "tilegen" / target).read_text(encoding="utf-8")
        for symbol in re.findall(r"`(\w+)`", symbols):
            assert re.search(rf"^(?:def |class )?{symbol}\b", text, re.M), (symbol, target)


def test_every_folder_is_in_the_tour() -> None:
    folders = {path.parent.name for path in (ROOT / "tilegen").glob("*/__init__.py")}
    assert folders == set(re.findall(r"^\| \[(\w+)\]", TOUR, re.M))
