"""Few queries on many keys: the table of targets, what is measured, and FlashInfer as a peer."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch

from benchmarks import decode
from benchmarks import run as driver
from benchmarks.check import check, make_inputs
from benchmarks.providers import providers
from benchmarks.run import Case
from tests.benchmarks.result_files import own_columns
from tilegen.errors import Unsupported
from tilegen.problem import AttentionProblem
from tilegen.tuning.measure import DeviceLost, Measurement


class Planned:
    """Stands for FlashInfer's wrappers, whose layouts it reads; PyTorch computes."""

    def __init__(self, workspace: torch.Tensor, layout: str, **options: object) -> None:
        assert layout == "NHD"

    def plan(self, *arguments: Any, causal: bool = False, **options: object) -> None:
        self.arguments, self.causal = arguments, causal

    def run(self, q: torch.Tensor, *kv: Any) -> torch.Tensor:
        starts = self.arguments
        if paged := len(kv) == 1:
            pages, indices, last, heads_q, heads_kv, _, page = starts
            assert (last == page).all()
            rows = [one[indices.long()].flatten(0, 1) for one in kv[0]]
            q_at, kv_at = torch.arange(len(q) + 1), pages * page
        else:
            q_at, kv_at, heads_q, heads_kv, _ = starts
            rows = list(kv)
        outs = []
        for i in range(len(q_at) - 1):
            mine = q[q_at[i] : q_at[i + 1]].transpose(0, 1)
            k, v = (one[kv_at[i] : kv_at[i + 1]].transpose(0, 1) for one in rows)
            assert (mine.shape[0], k.shape[0]) == (heads_q, heads_kv)
            mask = torch.ones(mine.shape[1], k.shape[1], dtype=torch.bool)
            mask = mask.tril(k.shape[1] - mine.shape[1]) if self.causal else mask
            outs.append(
                torch.nn.functional.scaled_dot_product_attention(
                    mine, k, v, attn_mask=mask, enable_gqa=True
                ).transpose(0, 1)
            )
        assert not (paged and self.causal)
        return torch.cat(outs)


FLASHINFER = ["q1 kv64 d16 fp16 full", "q3 kv40 d16 fp16 causal(bottom_right)", "q9 d16 fp16 full"]


@pytest.mark.parametrize("text", FLASHINFER)
def test_flashinfer_gets_the_right_rows(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("flashinfer")
    fake.BatchDecodeWithPagedKVCacheWrapper = Planned  # type: ignore[attr-defined]
    fake.BatchPrefillWithRaggedKVCacheWrapper = Planned  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    problem = AttentionProblem.parse(f"b2 hq4 hkv2 {text}")
    (peer,) = (one for one in providers() if one.name == "flashinfer")
    inputs = make_inputs(problem, device="cpu", rows_first=peer.rows_first)
    attention = peer.prepare(problem, "cpu")
    verdict = check(problem, inputs, {"out": attention(inputs.q, inputs.k, inputs.v)})
    assert verdict.ok, verdict.detail
    with pytest.raises(Unsupported, match="no gradients"):
        attention(inputs.q.requires_grad_(), inputs.k, inputs.v)
    with pytest.raises(Unsupported, match="fp16 and bf16"):
        peer.prepare(replace(problem, dtype="fp32"), "cpu")


def test_flashinfer_that_is_not_installed_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    (peer,) = (one for one in providers() if one.name == "flashinfer")
    with pytest.raises(Unsupported, match="FlashInfer is not installed"):
        peer.prepare(AttentionProblem.parse("hq1 q1 kv64 d64 fp16"), "cpu")


def test_the_table_of_decoding_equals_the_model(tmp_path: Path) -> None:
    path = tmp_path / "predicted.csv"
    decode.write(path, [decode.predict(target) for target in decode.TARGETS])
    (head, *rows), (names, *kept) = (
        own_columns(one, decode.Predicted) for one in (path, decode.PREDICTED)
    )
    assert head == names
    by_model = head.index("compiled")  # what compiling tells comes last: see compile_only
    assert [row[:by_model] for row in rows] == [row[:by_model] for row in kept], (
        "python -m benchmarks.decode"
    )
    assert {*head[by_model:]} == {"compiled", "compiled_us"}
    assert all(all(row) for row in kept)


@pytest.mark.parametrize("there", [False, True])
def test_decoding_is_measured_where_there_is_a_gpu(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, str]] = []

    def run(todo: Iterable[Case], path: Path, **options: object) -> int:
        asked.extend((case.workload.name, case.provider.name) for case in todo)
        return 3

    monkeypatch.setattr(decode, "has_gpu", lambda: there)
    monkeypatch.setattr(decode, "as_compiled", lambda row: row)
    monkeypatch.setattr(driver, "run", run)
    path = tmp_path / "predicted.csv"
    decode.main(predicted=path, csv=tmp_path / "rows.csv")
    assert len(path.read_text().splitlines()) == 1 + len(decode.TARGETS)
    said = capsys.readouterr().out
    assert ("3 rows left" in said, "nothing is measured" in said) == (there, not there)
    everything = itertools.product([one.workload.name for one in decode.TARGETS], decode.PEERS)
    assert sorted(asked) == (sorted(everything) if there else [])


def test_after_a_lost_device_decoding_starts_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(todo: Iterable[Case], path: Path, **options: object) -> int:
        raise DeviceLost(Measurement(status="launch_failed", message="illegal address"))

    started: list[str] = []

    def start_over(deadline: float, *options: str) -> NoReturn:
        started.extend(options)
        raise SystemExit

    monkeypatch.setattr(decode, "has_gpu", lambda: True)
    monkeypatch.setattr(decode, "as_compiled", lambda row: row)
    monkeypatch.setattr(driver, "run", run)
    monkeypatch.setattr(driver, "start_over", start_over)
    rows = tmp_path / "rows.csv"
    with pytest.raises(SystemExit):
        decode.main(predicted=tmp_path / "predicted.csv", csv=rows)
    assert started == [f"--csv={rows}"]


def test_targets_are_compared_with_their_bounds() -> None:
    rows = [decode.predict(target) for target in decode.TARGETS]
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.predicted_us > row.bytes_us + row.launches_us
        assert row.invariant_us >= row.predicted_us
        assert row.launches_us == pytest.approx(3 + 1.75 * (len(row.configs.split()) - 1))
        assert row.predicted_over_goal == pytest.approx(row.predicted_us / row.goal_us)
    last = rows[-1]
    assert last.bytes_us == last.goal_us == pytest.approx(1.0764e9 / 4.3e12 * 1e6, rel=2e-3)
    assert decode.TARGETS[-1].workload.directions == ("forward",)
    names = {provider.name for provider in providers()}
    assert names >= set(decode.PEERS)
