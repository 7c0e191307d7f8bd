"""Tuning on this machine's processor: records that calls use, and interruptions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import tilegen
from tests.support.records import timed
from tilegen import api, pipeline
from tilegen.choose import on_cpu
from tilegen.cli.demo import demonstrate
from tilegen.cpus.host import current_cpu
from tilegen.device import ONE_THREAD
from tilegen.disk import say_once
from tilegen.errors import Unsupported
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem
from tilegen.runtime import plans
from tilegen.store import Location, TuningRecord, Versions, save
from tilegen.store.lookup import similar_devices
from tilegen.task import KernelTask
from tilegen.tuning import in_turns
from tilegen.tuning.measure import Measurement
from tilegen.tuning.tuner import tune

TEXT = "b1 hq2 hkv1 q64 kv64 d32 fp32 causal"
PROBLEM = AttentionProblem.parse(TEXT)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no other records, no GPU, and short measurements."""
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tilegen.gpus.spec.detect", lambda *_: None)
    monkeypatch.setattr(in_turns, "SECONDS", 0.0)
    monkeypatch.setattr(in_turns, "CONFIRMED_SECONDS", 0.0)
    plans.forget()
    return tmp_path


def chosen() -> dict[str, tuple[TileConfig, str]]:
    choices = pipeline.choose(PROBLEM, current_cpu())
    return {name: (choice.config, choice.ranked.origin) for name, choice in choices.items()}


def preferring(config: TileConfig) -> Callable[..., list[tuple[float, float]]]:
    """Replace times: a config takes half the time of the one in hand, others twice its time."""

    def pairs(function: Callable[[], object], other: Callable[[], object], **_: object) -> object:
        function()
        other()
        return [(1e-3, 5e-4 if getattr(other, "config", None) == config else 2e-3)] * 9

    return pairs  # type: ignore[return-value]


