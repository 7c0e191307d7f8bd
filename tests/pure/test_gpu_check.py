"""The GPU check without a GPU: its parts, their time, its summary; tuning and counters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import counters, gpu_check, rows, tune
from benchmarks.parts import ENDING, Outcome, Part, run_part, run_parts
from benchmarks.summary import summarise
from tests.cases import PROBLEM, a_row, a_workload
from tests.records import record
from tilegen.config import TileConfig
from tilegen.device import GpuSpec, gpu
from tilegen.errors import NoRecord
from tilegen.model.estimate import CostEstimate
from tilegen.problem import AttentionProblem
from tilegen.propose import estimate
from tilegen.store import record_path, save

WINDOW = AttentionProblem.parse("b1 hq2 hkv2 q256 kv256 d32 fp16 window(15,0)")
H200 = gpu("h200")


# --------------------------------------------------------------------------------------------------
# GPU check


def python(name: str, code: str, *, share: float = 1.0) -> Part:
    return Part(name=name, command=lambda _: [sys.executable, "-c", code], share=share)


HANGS = "import time; print('started', flush=True); time.sleep(600)"
# Ignores the polite signals, and has a child that would outlive it and write to the file.
HANGS_ON = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import sys, time; time.sleep(3); open(sys.argv[1], 'w')"
subprocess.Popen([sys.executable, "-c", code, {path!r}])
print('started', flush=True)
time.sleep(600)
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.txt"


def test_parts_that_fail_hang_or_are_missing_cost_only_themselves(log: Path) -> None:
    parts = [
        python("writes", "open('left.txt', 'w').write('kept'); print('done')"),
        python("fails", "raise SystemExit('went wrong')"),
        Part(name="missing", command=lambda _: ["/no/such/program"], share=1.0),
        python("hangs", HANGS, share=0.2),
        python("last", "print('reached')"),
    ]
    seen: list[int] = []
    started = time.monotonic()
    outcomes = run_parts(
        parts, seconds=24, log=log, folder=log.parent, after_each=lambda o: seen.append(len(o))
    )
    assert time.monotonic() - started < 24
    assert [(o.name, o.status, o.message) for o in outcomes[:2]] == [
        ("writes", "passed", "done"),
        ("fails", "failed", "went wrong"),
    ]
    assert [(o.name, o.status) for o in outcomes[2:]] == [
        ("missing", "failed"),
        ("hangs", "time over"),
        ("last", "passed"),
    ]
    assert outcomes[3].message == "started"
    assert (log.parent / "left.txt").read_text() == "kept"
    assert seen == [1, 2, 3, 4, 5]
    assert "reached" in log.read_text()


def test_a_part_that_ignores_the_signal_is_killed_with_its_children(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurried = tuple((request, 0.3) for request, _ in ENDING)
    monkeypatch.setattr("benchmarks.parts.ENDING", hurried)
    late = log.parent / "late.txt"
    part = python("hangs on", HANGS_ON.format(path=str(late)))
    started = time.monotonic()
    outcome = run_part(part, allowed=1.5, log=log, folder=log.parent)
    assert (outcome.status, outcome.message) == ("time over", "started")
    assert time.monotonic() - started < 3
    time.sleep(max(0.0, started + 5 - time.monotonic()))
    assert not late.exists()


# Says which polite signals it got; the first may come while it still does something else.
SAVES = """
import signal, sys, time
def save(*_):
    open('saved.txt', 'a').write('SIGTERM')
    sys.exit()
