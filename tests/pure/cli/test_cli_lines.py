"""Any command line ends in order: exit code 0, or 1 or 2 and one line; never a traceback."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tilegen.cli import main
from tilegen.kernels.registry import KERNELS
from tilegen.tuning.campaign import Outcome

SEED = 20_261_122
LINES = 500

PROBLEMS = [
    *(
        "hq2 q64 d16 fp32",
        "hq2 q64 d16 fp32 causal",
        "b2 hq4 hkv2 q100 kv60 d32/16 bf16 window(9,0)",
    ),
    *("hq8", "q64 hq2", "hq2 q64 d16 fp8", "hq2 q0 d16 fp32", "hq3 hkv2 q64 d16 fp32"),
    *("hq2 q64 d16 fp32 causal full", "hq2 hq2 q64 d16 fp32", "hq2 q64 d9999 fp32"),
    *("hq2 q64 d16 fp32 ~(", "hq2 q64 d16 fp32 window(", "hq2 q64 d16 fp32 window(-5,x)"),
    *("hq2 q64 d16 fp32 keep(__import__('os'))", "hq2 q64 d16 fp32 keep(k<=)", "(" * 3000),
    *("hq2 q64 d16 fp32 score(s**s**s)", "hq2 q64 d16 fp32 score()", "~" * 3000 + "causal"),
    *("hq2 q64 d16 fp32 score(t0[h],object)", "hq2 q64 d16 fp32 &|", "hq\uff12 q64 d16 fp32"),
    *(
        "hq99999999999999999999 q64 d16 fp32",
        f"hq2 q{'9' * 5000} d16 fp32",
        "hq2 q64 d16 \uff46p32",
    ),
]
NUMBERS = ["0", "1", "-1", "3", "2.5", "1e400", "nan", "inf", "-inf", "٣", "0x10", "1_0", "9" * 30]
STRANGE = [
    "",
    " ",
    "-",
    "--",
    "=",
    "a" * 5000,
    "é漢",
    "\udcff",
    "\x1b[31m",
    "a\nb",
    "%s{0}",
    "'",
    "~x",
]
NUMERIC = {"seconds", "top", "trials", "stale_after", "older_than", "port", "threads"}
PLACES = [".", "missing/below", "text", "text/below", "folder", "link", "own", "a" * 300]
PLACES += ["nope://x", "file:///missing", "memory://x", "s3:", "folder/../folder", "x.bmp"]
NAMES = ["h200", "a100", "h201", "all", "sm_90", "sm_1", "gfx942", "m64n32", "m64n32w4s2", "m0n0"]
NAMES += ["48KiB", "-1KiB", "redis://x", "0/2", "2/2", "06:00", "25:00"]
FLAGS = ["--json", "--json=1", "--nope", "-x", "-h", "--help", "--version", "--", "--gpu", "-j5"]


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command with the words that call it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMAND = typer.main.get_command(main.app)
ALL = list(commands(COMMAND))


def broken(text: str, draw: random.Random) -> str:
    """Return a text with a letter lost, doubled or exchanged."""
    at = draw.randrange(len(text) + 1)
    return text[:at] + draw.choice(["", text[at : at + 1] * 2, "é", "(", "-", "0"]) + text[at + 1 :]


def value(parameter: Any, draw: random.Random) -> str:
    """Return something for an option or an argument, at times of the right kind."""
    if draw.random() < 0.15:
        return draw.choice(STRANGE)
    if parameter.name in ("problem", "catalog"):
        text = draw.choice(PROBLEMS)
        return broken(text, draw) if draw.random() < 0.3 else text
    if parameter.name in ("gpu", "kernel", "config", "storage", "arch", "gpus", "fast_memory"):
        return draw.choice([*NAMES, *KERNELS])
    return draw.choice(NUMBERS if parameter.name in NUMERIC else PLACES)


def line(draw: random.Random) -> list[str]:
    """Return a command line: mostly a known command with some of what it takes."""
    words, command = draw.choice(ALL)
    rest: list[list[str]] = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            if draw.random() < 0.9:
                rest.append([value(parameter, draw)])
        elif draw.random() < (0.9 if parameter.required else 0.2):
            name = draw.choice(parameter.opts)
            rest.append([name] if parameter.is_flag else [name, value(parameter, draw)])
    if draw.random() < 0.3:
        rest.append([draw.choice([*FLAGS, *STRANGE])])
    draw.shuffle(rest)
    results = [*words, *(word for some in rest for word in some)]
    if draw.random() < 0.1:
        results.insert(draw.randrange(len(results)), draw.choice([*FLAGS, *STRANGE]))
    return results


@pytest.fixture
def a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a few things in it to work in; what would take long is not begun."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("kernels: [\n\x00 1, {")
    (tmp_path / "link").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(main, "app", COMMAND)
    monkeypatch.setattr("tilegen.gpus.spec.detect", lambda *_: None)
    monkeypatch.setattr("tilegen.cli.demo.demonstrate", lambda *_: {})
    monkeypatch.setattr("tilegen.check.verification.verify", lambda *_: [])
    monkeypatch.setattr("tilegen.bundles.building.generate", lambda *_, **__: tmp_path / "x")
    monkeypatch.setattr("tilegen.explaining.plot.draw", lambda *_: None)
    monkeypatch.setattr("tilegen.tuning.campaign.tune_all", lambda *_: Outcome())
    monkeypatch.setattr("tilegen.cli.tuning._one_each", lambda *_: Outcome())
    return tmp_path


@pytest.mark.slow
def test_any_command_line_ends_in_order(
    a_place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(SEED)
    codes: Counter[int] = Counter()
    for words in (line(draw) for _ in range(LINES)):
        monkeypatch.setattr(sys, "argv", ["tilegen", *words])
        code: Any = 0
        try:
            main.main()
        except SystemExit as end:
            code = end.code
        except BaseException as error:  # Python would print it with a traceback
            pytest.fail(f"tilegen {words}: {error!r}")
        said = capsys.readouterr()
        assert "Traceback" not in said.out + said.err, words
        if code == 0:
            assert said.err == "", words
        else:
            assert code in (1, 2), words
            assert said.err.startswith("error: "), words
            assert said.err.removesuffix("\n").isprintable(), words
        codes[code] += 1
    assert codes[0] > LINES // 20
    assert codes[2] > LINES // 2


def test_no_device_is_replaced_by_a_file(
    a_place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`/dev/null` stays what it is, whoever exports to it."""
    device = a_place / "text"
    monkeypatch.setattr(Path, "is_char_device", lambda path: path == device)
    before = device.read_bytes()
    monkeypatch.setattr(sys, "argv", ["tilegen", "cache", "export", str(device), "shipped"])
    with pytest.raises(SystemExit):
        main.main()
    assert f"cannot write '{device}': expected a file, found a device" in capsys.readouterr().err
    assert device.read_bytes() == before