def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have launches tell their config."""
    run_of = in_turns.InTurns._run

    def run(self: in_turns.InTurns, config: TileConfig) -> Callable[[], object]:
        launch = run_of(self, config)
        launch.config = config  # type: ignore[attr-defined]
        return launch

    monkeypatch.setattr(in_turns.InTurns, "_run", run)


@pytest.mark.slow
def test_flex_attention_uses_the_record_of_its_function(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The record was tuned under the name of the mask; the call has a function."""
    problem = AttentionProblem.parse("b1 hq2 hkv1 q64 kv64 d32 fp32 causal&window(15,-1)")
    task = KernelTask.of("fwd", problem, current_cpu())
    model = pipeline.choose(problem, current_cpu())["fwd"].config
    other = next(config for config in on_cpu.tuned_space(task) if config != model)
    named(monkeypatch)
    monkeypatch.setattr(in_turns, "pairs_of", preferring(other))
    (record,) = api.tune(problem, kernel="fwd", trials=9)
    assert record.config == other
    plans.forget()

    def window(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k <= 15)

    blocks = create_block_mask(window, None, None, 64, 64, device="cpu")
    q, k, v = torch.randn(1, 2, 64, 32), torch.randn(1, 1, 64, 32), torch.randn(1, 1, 64, 32)
    caplog.set_level(logging.DEBUG, logger="tilegen")
    with tilegen.settings(cpu="kernels"):
        out = tilegen.flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
    (choice,) = (text for text in caplog.messages if text.startswith("fwd for"))
    assert f"{other}, from {own_cache / record.path}" in choice
    distance = torch.arange(64)[:, None] - torch.arange(64)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(),
        k.double(),
        v.double(),
        attn_mask=(distance >= 0) & (distance <= 15),
        enable_gqa=True,
    )
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_calls_use_the_tuned_config(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = chosen()
    assert before["fwd"][1] == "model"
    task = KernelTask.of("fwd", PROBLEM, current_cpu())
    other = next(config for config in on_cpu.tuned_space(task) if config != before["fwd"][0])
    named(monkeypatch)
    monkeypatch.setattr(in_turns, "pairs_of", preferring(other))
    (record,) = api.tune(PROBLEM, kernel="fwd", trials=9)
    assert (record.gpu, record.arch) == (current_cpu().name, current_cpu().arch)
    assert (record.policy, record.config) == (ONE_THREAD, other)
    file = own_cache / record.path
    assert file.name.endswith(f".{ONE_THREAD}.json")
    assert TuningRecord.from_json(file.read_text(encoding="utf-8")) == record
    assert chosen()["fwd"] == (other, "record")
    q, k, v = torch.randn(1, 2, 64, 32), torch.randn(1, 1, 64, 32), torch.randn(1, 1, 64, 32)
    out = tilegen.attention(q, k, v, mask=tilegen.causal())
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_winner_that_does_not_win_again_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_hand = chosen()["fwd"][0]
    task = KernelTask.of("fwd", PROBLEM, current_cpu())
    other = next(config for config in on_cpu.tuned_space(task) if config != in_hand)
    named(monkeypatch)
    monkeypatch.setattr(in_turns, "pairs_of", preferring(other))
    monkeypatch.setattr(in_turns.InTurns, "confirm", lambda *_: False)
    (record,) = api.tune(PROBLEM, kernel="fwd", trials=9)
    assert record.config == in_hand


def test_an_interrupted_run_keeps_its_trials(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, count = in_turns.InTurns.measure, [0]

    def interrupted(self: in_turns.InTurns, config: TileConfig) -> Measurement:
        count[0] += 1
        if count[0] == 2:
            raise KeyboardInterrupt
        return measure(self, config)

    monkeypatch.setattr(in_turns.InTurns, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        api.tune(PROBLEM, kernel="fwd", trials=3)
    (trials,) = own_cache.rglob("*.jsonl")
    assert trials.read_bytes().count(b"\n") == 1
    assert chosen()["fwd"][1] == "record"
    api.tune(PROBLEM, kernel="fwd", trials=3)
    assert trials.read_bytes().count(b"\n") == 3


def test_a_call_tunes_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_TUNE", "1")
    monkeypatch.setattr("tilegen.choose.records.TUNE_SECONDS_ON_CPU", 0.01)
    q, k, v = torch.randn(1, 2, 64, 32), torch.randn(1, 1, 64, 32), torch.randn(1, 1, 64, 32)
    tilegen.attention(q, k, v, mask=tilegen.causal())
    assert chosen()["fwd"][1] == "record"
    assert chosen()["bwd_one_pass"][1] == "model"


def test_deterministic_choices_are_not_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_TUNE", "1")
    monkeypatch.setenv("TILEGEN_DETERMINISTIC", "1")
    assert pipeline.choose(PROBLEM, current_cpu(), may_tune=True)["fwd"].ranked.origin == "model"


def test_another_processor_is_not_tuned_for() -> None:
    from dataclasses import replace

    other = replace(current_cpu(), name="another")
    with pytest.raises(Unsupported, match=r"tuning for another needs that processor, found "):
        tune(KernelTask.of("fwd", PROBLEM, other), trials=1)


def test_a_call_borrows_from_another_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The nearest processor with the same vectors has a record, which a line names."""
    others = similar_devices(current_cpu())
    if not others:
        pytest.skip(f"no other processor of the catalogue has {current_cpu().arch}")
    monkeypatch.setenv("TILEGEN_CACHE_PATH", str(tmp_path / "shared"))
    in_hand = chosen()["fwd"][0]
    task = KernelTask.of("fwd", PROBLEM, current_cpu())
    other = next(config for config in on_cpu.tuned_space(task) if config != in_hand)
    borrowed = TuningRecord(
        gpu=others[0].name,
        arch=others[0].arch,
        policy=ONE_THREAD,
        kernel="fwd",
        problem=PROBLEM.bucket,
        config=other,
        measurement=timed(100.0),
        versions=Versions(),
        date="2026-11-26T12:00:00Z",
    )
    assert save(borrowed, location=Location(str(tmp_path / "shared"), "shared")).written
    say_once.cache_clear()
    q, k, v = torch.randn(1, 2, 64, 32), torch.randn(1, 1, 64, 32), torch.randn(1, 1, 64, 32)
    with caplog.at_level(logging.INFO, logger="tilegen"):
        tilegen.attention(q, k, v, mask=tilegen.causal())
    assert any(
        line.startswith(f"no measured record for {current_cpu().name}: ")
        and f"/{others[0].name}/fwd/" in line
        and line.endswith(" is borrowed")
        for line in caplog.messages
    )
    assert chosen()["fwd"] == (other, "record")


@pytest.mark.slow
def test_the_demonstration_tunes_once() -> None:
    lines: list[str] = []
    first = demonstrate(TEXT, lines.append, 0.01)
    assert {*first["records"]} == {"fwd", "bwd_one_pass"}
    assert any("tiles tried" in line for line in lines)
    assert any("SDPA" in line and "times its speed" in line for line in lines)
    lines.clear()
    second = demonstrate(TEXT, lines.append, 0.01)
    assert second["records"] == {}
    assert "-- tune: nothing, since calls use records of earlier runs" in lines
    assert second["configs"] == first["configs"]
