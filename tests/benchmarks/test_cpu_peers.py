"""The benchmark of other attentions on a CPU: its rows, what it refuses to time, its table."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import cpu_peers
from benchmarks.cpu_peer_calls import PEERS, Call, Case, Peer
from benchmarks.environment import RESULTS
from benchmarks.rows import read
from tests.support.calls import compiled_once
from tilegen.errors import Unsupported
from tilegen.problem import AttentionProblem

SMALL = [
    AttentionProblem.parse(text)
    for text in ("hq4 hkv2 q1 kv64 d32 fp32 full", "hq2 q64 d32 fp32 window(9,0)")
]


@pytest.fixture(autouse=True)
def _machine() -> Iterator[None]:
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    yield
    torch.set_num_threads(threads)
    os.sched_setaffinity(0, cores)


@pytest.fixture
def _kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with compiled_once(tmp_path_factory):
        yield


def _run(out: Path, peers: str) -> None:
    cpu_peers.main(out=out, minutes=5.0, seconds=0.001, peers=peers)


@pytest.mark.usefixtures("_kernels")
def test_rows_and_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_peers, "cases", lambda: iter(SMALL))
    out = tmp_path / "peers.csv"
    for _ in range(2):  # the second run has nothing left to measure
        _run(out, "SDPA,SDPA rows")
    rows = read(out)
    assert [row["peer"] for row in rows] == ["tilegen", "SDPA", "SDPA rows", "tilegen", "SDPA"]
    for row in rows:
        assert float(row["error"]) < 1e-5
        assert (float(row["ratio"]) == 1) == (row["peer"] == "tilegen")
    capsys.readouterr()
    cpu_peers.main(out=out, only_summary=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[4] == "| problem | tilegen | SDPA | SDPA rows |"
    assert lines[7].startswith("| hq2 hkv2 q64 kv64 d32 fp32 window(9,0) | ")
    assert lines[7].endswith(" |  |")  # no heads as rows for many queries


@pytest.mark.usefixtures("_kernels")
def test_wrong_peers_and_absent_ones_have_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(case: Case) -> Call:
        return Call(lambda: 2 * PEERS["SDPA"].make(case).run(), lambda result: result)

    def refuses(case: Case) -> Call:
        raise Unsupported("queries: 7 at most")

    for name, peer in {
        "wrong": Peer(wrong, "torch"),
        "refuses": Peer(refuses, "torch"),
        "absent": Peer(wrong, "no-such-package"),
    }.items():
        monkeypatch.setitem(PEERS, name, peer)
    monkeypatch.setattr(cpu_peers, "cases", lambda: iter(SMALL[1:]))
    out = tmp_path / "peers.csv"
    _run(out, "wrong,refuses,absent,SDPA")
    assert [row["peer"] for row in read(out)] == ["tilegen", "SDPA"]
    said = capsys.readouterr().out
    assert "wrong: WRONG by" in said
    assert "refuses: queries: 7 at most" in said
    assert "pip install --no-deps no-such-package" in said


def test_masks_of_cases() -> None:
    """Each problem's inputs have the mask of its notation."""
    for problem in SMALL:
        keep = cpu_peers.case_of(problem).keep()
        distance = torch.arange(problem.seqlen_q)[:, None] - torch.arange(problem.seqlen_kv)
        wanted = (distance >= 0) & (distance <= 9) if problem is SMALL[1] else distance > -1000
        assert torch.equal(keep, wanted)


def test_flex_attention_is_compiled_for_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch compiles a function for eight shapes only, and then runs FlexAttention unfused."""
    forgotten: list[bool] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: forgotten.append(True))
    for problem in SMALL:
        PEERS["FlexAttention"].make(cpu_peers.case_of(problem))
    assert len(forgotten) == len(SMALL)


def test_the_pages_have_the_summaries_of_the_result_files() -> None:
    """Tables of both processors, losses in turns with vLLM alone, and the least ratios."""
    page = (RESULTS.parent / "README.md").read_text(encoding="utf-8")
    rows = read(RESULTS / "cpu" / "peers.csv")
    tables = re.findall(r"(?:^\|.*\n)+", "\n".join(cpu_peers.summary(rows)), re.MULTILINE)
    assert len(tables) == len({row["processor"] for row in rows}) > 1
    for table in tables:
        assert table in page
    front = (RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
    for table in tables:
        ratios = [float(cell) for cell in re.findall(r"(?<=\| )[\d.]+(?= \|)", table)]
        assert f"{min(ratios):.2f} " in front
    alone = list(cpu_peers.summary(read(RESULTS / "cpu" / "peers_vllm.csv")))
    losses = [line for line in alone if line.startswith("slower")]
    assert losses
    assert all(line in page for line in losses)