signal.signal(signal.SIGTERM, save)
print('started', flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    open('saved.txt', 'a').write('SIGINT ')
    if len(sys.argv) > 1:
        time.sleep(600)
"""


@pytest.mark.parametrize("extra, saved", [([], "SIGINT "), (["slow"], "SIGINT SIGTERM")])
def test_a_part_over_its_time_is_interrupted_before_it_is_terminated(
    extra: list[str], saved: str, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (interrupt, _), terminate = ENDING
    monkeypatch.setattr("benchmarks.parts.ENDING", ((interrupt, 1.0), terminate))
    part = Part(name="saves", command=lambda _: [sys.executable, "-c", SAVES, *extra], share=1.0)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as behind a shell's `&`
    try:
        outcome = run_part(part, allowed=1.0, log=log, folder=log.parent)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (outcome.status, outcome.message) == ("time over", "started")
    assert (log.parent / "saved.txt").read_text() == saved


def test_tests_over_their_time_leave_their_report(log: Path) -> None:
    (log.parent / "test_slow.py").write_text(
        "import time\ndef test_quick(): pass\ndef test_slow(): time.sleep(600)\n"
    )
    report = log.parent / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", "test_slow.py"]
    part = Part(name="tests", command=lambda _: command, share=1.0)
    outcome = run_part(part, allowed=4.0, log=log, folder=log.parent)
    assert outcome.status == "time over"
    text = report.read_text()
    assert 'name="test_quick"' in text
    assert "1 tests, 0 failures" in summarise(log.parent, [outcome])


def test_unused_time_goes_to_the_parts_after(log: Path) -> None:
    parts = [python("quick", "pass"), python("other", "pass")]
    first, second = run_parts(
        parts, seconds=60, log=log, folder=log.parent, after_each=lambda _: None
    )
    assert first.allowed == pytest.approx(30, abs=0.5)
    assert second.allowed > 50


def test_no_part_starts_when_time_is_over(log: Path) -> None:
    outcome = run_part(python("late", "print('ran')"), allowed=-1.0, log=log, folder=log.parent)
    assert outcome.status == "no time left"
    assert not log.exists()


def test_gather_writes_the_summary_after_every_part(tmp_path: Path) -> None:
    code = "import pathlib; print('summary' if pathlib.Path({path!r}).exists() else 'none yet')"
    path = str(tmp_path / "summary.md")
    chosen = [python(name, code.format(path=path)) for name in ("first", "second")]
    outcomes = gpu_check.gather(chosen, tmp_path, seconds=60)
    assert [outcome.message for outcome in outcomes] == ["none yet", "summary"]
    text = (tmp_path / "summary.md").read_text()
    assert "| second | passed |" in text


def test_gpu_check_parts_are_commands_that_exist(tmp_path: Path) -> None:
    for part in gpu_check.parts(tmp_path):
        command = part.command(60.0)
        module = command[command.index("-m") + 1]
        result = subprocess.run(
            [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        options = [text.partition("=")[0] for text in command if text.startswith("--")]
        assert all(option in result.stdout for option in options), (module, options)


def test_without_pytest_that_part_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "find_spec", lambda name: None)
    (tests,) = (part for part in gpu_check.parts(tmp_path) if part.name == "tests")
    after = python("after", "print('reached')")
    first, second = gpu_check.gather([tests, after], tmp_path, seconds=60)
    assert (first.status, first.message) == ("failed", "pytest is not installed: no test was run")
    assert (second.status, second.message) == ("passed", "reached")
    assert "Traceback" not in (tmp_path / "log.txt").read_text()


# A check of one part, which stands for the tuner: it has tried something, and hangs.
CHECK = """
import sys, typer
from benchmarks import gpu_check
from benchmarks.parts import Part
code = '''
import os, pathlib, time
trials = pathlib.Path(os.environ["TILEGEN_CACHE_DIR"]) / "trials" / "h200" / "fwd"
trials.mkdir(parents=True)
print(os.getpid(), flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    (trials / "a.jsonl").write_text("tried")
'''
gpu_check.has_gpu = lambda: True
command = [sys.executable, "-c", code]
gpu_check.parts = lambda out: [Part(name="tuning", command=lambda _: command, share=1.0)]
typer.run(gpu_check.main)
"""


@pytest.mark.parametrize(
    "sent, minutes, code",
    [(signal.SIGTERM, 5, 143), (signal.SIGINT, 5, 130), (None, 18 / 60, 1)],
    ids=["SIGTERM", "SIGINT", "time over"],
)
def test_gpu_check_that_is_stopped_ends_its_part_and_keeps_the_trials(
    sent: signal.Signals | None, minutes: float, code: int, tmp_path: Path
) -> None:
    out, temporary = tmp_path / "out", tmp_path / "temporary"
    temporary.mkdir()
    check = subprocess.Popen(
        [sys.executable, "-c", CHECK, "--out", str(out), f"--minutes={minutes}"],
        env={**os.environ, "TMPDIR": str(temporary)},
        cwd=gpu_check.ROOT,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    log = out / "log.txt"
    pid = 0
    while not pid:
        assert check.poll() is None
        time.sleep(0.1)
        last = log.read_text().splitlines()[-1:] if log.exists() else []
        pid = int(last[0]) if last and last[0].isdigit() else 0
    if sent:
        check.send_signal(sent)
    assert check.wait(timeout=30) == code
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert (out / "trials" / "h200" / "fwd" / "a.jsonl").read_text() == "tried"
    assert list(temporary.iterdir()) == []


def test_gpu_check_without_a_gpu_says_so_and_exits_1(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "--out", str(tmp_path / "out")],
        env={"PATH": "", "CUDA_VISIBLE_DEVICES": "-1"},
        cwd=gpu_check.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    (line,) = result.stdout.splitlines()
    assert "no GPU" in line
    assert not (tmp_path / "out").exists()


def test_summary_of_results_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "environment.txt").write_text("gpu      NVIDIA H200\n")
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite tests="3" failures="1" errors="0" skipped="0" time="9.5">'
        '<testcase classname="tests.gpu" name="a"/>'
        '<testcase classname="tests.gpu" name="b"><failure message="off by 1&#10;more"/></testcase>'
        "</testsuite></testsuites>"
    )
    benchmarks = tmp_path / "benchmarks.csv"
    rows.append(benchmarks, a_row(tflops=123.45))
    rows.append(benchmarks, a_row(provider="q", status="wrong", tflops=99.0))
    rows.append(benchmarks, a_row(provider="r", status="out_of_memory", median_us=None))
    outcome = Outcome(name="tests", status="failed", seconds=9.6, allowed=60.0, message="1 | 2")
    text = summarise(tmp_path, [outcome])
    assert "| tests | failed | 10 | 60 | 1 \\| 2 |" in text
    assert "NVIDIA H200" in text
    assert "3 tests, 1 failures, 0 errors, 0 skipped; 10 s\n- tests.gpu::b: off by 1\n" in text
    assert "| w | forward | 123.5 | 99.0 (wrong) | out_of_memory |" in text


def test_summary_of_broken_files_says_no_result(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text("<testsuites><tests")
    (tmp_path / "records.tar.gz").write_bytes(b"\x1f\x8b half")
    (tmp_path / "benchmarks.csv").write_text("workload,pro")
    assert summarise(tmp_path, []).count("No result.") == 7


# --------------------------------------------------------------------------------------------------
# Tuning and counters


def test_forward_is_tuned_first_and_what_serves_has_no_backward() -> None:
    trained, served = (
        replace(a_workload(n), problem=p) for n, p in (("t", PROBLEM), ("s", WINDOW))
    )
    trained = replace(trained, directions=("forward", "backward"))
    assert tune.jobs([trained, served], H200) == [
        *((PROBLEM, "fwd"), (WINDOW, "fwd")),
        *((PROBLEM, "bwd_preprocess"), (PROBLEM, "bwd_dkdv"), (PROBLEM, "bwd_dq")),
    ]


def test_tuned_kernels_are_packed_and_not_tuned_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "cache"))
    given: list[tuple[str, float]] = []

    def fake_tune(problem: AttentionProblem, spec: GpuSpec, **options: Any) -> None:
        given.append((options["kernel"], options["seconds"]))
        if options["kernel"] == "bwd_dq":
            raise NoRecord("nothing runs")
        save(record(kernel=options["kernel"], problem=problem.bucket))

    monkeypatch.setattr(tune, "tune", fake_tune)
    todo = tune.untuned([(PROBLEM, "fwd"), (PROBLEM, "bwd_dq"), (PROBLEM, "bwd_dkdv")], H200)
    archive = tmp_path / "records.tar.gz"
    failures = tune.tune_all(todo, H200, deadline=time.monotonic() + 30, pack=archive)
    assert failures == 1
    assert given == [
        ("fwd", pytest.approx(10, abs=0.5)),
        ("bwd_dq", pytest.approx(15, abs=0.5)),
        ("bwd_dkdv", pytest.approx(30, abs=0.5)),
    ]
    assert tune.untuned(todo, H200) == [(PROBLEM, "bwd_dq")]
    with tarfile.open(archive) as packed:
        assert sorted(packed.getnames()) == sorted(
            str(record_path("h200", kernel, PROBLEM)) for kernel in ("fwd", "bwd_dkdv")
        )
    text = summarise(tmp_path, [])
    assert f"| {PROBLEM.bucket.key} | fwd | block_m=" in text


def test_tuning_stops_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "tune", lambda *_, **__: pytest.fail("tuned"))
    todo: list[tune.Job] = [(PROBLEM, "fwd")]
    assert tune.tune_all(todo, H200, deadline=time.monotonic() - 1, pack=None) == 0
    assert "1 kernels left" in capsys.readouterr().out


NCU = """\
==PROF== Connected to process 4242 (/usr/bin/python3.12)
==PROF== Profiling "attention_fwd_d16_causal_m64n32": 0%....100% - 4 passes
==PROF== Disconnected from process 4242
"ID","Process ID","Kernel Name","Context","Metric Name","Metric Unit","Metric Value"
"0","4242","attention_fwd_d16_causal_m64n32","1","dram__bytes_read.sum","byte","1,000"
"0","4242","attention_fwd_d16_causal_m64n32","1","dram__bytes_write.sum","byte","200"
"0","4242","attention_fwd_d16_causal_m64n32","1","l1tex__m_l1tex2xbar_write_bytes.sum","byte","50"
"0","4242","attention_fwd_d16_causal_m64n32","1","l1tex__m_xbar2l1tex_read_bytes.sum","byte","4,500"
"0","4242","attention_fwd_d16_causal_m64n32","1","launch__registers_per_thread","register","100"
"0","4242","attention_fwd_d16_causal_m64n32","1","launch__shared_mem_per_block_dynamic","byte","2,048"
"1","4242","attention_bwd_dq_d16_causal_m64n32","1","launch__registers_per_thread","register","7"
"""


def test_counters_are_parsed_and_compared() -> None:
    forward, backward = counters.parse(NCU)
    assert forward.function == "attention_fwd_d16_causal_m64n32"
    assert backward.values == {counters.REGISTERS: 7.0}
    predicted = CostEstimate(
        kernel="fwd",
        config=TileConfig(block_m=64, block_n=32),
        read_bytes=3000,
        write_bytes=50,
        dram_bytes=1000,
        lower_bound_bytes=500,
        smem_bytes=0,
        registers=80,
        flops=1,
        seconds=1e-6,
        limit="dram",
        terms=(("dram", 1e-6),),
        waves=1.0,
    )
    row = counters.compare(a_workload("w"), predicted, forward)
    assert (row.predicted_read_bytes, row.counted_read_bytes, row.read_ratio) == (3000, 4500, 1.5)
    assert (row.write_ratio, row.dram_ratio, row.registers_ratio) == (1.0, 1.2, 1.25)
    assert (row.counted_smem_bytes, row.smem_ratio) == (2048, None)


def fake_ncu(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "ncu"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_profiled_kernels_become_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TileConfig(block_m=64, block_n=32)
    fake_ncu(tmp_path, NCU, monkeypatch)
    monkeypatch.setattr(counters, "choose", lambda *_: (config, "test"))
    (row,) = counters.measure(a_workload("w"), H200, timeout=30)
    assert (row.kernel, row.config, row.counted_registers) == ("fwd", config.key, 100)
    assert row.predicted_read_bytes == estimate(PROBLEM, H200, config).read_bytes


@pytest.mark.parametrize(
    "text, message",
    [
        ("==ERROR== ERR_NVGPUCTRPERM", "ERR_NVGPUCTRPERM"),
        (NCU.replace("attention_fwd", "other"), "saw no launch of attention_fwd"),
        (NCU.replace('"4,500"', '"n/a"'), "no value of l1tex__m_xbar2l1tex_read_bytes"),
    ],
)
def test_a_profiler_that_cannot_count_is_an_error(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ncu(tmp_path, text, monkeypatch)
    monkeypatch.setattr(counters, "choose", lambda *_: (TileConfig(block_m=64, block_n=32), "test"))
    with pytest.raises(RuntimeError, match=message):
        list(counters.measure(a_workload("w"), H200, timeout=30))


def test_counted_rows_are_summarised(tmp_path: Path) -> None:
    (forward, _) = counters.parse(NCU)
    predicted = estimate(PROBLEM, H200, TileConfig(block_m=64, block_n=32))
    rows.append(tmp_path / "counters.csv", counters.compare(a_workload("w"), predicted, forward))
    text = summarise(tmp_path, [])
    assert "| workload | kernel | config | read | write | dram | registers | smem |" in text
    assert "| w | fwd | m64n32w4s2 |" in text
