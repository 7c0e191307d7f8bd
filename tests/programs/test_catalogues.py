"""Tuning of catalogues on this machine: replays, shards, several devices, ends of all kinds."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.recordings import Recorder, new_session
from tests.programs.ray_nodes import lines_of
from tests.support import warm
from tests.support.records import H200, PROBLEM
from tests.support.replay import Clock, Replay
from tilegen.cli import tuning as command
from tilegen.cli.main import app
from tilegen.errors import TilegenError, Unsupported
from tilegen.kernels.config import TileConfig
from tilegen.store.trials import Trial
from tilegen.tuning import campaign
from tilegen.tuning.bench import Bench
from tilegen.tuning.campaign import Budget, tune_all
from tilegen.tuning.jobs import Job, Shard
from tilegen.tuning.machine import ReplayMachine
from tilegen.tuning.measure import DeviceLost, Measurement

SPACE = [config for config, one in Replay().timings.items() if one.median_us]
FEW = SPACE[:4]
JOB = Job(gpu=H200, kernel="fwd", problem=PROBLEM)
MAIN = "from tilegen.cli.main import main\nmain()"


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Trials of one test are not known in another."""
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "own"


def recorded(folder: Path, configs: list[TileConfig], seconds: float = 0.01) -> Path:
    recorder = Recorder(folder / "one.jsonl", new_session(H200, "fwd", PROBLEM, len(configs)))
    for config in configs:
        recorder.append(Trial(config=config, measurement=Replay().timings[config], seconds=seconds))
    return folder


