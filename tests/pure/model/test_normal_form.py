"""Problems in normal form: records, bundles, explanations and calls use the same problem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tilegen
from benchmarks.workloads import MASKED
from tests.support.bundles import write_bundle
from tests.support.records import record
from tests.support.replay import SMALL, Replay, ranking
from tilegen.bundles.manifest import MANIFEST, Manifest
from tilegen.choose.families import kernels_of
from tilegen.choose.ranker import estimate, propose, search_space
from tilegen.cli.main import app
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem
from tilegen.runtime import dispatch, plans
from tilegen.store import TuningRecord, look_up, record_path, save
from tilegen.task import KernelTask, Tiled
from tilegen.tuning.jobs import jobs_of
from tilegen.tuning.tuner import tune

H200 = gpu("h200")
PARSE = AttentionProblem.parse
LAYER = "b1 hq16 hkv16 q32768 kv32768 d64 bf16 dilated(4)&window(4095,0)"
DILATED = [
    f"b{batch} hq4 hkv2 q{rows} kv{columns} d16 fp32 {mask}"
    for mask in ("dilated(2)", "causal&dilated(3)", "dilated(5)&window(20,7)", "dilated(7)&causal")
    for batch, rows, columns in ((1, 60, 60), (2, 61, 61), (3, 40, 83), (1, 3, 2), (1, 129, 7))
]
UNCHANGED = [
    "hq2 q64 d16 fp32 causal",
    "hq2 q64 d16 fp32 dilated(4)|causal",
    "hq2 q64 d16 fp32 dilated(2)&dilated(3)",
    "hq2 q64 d16 fp32 causal(bottom_right)&dilated(4)",
    "hq2 q64 d16 fp32 dilated(4) score(k-q+s)",
    "b4 hq2 q64 d16 fp32 dilated(262145)",
]


def looked_up(problem: AttentionProblem, monkeypatch: pytest.MonkeyPatch) -> AttentionProblem:
    """Return the bucket that a call of a problem has kernels chosen for."""
    asked: list[AttentionProblem] = []
    problem_of = dispatch.problem_of
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "problem_of", lambda *a: asked.append(problem_of(*a)) or asked[-1])
        plans.forget()
        q = torch.zeros(problem.batch, problem.num_heads_q, problem.seqlen_q, problem.head_dim_qk)
        k = torch.zeros(problem.batch, problem.num_heads_kv, problem.seqlen_kv, problem.head_dim_qk)
        tilegen.attention(q, k, k, mask=problem.mask)
    return asked[-1].bucket


@pytest.mark.parametrize("text", DILATED)
def test_calls_look_up_the_records_of_tuning(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    problem = PARSE(text)
    bucket = looked_up(problem, monkeypatch)
    assert "dilated" not in bucket.key
    replay = Replay(SMALL)
    options: dict[str, Any] = {"candidates": ranking(replay.space), "space": replay.space}
    written = tune(KernelTask.of("fwd", problem, H200), measure=replay, progress=False, **options)
    assert (tmp_path / record_path("h200", "fwd", bucket)).is_file()
    assert written.problem == bucket
    for asked in (problem, bucket, PARSE(bucket.key)):
        entry = look_up(KernelTask.of("fwd", asked, H200))
        assert entry is not None
        assert entry.record == written
    assert {job.problem for job in jobs_of([problem], H200)} == {bucket}


def test_a_bundle_serves_the_problem_of_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = PARSE(DILATED[5])
    write_bundle([problem, problem.normal()], [H200], tmp_path)
    (served,) = Manifest.from_json((tmp_path / MANIFEST).read_text()).problems
    assert served.problem == problem.normal().key
    assert PARSE(served.problem).bucket == looked_up(problem, monkeypatch)


@pytest.mark.parametrize("text", [*DILATED, *UNCHANGED])
def test_the_normal_form_of_a_normal_form_is_itself(text: str) -> None:
    problem = PARSE(text)
    normal = problem.normal()
    assert normal.normal() is normal
    assert PARSE(normal.key) == normal
    assert normal.bucket == problem.bucket == problem.bucket.bucket
    assert (normal is problem) == (text in UNCHANGED) == (not problem.rewriting)
    if text in UNCHANGED:
        assert problem.bucket == problem.rounded


def test_lengths_of_a_bucket_share_its_record() -> None:
    """How many columns the last groups lack is read at run time, and no part of a key."""
    keys = {PARSE(f"hq2 q{n} d16 fp32 dilated(4)").bucket.key for n in range(65, 129) if n % 4}
    assert keys == {"b4 hq2 hkv2 q32 kv32 d16 fp32 kv_prefix(@b:32)"}


def test_the_model_uses_the_normal_form() -> None:
    problem = PARSE(LAYER)
    normal = PARSE("b4 hq16 hkv16 q8192 kv8192 d64 bf16 window(1023,0)")
    config = TileConfig.parse("m128n64w8s3")
    assert problem.normal() == normal
    assert propose(KernelTask.of("fwd", problem, H200), top=3) == propose(
        KernelTask.of("fwd", normal, H200), top=3
    )
    assert estimate(Tiled.of("fwd", problem, H200, config)) == estimate(
        Tiled.of("fwd", normal, H200, config)
    )
    assert search_space(KernelTask.of("fwd", problem, H200)) == search_space(
        KernelTask.of("fwd", normal, H200)
    )
    assert kernels_of(problem, H200) == kernels_of(normal, H200)


def test_the_catalogue_tunes_no_key_that_no_call_looks_up() -> None:
    assert all("dilated" not in workload.problem.bucket.key for workload in MASKED)
    assert any("dilated" in workload.problem.key for workload in MASKED)


@pytest.mark.parametrize("command", [("propose",), ("explain", "--kernel", "fwd")])
def test_commands_show_the_rewritten_mask(
    command: tuple[str, ...],
) -> None:
    name, *options = command
    text = "hq2 q64 d16 bf16 dilated(4)&window(15,0)"
    line = PARSE(text).rewriting
    assert line == (
        "mask dilated(4)&window(15,0) rewritten: what is computed is "
        "'b4 hq2 hkv2 q16 kv16 d16 bf16 window(3,0)'"
    )
    shown = CliRunner().invoke(app, [name, text, "--gpu", "h200", *options]).stdout
    assert shown.splitlines()[0] == line
    assert "dilated" not in shown.replace(line, "")
    assert not PARSE("hq2 q64 d16 bf16 causal").rewriting


def test_records_of_an_earlier_form_still_load_and_are_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    old = record(problem=PARSE(LAYER))
    assert TuningRecord.from_json(old.to_json()) == old
    saved = save(old)
    assert "dilated" in saved.file
    assert look_up(KernelTask.of("fwd", PARSE(LAYER), H200)) is None
    listed = CliRunner().invoke(app, ["cache", "verify", "--json"])
    assert listed.exit_code == 0, listed.stdout
    assert all(not one["trouble"] for one in json.loads(listed.stdout) if "dilated" in one["file"])
