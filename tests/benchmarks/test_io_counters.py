"""The experiments on a GPU without a GPU: cases, commands, recorded counters, verdicts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from benchmarks import io_counters
from benchmarks.counters import DRAM_READ, DRAM_WRITE, READ, WRITE, Counted, ncu, parse
from benchmarks.rows import append, read
from benchmarks.study import experiments, verdicts
from benchmarks.study.experiments import EXPERIMENTS, Case
from benchmarks.summary import summarise
from tests.support.problems import tiled
from tests.support.replay import Clock
from tilegen.gpus.spec import gpu
from tilegen.kernels.panels import rows_for
from tilegen.kernels.registry import KERNELS
from tilegen.model.dram import levels
from tilegen.model.traffic import traffic_of
from tilegen.problem import AttentionProblem
from tilegen.task import Tiled

H200 = gpu("h200")
PROBLEM = AttentionProblem.parse("b1 hq2 hkv2 q8192 kv8192 d128 bf16 full")
ONE = Case(
    experiment="E1",
    group="one",
    problem=PROBLEM.key,
    provider="tilegen",
    configs={"fwd": "m128n64w8s3"},
)


def recorded(case: Case, *, wire: float = 1.0, dram: float = 1.0, extra: str = "") -> str:
    """The output of ncu for a case whose kernels move `wire` times the predicted bytes."""
    lines = ["==PROF== Connected to process 4242 (/usr/bin/python3.12)", *extra.splitlines()]
    lines.append('"ID","Process ID","Kernel Name","Context","Metric Name","Metric Unit",')
    lines[-1] += '"Metric Value"'
    moved = experiments.predicted(case)
    for number, (kernel, function) in enumerate(verdicts.function_names(case).items()):
        expected = 0
        if not KERNELS[kernel].sliced:
            problem = AttentionProblem.parse(case.problem)
            expected = levels(Tiled.of(kernel, problem, H200, case.tiles[kernel])).dram_bytes
        for metric, value in (
            (READ, wire * moved[kernel].read_bytes),
            (WRITE, wire * moved[kernel].write_bytes),
            (DRAM_READ, dram * expected),
            (DRAM_WRITE, 0),
            (verdicts.TIME, 2_000_000),
            (verdicts.EXPS, 100 if kernel in ("bwd_dkdv", "bwd_dq", "bwd_scores") else 0),
        ):
            fields = (number, 4242, function, 1, metric, "byte", f"{int(value):,}")
            lines.append(",".join(f'"{field}"' for field in fields))
    return "\n".join(lines)


@pytest.mark.slow
def test_every_experiment_has_cases_and_each_survives_its_command_line() -> None:
    todo = experiments.cases(H200)
    assert {case.experiment for case in todo} == set(EXPERIMENTS)
    assert len({case.name for case in todo}) == len(todo)
    assert [case.experiment for case in todo[:5]] == list(EXPERIMENTS)  # one of each comes first
    for case in todo:
        *command, argument = io_counters.program(case)
        assert command == [sys.executable, "-m", "benchmarks.io_counters"]
        assert Case.from_json(argument.removeprefix("--launch=")) == case
    assert {case.experiment for case in experiments.cases(H200, ["E5", "E6"])} == {"E5", "E6"}


@pytest.mark.slow
def test_capped_shared_memory_caps_the_tiles() -> None:
    todo = [case for case in experiments.cases(H200, ["E5"]) if "d=256" in case.group]
    small, large = (
        sum(
            one.read_bytes
            for case in todo
            if case.group == f"d=256 {cap} KB" and case.family == "q_stationary"
            for one in experiments.predicted(case).values()
        )
        for cap in (48, 163)
    )
    assert small > large > 0


def test_closed_forms_of_a_known_case() -> None:
    """One head of 8192 x 128 with 128 rows per tile reads 64 * 8192 * 256 + 8192 * 128 words."""
    (moved,) = experiments.predicted(ONE).values()
    assert moved.read_bytes == 2 * 2 * (64 * 8192 * 256 + 8192 * 128)
    (dram,) = experiments.predicted_dram(ONE, H200).values()
    assert dram == levels(Tiled.of("fwd", PROBLEM, H200, ONE.tiles["fwd"])).dram_bytes


@pytest.mark.parametrize("wire, verdict", [(1.0, "pass"), (1.029, "pass"), (0.96, "fail")])
def test_e1_passes_within_3_percent(wire: float, verdict: str) -> None:
    rows = verdicts.rows_of(ONE, parse(recorded(ONE, wire=wire)), H200)
    assert [row.quantity for row in rows] == ["wire read bytes", "wire write bytes"]
    assert {row.verdict for row in rows} == {verdict}
    assert rows[0].predicted == traffic_of(tiled("fwd", PROBLEM, ONE.tiles["fwd"])).read_bytes


def test_short_sequences_are_measured_but_not_judged() -> None:
    short = replace(ONE, problem=PROBLEM.key.replace("8192", "1024"))
    rows = verdicts.rows_of(short, parse(recorded(short, wire=2.0)), H200)
    assert {(row.verdict, row.ratio) for row in rows} == {("measured", 2.0)}


@pytest.mark.parametrize("dram, verdict", [(1.09, "pass"), (1.2, "fail")])
def test_e6_passes_within_10_percent(dram: float, verdict: str) -> None:
    case = next(case for case in experiments.cases(H200, ["E6"]))
    (row,) = verdicts.rows_of(case, parse(recorded(case, dram=dram)), H200)
    assert (row.quantity, row.verdict) == ("DRAM bytes", verdict)
    assert "2000 us" in row.detail


def test_families_are_judged_together() -> None:
    mine = [case for case in experiments.cases(H200, ["E4"]) if case.group == "d=512"]
    assert {case.family for case in mine} == {"two_pass", "small_cache"}
    small = next(case for case in mine if case.family == "small_cache")
    problem = AttentionProblem.parse(small.problem)
    rows = rows_for(problem, H200, "backward")
    assert rows >= problem.seqlen_q  # one panel: with several, sums of dK and dV come back
    for kernel, config in small.tiles.items():
        assert experiments.predicted(small)[kernel] == traffic_of(
            tiled(kernel, problem, config), panel_rows=rows
        )
    as_predicted = [
        row for case in mine for row in verdicts.rows_of(case, parse(recorded(case)), H200)
    ]
    fewest, exps = verdicts.group_rows(as_predicted)
    assert (fewest.ratio, fewest.verdict) == (1.0, "pass")
    assert (exps.measured, exps.verdict) == (0.5, "pass")
    less, more = (1.0, 3.0) if fewest.family == "two_pass" else (3.0, 1.0)
    turned = [
        row
        for case in mine
        for row in verdicts.rows_of(
            case,
            parse(recorded(case, wire=less if case.family == "small_cache" else more)),
            H200,
        )
    ]
    assert verdicts.group_rows(turned)[0].verdict == "fail"


def test_libraries_are_measured_without_a_prediction() -> None:
    case = Case(experiment="E1", group="one", problem=PROBLEM.key, provider="sdpa-flash")
    values = {READ: 100.0, WRITE: 10.0, DRAM_READ: 5.0, DRAM_WRITE: 1.0}
    launches = [Counted(function=name, values=values) for name in ("flash_fwd", "flash_fwd", "b")]
    wire, dram = verdicts.rows_of(case, launches, H200)
    assert (wire.measured, dram.measured) == (330, 18)
    assert (wire.predicted, wire.verdict) == (None, "measured")


def test_experiments_pass_fail_or_were_not_run() -> None:
    good = verdicts.rows_of(ONE, parse(recorded(ONE)), H200)
    bad = verdicts.rows_of(ONE, parse(recorded(ONE, wire=1.5)), H200)
    judged = {row.experiment: row for row in verdicts.verdicts([*good, *bad], {"E1": 1, "E3": 2})}
    assert (judged["E1"].verdict, judged["E1"].passed, judged["E1"].failed) == ("fail", 2, 2)
    assert "1.5" in judged["E1"].worst
    assert (judged["E3"].verdict, judged["E3"].broken) == ("not run", 2)
    none = verdicts.rows_of(ONE, parse(recorded(ONE, wire=0)), H200)
    assert next(iter(verdicts.verdicts([*bad, *none], {}))).worst.endswith(": 0.0")
    assert next(iter(verdicts.verdicts(good, {}))).verdict == "pass"


def test_verdicts_are_part_of_the_gpu_check_s_summary(tmp_path: Path) -> None:
    good = verdicts.rows_of(ONE, parse(recorded(ONE)), H200)
    for row in verdicts.verdicts(good, {"E3": 1}):
        append(tmp_path / "io" / "verdicts.csv", row)
    text = summarise(tmp_path, [])
    assert f"| E1 | {EXPERIMENTS['E1']} | pass | 2 | 0 | 0 | 0 |" in text
    assert f"| E3 | {EXPERIMENTS['E3']} | not run | 0 | 0 | 0 | 1 |" in text


# --------------------------------------------------------------------------------------------------
# The command


def fake_ncu(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "ncu"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_case_is_profiled_from_its_start_to_its_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "arguments"
    fake_ncu(tmp_path, f"echo \"$@\" > {seen}\ncat <<'END'\n{recorded(ONE)}\nEND", monkeypatch)
    (launch,) = io_counters.profile(ONE, timeout=30)
    assert launch.function in verdicts.function_names(ONE).values()
    words = seen.read_text()
    assert "--profile-from-start off" in words
    assert ",".join(verdicts.WANTED) in words
    assert '"experiment": "E1"' in words


def test_counters_that_ncu_does_not_know_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = 'case "$*" in *pipe_xu*) echo "==ERROR== Failed to find metric"; exit 1;; esac'
    fake_ncu(tmp_path, f"{refuse}\ncat <<'END'\n{recorded(ONE)}\nEND", monkeypatch)
    assert len(io_counters.profile(ONE, timeout=30)) == 1


def test_failing_cases_and_the_time_limit_keep_earlier_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = replace(ONE, experiment="E6", group="broken")
    late, clock = replace(ONE, group="late"), Clock()

    def profile(case: Case, *, timeout: float) -> list[Counted]:
        if case is broken:
            raise RuntimeError("ncu counted nothing")
        clock.sleep(0.6)
        return parse(recorded(case))

    monkeypatch.setattr(io_counters, "profile", profile)
    clock.replaces_time_of("benchmarks.io_counters", monkeypatch)
    todo = [broken, ONE, late]
    assert not io_counters.run_all(todo, H200, tmp_path, deadline=0.5)
    assert "ncu counted nothing" in (said := capsys.readouterr().out)
    assert "time is over, 1 cases left" in said
    assert [row["verdict"] for row in read(tmp_path / "rows.csv")] == ["pass", "pass"]
    verdicts = {row["experiment"]: row["verdict"] for row in read(tmp_path / "verdicts.csv")}
    assert verdicts == dict.fromkeys(EXPERIMENTS, "not run") | {"E1": "pass"}


def test_a_case_that_the_end_of_time_cuts_off_is_not_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()

    def profile(case: Case, *, timeout: float) -> list[Counted]:
        clock.sleep(timeout)
        raise RuntimeError("ncu took longer")

    monkeypatch.setattr(io_counters, "profile", profile)
    clock.replaces_time_of("benchmarks.io_counters", monkeypatch)
    assert io_counters.run_all([ONE, ONE], H200, tmp_path, deadline=0.5)
    assert "time is over, 1 cases left" in capsys.readouterr().out
    assert {row["broken"] for row in read(tmp_path / "verdicts.csv")} == {"0"}


def test_without_a_gpu_it_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tilegen.gpus.spec.detect", lambda: None)
    with pytest.raises(typer.Exit) as ended:
        io_counters.main(out=tmp_path / "out")
    assert ended.value.exit_code == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "no GPU" in line
    assert not (tmp_path / "out").exists()


def test_ncu_without_the_right_to_count_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ncu(tmp_path, "echo '==ERROR== ERR_NVGPUCTRPERM'", monkeypatch)
    with pytest.raises(RuntimeError, match="ERR_NVGPUCTRPERM"):
        ncu(["true"], timeout=10)
