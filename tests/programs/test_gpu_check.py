"""The GPU check without a GPU: its parts are run, and it writes its summary."""

from __future__ import annotations

import itertools
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_check, rows
from benchmarks.parts import Outcome
from benchmarks.summary import summarise
from tests.benchmarks.cases import a_part, a_row


def test_gather_writes_the_summary_after_every_part(tmp_path: Path) -> None:
    code = "import pathlib; print('summary' if pathlib.Path({path!r}).exists() else 'none yet')"
    path = str(tmp_path / "summary.md")
    chosen = [a_part(name, code.format(path=path)) for name in ("first", "second")]
    outcomes = gpu_check.gather(chosen, tmp_path, seconds=60)
    assert [outcome.message for outcome in outcomes] == ["none yet", "summary"]
    text = (tmp_path / "summary.md").read_text()
    assert "| second | passed |" in text


@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")  # of those imported
def test_gpu_check_parts_are_commands_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked for their help in this process: one of their own would import all of PyTorch again."""
    for part in gpu_check.parts(tmp_path):
        command = part.command(60.0)
        module, *arguments = command[command.index("-m") + 1 :]
        named = list(itertools.takewhile(lambda text: not text.startswith("-"), arguments))
        if module == "pytest":  # which cannot run inside itself
            result = subprocess.run(
                [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True
            )
            said = result.stdout
        else:
            monkeypatch.setattr(sys, "argv", [module, *named, "--help"])
            with pytest.raises(SystemExit) as ended:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            assert not ended.value.code, module
            said = capsys.readouterr().out
        options = [text.partition("=")[0] for text in command if text.startswith("--")]
        assert all(option in said for option in options), (module, options)


def test_whole_runs_come_last_and_take_what_others_leave(tmp_path: Path) -> None:
    parts = gpu_check.parts(tmp_path)
    others, last = parts[:-2], parts[-2:]
    assert [part.name for part in last] == ["train", "generate"]
    assert sum(part.share for part in last) < 0.05 * sum(part.share for part in others)


def test_without_pytest_that_part_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "find_spec", lambda name: None)
    (tests,) = (part for part in gpu_check.parts(tmp_path) if part.name == "tests")
    after = a_part("after", "print('reached')")
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    (tmp_path / "first_result.csv").write_text(
        "problem,direction,provider,seconds,ratio,detail\np,forward,bundle,0.12,1.0,\n"
    )
    outcome = Outcome(name="tests", status="failed", seconds=9.6, allowed=60.0, message="1 | 2")
    text = summarise(tmp_path, [outcome])
    assert "| tests | failed | 10 | 60 | 1 \\| 2 |" in text
    assert "NVIDIA H200" in text
    assert "3 tests, 1 failures, 0 errors, 0 skipped; 10 s\n- tests.gpu::b: off by 1\n" in text
    assert "| p | forward | bundle | 0.12 | 1.0 |  |" in text
    assert "| w | forward | 123.5 | 99.0 (wrong) | out_of_memory |" in text


def test_summary_of_broken_files_says_no_result(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text("<testsuites><tests")
    (tmp_path / "records.tar.gz").write_bytes(b"\x1f\x8b half")
    (tmp_path / "benchmarks.csv").write_text("workload,pro")
    assert summarise(tmp_path, []).count("No result.") == 9
