"""`tilegen compare`: real times and memory of small problems, and cases that are left out."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import tilegen
from tests.pure.cli.test_cli import failing, run
from tilegen.check.reference import make_inputs
from tilegen.comparing import compare as module
from tilegen.comparing import report
from tilegen.comparing.attentions import ON_CPU, Measured, counted_bytes, function_of
from tilegen.comparing.children import Worker
from tilegen.comparing.compare import Cell, Row, doubled, rows_of
from tilegen.errors import InvalidProblem, Unsupported
from tilegen.problem import AttentionProblem

SMALL = "hq2 hkv1 q64 d16 fp32 causal"


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEGEN_CPU", raising=False)
    monkeypatch.setattr("tilegen.gpus.spec.detect", lambda *_: None)
    monkeypatch.setattr(module, "SECONDS", 0.001)


@pytest.mark.parametrize("name", [name for name in ON_CPU if name != "flex"])
@pytest.mark.parametrize("mask", ["full", "causal", "window(9,0)", "documents(@q:16)"])
def test_each_attention_computes_the_problem(name: str, mask: str) -> None:
    problem = AttentionProblem.parse(f"hq4 hkv2 q50 d16 fp32 {mask}")
    x = make_inputs(problem)
    realized = problem.mask.realized(problem.shape, "cpu")
    keep = torch.from_numpy(realized.pairs(50, 50))
    scores = x.q.double() @ x.k.double().repeat_interleave(2, 1).transpose(-1, -2) / 4
    weights = scores.masked_fill(~keep, -torch.inf).softmax(-1)
    expected = weights @ x.v.double().repeat_interleave(2, 1)
    actual = function_of(name, problem, "cpu")(x.q, x.k, x.v)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_rows_of_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Row] = []
    rows = tilegen.compare(SMALL, "64..128", backward=True, on_row=seen.append)
    assert rows == seen
    assert [(row.length, row.direction) for row in rows] == [
        (64, "forward"),
        (64, "backward"),
        (128, "forward"),
        (128, "backward"),
    ]
    for row in rows:
        cells = {cell.attention: cell for cell in row.cells}
        assert tuple(cells) == ON_CPU
        assert cells["tilegen"].ratio == 1
        assert "half a minute" in cells["flex"].reason
        for name in ("tilegen", "sdpa flash", "sdpa math", "standard"):
            assert cells[name].seconds, cells[name].reason
            assert not cells[name].predicted
            assert cells[name].peak_bytes is not None


@pytest.mark.slow
def test_memory_grows_with_the_length_or_with_its_square() -> None:
    """By lengths at which nothing else of a process is as large as a head's scores."""
    peaks: dict[str, list[int]] = {}
    for name in ("tilegen", "standard"):
        child = Worker(Measured, name, "cpu", gib=2.0, device="cpu", threads=1)
        with child:
            for length in (1024, 4096):
                key = f"hq2 q{length} d64 fp32 causal"
                peak = child.call("peak", key, "backward")
                counted = counted_bytes(name, AttentionProblem.parse(key), "backward")
                assert 0.9 * counted < peak < 3 * counted, (name, length)
                peaks.setdefault(name, []).append(peak)
    assert peaks["tilegen"][1] < 6 * peaks["tilegen"][0]
    assert peaks["standard"][1] > 6 * peaks["standard"][0]


def test_cases_beyond_memory_or_time_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as less:
        less.setattr(module, "_free", lambda _: 2**20)
        less.setattr(module._Table, "_peak", lambda *_: None)
        (row,) = tilegen.compare(SMALL, [1024])
    (standard,) = (cell for cell in row.cells if cell.attention == "standard")
    assert (standard.seconds, standard.reason[:6]) == (None, "needs ")
    (row,) = tilegen.compare(SMALL, [64], minutes=1e-6)
    assert all("no time left" in cell.reason for cell in row.cells if cell.attention != "flex")


def test_other_devices_are_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    text = run("compare", "hq8 d64 bf16 causal", "--gpu", "h200", "--lengths", "512..1024")
    title, header, *lines = text.splitlines()
    assert title == "b1 hq8 hkv8 d64 bf16 causal, predicted, on h200"
    assert header.split()[:2] == ["length", "tilegen"]
    best = tilegen.propose("hq8 q512 d64 bf16 causal", "h200", top=1)[0]
    assert lines[0].startswith("512 fwd")
    assert report.seconds_text(best.estimate.seconds) in lines[0]
    assert set(lines[0].split()[4:]) == {"-"}
    assert "within 25 %" in text


@pytest.mark.slow
def test_json_has_the_rows() -> None:
    (row,) = json.loads(run("compare", SMALL, "--lengths", "64", "--json"))
    assert (row["length"], row["direction"]) == (64, "forward")
    assert row["cells"][0]["seconds"] > 0


def test_ctrl_c_keeps_the_rows_and_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = Cell(attention="tilegen", seconds=1e-3, peak_bytes=2**20, counted_bytes=2**19)
    row = Row(problem=SMALL, direction="forward", length=64, device="x", threads=1, cells=(cell,))

    def interrupted(*_: object, **__: object) -> object:
        yield row
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "rows_of", interrupted)
    file = tmp_path / "a.svg"
    monkeypatch.setattr(sys, "argv", ["tilegen", "compare", SMALL, "--plot", str(file)])
    with pytest.raises(SystemExit) as caught:
        tilegen_main()
    assert caught.value.code == 130
    out = capsys.readouterr().out
    assert "64 fwd" in out
    assert "1.00 ms" in out
    assert "<svg" in file.read_text()


def tilegen_main() -> None:
    from tilegen.cli.main import main

    main()


@pytest.mark.slow
def test_pictures_are_the_same_for_the_same_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = list(rows_of(AttentionProblem.parse(SMALL), "64..128"))
    for name in ("a.svg", "a.png"):
        report.draw(rows, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    texts = re.findall("<!-- (.*?) -->", (tmp_path / "a.svg").read_text())
    assert texts.count("forward: time, ms") == texts.count("forward: peak of memory, MiB") == 1
    names = [cell.attention for cell in rows[0].cells if cell.seconds]
    assert {texts.count(name) for name in names} == {1}, "each is in the legend once"
    assert texts.count(report.title(rows[0])) == 1


@pytest.mark.parametrize(
    "words, message",
    [
        (["hq2 d16 fp32", "--lengths", "128..64"], "must ascend"),
        (["hq2 d16 fp32", "--lengths", "many"], "lengths must be such as"),
        (["hq2 d16 fp32 page16"], "leave the page out"),
        (["hq2 d16 fp32", "--plot", "x.bmp"], "end in .png, .svg, got 'x.bmp'"),
        (["hq2 d16 fp32", "--plot", "/nowhere/x.png"], "no folder"),
        (["hq2 d16"], "no dtype"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert message in failing(monkeypatch, capsys, "compare", *words)


def test_lengths_double() -> None:
    assert doubled("512..8192") == [512, 1024, 2048, 4096, 8192]
    assert doubled("500..1500") == [500, 1000]
    assert doubled([3, 1, 3]) == [1, 3]
    with pytest.raises(InvalidProblem):
        doubled([0])


def test_a_backward_that_does_not_exist_is_refused() -> None:
    with pytest.raises(Unsupported, match="with a backward"):
        list(rows_of(AttentionProblem.parse("hq2 hkv1 q8 d192/128 fp32 latent"), backward=True))