def tuned(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["tune", *words])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def test_a_replay_answers_as_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = recorded(tmp_path / "recordings", FEW)
    spilled = TileConfig(block_m=256, block_n=256, num_warps=4, num_stages=1)
    recorder = Recorder(folder / "one.jsonl", new_session(H200, "fwd", PROBLEM, len(FEW)))
    recorder.append(
        Trial(config=spilled, measurement=Replay().timings[FEW[0]], spill_bytes=136, seconds=0.01)
    )
    with (folder / "one.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"config": "m1')
    machine = ReplayMachine(folder)
    other = replace(PROBLEM, batch=1)
    with pytest.raises(Unsupported, match=f"expected recordings of '{other}' on h200, found those"):
        machine.jobs([other], "h200")
    (job,) = machine.jobs([PROBLEM, other], machine.gpus[0])
    assert (job.gpu, job.kernel, job.problem) == (H200, "fwd", PROBLEM)
    *space, last = machine.space(job)
    assert (space, last) == (FEW, spilled)
    measure = machine.bench(job).measure
    clock = Clock()
    clock.replaces_time_of("tilegen.tuning.machine", monkeypatch)
    assert [measure(config) for config in FEW] == [Replay().timings[config] for config in FEW]
    assert clock.now == pytest.approx(0.01 * len(FEW))
    assert measure(spilled).status == "declined"


def test_without_recordings_there_is_nothing_to_replay(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="found no"):
        ReplayMachine(tmp_path)
    (tmp_path / "x.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="expected a recording"):
        ReplayMachine(tmp_path)


def test_the_same_command_goes_on_and_says_before_what_is_left(tmp_path: Path, own: Path) -> None:
    words = ["--catalog", PROBLEM.key, "--replay", str(recorded(tmp_path / "recordings", FEW))]
    assert tuned(*words, "--trials", "2") == "2 configs measured, 1 winner\n"
    planned = json.loads(tuned(*words, "--dry-run", "--json"))
    (kernel,) = planned["kernels"]
    assert (planned["devices"], kernel["configs"], kernel["measured"]) == (1, 4, 2)
    assert tuned(*words, "--dry-run").endswith("1 device, 1 kernel, about 0.0 minutes\n")
    assert tuned(*words) == "2 configs measured, 1 winner\n"
    before = {file: file.read_bytes() for file in own.rglob("*.json*")}
    assert tuned(*words) == "0 configs measured, 1 winner\n"
    assert {file: file.read_bytes() for file in own.rglob("*.json*")} == before


@pytest.mark.slow
def test_after_a_kill_no_trial_is_taken_again(tmp_path: Path, own: Path) -> None:
    folder = recorded(tmp_path / "recordings", SPACE[:12], 0.2)
    words = ["tilegen", "tune", "--catalog", PROBLEM.key, "--replay", str(folder)]
    code = f"import sys\nsys.argv = {words!r}\n{MAIN}"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert process.stderr
    while " 3/12 " not in (line := process.stderr.readline()):
        assert line
    process.kill()
    process.communicate()
    kept = len(lines_of(own))
    assert 3 <= kept < 12
    assert tuned(*words[2:]) == f"{12 - kept} configs measured, 1 winner\n"
    assert len(lines_of(own)) == 12


@pytest.mark.slow
def test_each_device_has_a_process_and_each_config_is_measured_once(
    tmp_path: Path, own: Path
) -> None:
    folder = recorded(tmp_path / "recordings", FEW)
    words = ["tune", "--catalog", PROBLEM.key, "--replay", str(folder), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "tilegen", *words],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "0,1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    outcome = json.loads(done.stdout)
    assert (outcome["measured"], len(outcome["records"]), outcome["left"]) == (4, 1, [])
    assert len(lines_of(own)) == 4


def test_a_process_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os; os.kill(os.getpid(), 9 * (os.environ['CUDA_VISIBLE_DEVICES'] == '1')); "
    said = 'print(\'{"measured": 1, "records": [], "left": [], "skipped": {}}\')'
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", code + said])
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(TilegenError, match=r"1 of 2 processes failed, .* 1 with code -9"):
        command._one_each(["0", "1"])
    signal.signal(signal.SIGTERM, before)


def test_devices_are_those_that_pytorch_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert command._visible(False) == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-1a,7")
    assert command._visible(False) == ["4", "GPU-1a", "7"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert command._visible(False) == ["0"], "the processor"
    assert command._visible(True) == ["4", "GPU-1a", "7"]


class Machine:
    """Measures by a table; `fails` raises an error in the third measurement."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.replay = Replay()
        self._fails = fails

    def space(self, job: Job) -> list[TileConfig]:
        return FEW

    def bench(self, job: Job) -> Bench:
        return Bench(measure=self._measure)

    def _measure(self, config: TileConfig) -> Measurement:
        if self._fails and len(self.replay.measured) == 2:
            raise self._fails
        return self.replay(config)


def test_a_job_that_cannot_be_done_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    other = replace(JOB, problem=replace(PROBLEM, batch=8))
    machine = Machine()
    fine = machine.bench

    def bench(job: Job) -> Bench:
        if job is JOB:
            raise Unsupported("too large")
        return fine(job)

    machine.bench = bench  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "tilegen"):
        outcome = tune_all([JOB, other], machine, Budget())
    assert outcome.skipped == {str(JOB): "too large"}
    assert [record.problem for record in outcome.records] == [other.problem]
    assert f"{JOB} skipped: too large" in caplog.messages


def test_a_lost_device_ends_the_process_with_all_trials_kept(own: Path) -> None:
    lost = DeviceLost(Measurement(status="launch_failed", message="illegal address"))
    with pytest.raises(DeviceLost):
        tune_all([JOB], Machine(lost), Budget())
    assert [line["device_lost"] for line in lines_of(own)] == [False, False, True]
    outcome = tune_all([JOB], Machine(), Budget())
    assert outcome.measured == 1


def test_a_process_whose_gpu_is_lost_starts_itself_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any) -> Any:
        raise DeviceLost(Measurement(status="launch_failed", message="illegal address"))

    class Restarted(Exception):
        """The command that would replace the process."""

    def execv(*given: Any) -> Any:
        raise Restarted(given)

    monkeypatch.setattr(campaign, "tune_all", lost)
    monkeypatch.setattr(command.os, "execv", execv)
    folder = recorded(tmp_path / "recordings", FEW)
    result = CliRunner().invoke(app, ["tune", "--catalog", PROBLEM.key, "--replay", str(folder)])
    assert isinstance(result.exception, Restarted), result.output
    assert result.exception.args[0] == (sys.executable, [sys.executable, *sys.orig_argv[1:]])


def test_a_full_disk_ends_a_run_at_once(tmp_path: Path, own: Path) -> None:
    """The limit of a file's size stands for a full disk, which no right is needed for."""
    folder = recorded(tmp_path / "recordings", FEW)
    words = ["tilegen", "tune", "--catalog", PROBLEM.key, "--replay", str(folder)]
    process = warm.start(
        "import resource, sys\nsys.dont_write_bytecode = True\n"
        "from tilegen.cli.main import main\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))\nsys.argv = {words!r}\nmain()"
    )
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "File too large; choose a folder you can write to" in err
    assert "skipped" not in err


def test_a_job_that_another_process_tunes_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is waited for, since that process may end."""
    other = replace(JOB, problem=replace(PROBLEM, batch=8))
    entered: list[tuple[Any, float]] = []
    real = campaign.alone

    def alone(gpu: Any, kernel: Any, problem: Any, seconds: float) -> Any:
        entered.append((problem.batch, seconds))
        if problem == PROBLEM and len(entered) < 3:
            raise campaign.Locked("another process")
        return real(gpu, kernel, problem, seconds=seconds)

    monkeypatch.setattr(campaign, "alone", alone)
    outcome = tune_all([JOB, other], Machine(), Budget())
    assert [batch for batch, _ in entered] == [4, 8, 4]
    assert outcome.measured == 8
    assert outcome.left == []


def test_time_that_is_up_leaves_jobs_for_the_same_command() -> None:
    outcome = tune_all([JOB], Machine(), Budget(until=-math.inf))
    assert outcome.left == [str(JOB)]
    assert str(outcome) == (
        "0 configs measured, 0 winners; 1 kernels are left: the same command goes on"
    )


def test_until_is_the_next_time_of_day(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    clock.replaces_time_of("tilegen.tuning.campaign", monkeypatch)

    def at(text: str) -> Any:
        return lambda: datetime.fromisoformat(f"2026-11-28T{text}")

    assert campaign.until("06:00", at("05:59:30")) == 30
    assert campaign.until("06:00", at("06:00:00")) == 24 * 3600
    assert campaign.until("00:10", at("23:50:00")) == 20 * 60
    for wrong in ("6", "24:00", "06:60", "06:00:00", "²²:00"):
        with pytest.raises(Unsupported, match="--until must be a time of day such as 06:00"):
            campaign.until(wrong)


def test_shards_divide_jobs_and_move_few() -> None:
    jobs = [
        Job(gpu=H200, kernel=kernel, problem=replace(PROBLEM, batch=2**i, seqlen_q=2**j))
        for kernel in ("fwd", "bwd_dq")
        for i in range(12)
        for j in range(10)
    ]
    homes = {
        count: {job: [i for i in range(count) if Shard(i, count).has(job)] for job in jobs}
        for count in (7, 8)
    }
    for count, home in homes.items():
        assert all(len(parts) == 1 for parts in home.values())
        sizes = Counter(parts[0] for parts in home.values())
        assert len(sizes) == count
        assert max(sizes.values()) < 2.5 * len(jobs) / count
    moved = [job for job in jobs if homes[7][job] != homes[8][job]]
    assert all(homes[8][job] == [7] for job in moved), "only what the new part takes over"
    for job in jobs:  # the kernels of a problem stay together
        assert homes[8][job] == homes[8][replace(job, kernel="fwd")]


def test_shards_are_read_from_arrays_and_indexed_jobs() -> None:
    slurm = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "1"}
    assert Shard.parse("2/8", {}) == Shard(2, 8)
    assert Shard.parse("auto", {**slurm, "SLURM_ARRAY_TASK_STEP": "2"}) == Shard(2, 3)
    pod = {"JOB_COMPLETION_INDEX": "0", "JOB_COMPLETIONS": "4"}
    assert Shard.parse("auto", pod) == Shard(0, 4)
    for text, variables in (
        *[(wrong, {}) for wrong in ("3/3", "-1/3", "1", "1/0", "²/3", "0/10001", "1/2/3")],
        ("auto", slurm),  # 1, 3, 5 without the step
        ("auto", {**slurm, "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_STEP": "2"}),
        ("auto", {"JOB_COMPLETION_INDEX": "0"}),
    ):
        with pytest.raises(Unsupported, match="--shard must be I/N"):
            Shard.parse(text, variables)
    with pytest.raises(Unsupported, match="found neither"):
        Shard.parse("auto", {})


def test_two_shards_make_the_whole(tmp_path: Path, own: Path) -> None:
    words = ["--catalog", PROBLEM.key, "--replay", str(recorded(tmp_path / "recordings", FEW))]
    said = [tuned(*words, "--shard", f"{index}/2") for index in range(2)]
    assert sorted(said) == ["0 configs measured, 0 winners\n", "4 configs measured, 1 winner\n"]


def test_ray_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = CliRunner().invoke(app, ["tune", "--catalog", PROBLEM.key, "--ray", "--json"])
    assert str(result.exception) == "--ray needs Ray: pip install 'tilegen[ray]'"
