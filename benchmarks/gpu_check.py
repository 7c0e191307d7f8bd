"""One command that gathers all evidence a GPU can give, on a machine with nothing prepared.

    python -m benchmarks.gpu_check --out DIR --minutes 9

Runs tests/gpu, tunes the head of the catalogue, benchmarks it and decoding, and times first
results; where Nsight Compute is installed, compares predicted with counted bytes and runs the
experiments on I/O; whole runs of models get the time that is left. Each part is a process with its
own slice of the time; what is on disk when one fails, or when the time is over, stays:

    summary.md        all of it in short, written again after every part
    environment.txt   GPU, driver, versions, commit
    tests.xml         of tests/gpu, as JUnit writes it
    records.tar.gz    the tuning records, packed again after every kernel
    benchmarks.csv    one row per workload, provider, direction
    decode_predicted.csv  what the model predicts of few queries on many keys
    first_result.csv  one row per provider: bundle, compiling, FlexAttention
    counters.csv      one row per workload and kernel
    io/               experiments on I/O: rows.csv and verdicts.csv
    whole/            training, block-sparse time, memory against length, generation
    trials/           every config the tuner tried, a line of JSON each
    log.txt           everything the parts printed

Ctrl-C and SIGTERM end the running part, too, and keep what it has.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from benchmarks.environment import ROOT, Environment, has_gpu, output, processor
from benchmarks.parts import Outcome, Part, run_parts
from benchmarks.run import named
from benchmarks.summary import summarise

STOPS_ITSELF = 0.92
"""Share of its time after which a part that watches the clock starts nothing new."""
PEERS = ("tilegen", "sdpa-flash", "sdpa-cudnn", "flex")
"""Providers that are timed: `python -m benchmarks.run` times all."""
MOST_PROCESSES = 14
"""Upper bound on the processes of pytest: each holds half a gigabyte of the GPU's memory."""
COMMANDS = {
    "tuning": (0.3, "tune {minutes} --pack={out}/records.tar.gz"),
    "benchmarks": (
        0.3,
        f"run --head {' '.join(f'--provider={name}' for name in PEERS)} {{minutes}} "
        "--csv={out}/benchmarks.csv",
    ),
    "decode": (
        0.15,
        "decode {minutes} --predicted={out}/decode_predicted.csv --csv={out}/benchmarks.csv",
    ),
    "first result": (0.1, "first_result --repeats=1 --csv={out}/first_result.csv"),
    "counters": (0.1, "counters {minutes} --csv={out}/counters.csv"),
    "io": (0.15, "io_counters {minutes} --out={out}/io"),
    # Whole runs get what the others leave.
    "train": (0.01, "whole train {minutes} --out={out}/whole/train.csv"),
    "generate": (0.01, "whole generate {minutes} --out={out}/whole/generate.csv"),
}
"""Parts after the tests, the most important first: their shares of the time and their commands."""
LAST_SECONDS = 16.0
"""Time that is kept for the summary and for a part that is slow to end [seconds]."""


def parts(out: Path) -> list[Part]:
    """Return the parts of the check, the most important first."""

    def command(words: list[str], seconds: float) -> list[str]:
        minutes = f"--minutes={seconds * STOPS_ITSELF / 60:.3f}"
        said = [word.format(minutes=minutes, out=out) for word in words[1:]]
        return [sys.executable, "-m", f"benchmarks.{words[0]}", *said]

    return [
        Part(name="tests", command=lambda _: tests(out), share=0.25),
        *(
            Part(name=name, command=partial(command, text.split()), share=share)
            for name, (share, text) in COMMANDS.items()
        ),
    ]


def tests(out: Path) -> list[str]:
    """Return the command that runs tests/gpu."""
    if find_spec("pytest") is None:
        return [
            sys.executable,
            "-c",
            "raise SystemExit('pytest is not installed: no test was run')",
        ]
    # Most of the time goes into compiling, which each process of pytest does by itself. Neighbours
    # stay together, so that one process makes the bundle of a file.
    processes = min(max(1, len(os.sched_getaffinity(0)) - 2), MOST_PROCESSES)
    spread = ["-n", f"{processes}", "--dist", "worksteal"] if find_spec("xdist") else []
    return [
        *(sys.executable, "-m", "pytest", "tests/gpu", "-q", f"--junit-xml={out / 'tests.xml'}"),
        *("-p", "no:cacheprovider", *spread),
    ]


def gather(chosen: Sequence[Part], out: Path, *, seconds: float) -> list[Outcome]:
    """Run the parts and keep `out`/summary.md up to date; return how each part ended."""

    def write_summary(outcomes: Sequence[Outcome]) -> None:
        last = outcomes[-1]
        print(f"{last.name:12} {last.status:12} {last.seconds:5.0f} s  {last.message}", flush=True)
        (out / "summary.md").write_text(summarise(out, outcomes), encoding="utf-8")

    return run_parts(
        chosen,
        seconds=seconds - LAST_SECONDS,
        log=out / "log.txt",
        folder=ROOT,
        after_each=write_summary,
    )


def described() -> str:
    """Return the GPU, driver, versions and commit, and what nvidia-smi and ncu print."""
    lines = [f"{name:8} {value}" for name, value in asdict(Environment()).items()]
    lines += [f"cores    {processor()}", "", output("nvidia-smi"), "", output("ncu", "--version")]
    return "\n".join(lines) + "\n"


def copy_trials(cache: Path, out: Path) -> None:
    """Copy the tuner's trial logs from the cache directory to `out`/trials."""
    for file in (cache / "trials").rglob("*.jsonl"):
        copy = out / file.relative_to(cache)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def terminate(*_: object) -> NoReturn:
    """Turn SIGTERM into an exception like Ctrl-C's, so that every `finally` runs."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not break off the first
    sys.exit(128 + signal.SIGTERM)


def main(
    out: Annotated[Path, typer.Option(help="Folder for what is found out; made if needed.")],
    minutes: Annotated[float, typer.Option(help="Time limit for all of it.")] = 9.0,
    part: Annotated[
        list[str] | None, typer.Option(help="A part by name; may be repeated. Default: all.")
    ] = None,
) -> None:
    """Test, tune, benchmark and profile on this machine's GPU, within a time limit.

    Example: python -m benchmarks.gpu_check --out gpu-check --minutes 9
    """
    if not has_gpu():
        print("no GPU that PyTorch can use on this machine: nothing to check")
        raise typer.Exit(1)
    signal.signal(signal.SIGTERM, terminate)
    out = out.absolute()
    chosen = named("part", parts(out), part)
    out.mkdir(parents=True, exist_ok=True)
    (out / "environment.txt").write_text(described(), encoding="utf-8")
    # One cache for all parts: benchmarks use what was tuned, and the user's own stays as it is.
    with tempfile.TemporaryDirectory(prefix="tilegen-gpu-check-") as cache:
        os.environ["TILEGEN_CACHE_DIR"] = cache
        try:
            outcomes = gather(chosen, out, seconds=60 * minutes)
        finally:
            copy_trials(Path(cache), out)
    print()
    print((out / "summary.md").read_text(encoding="utf-8"))
    if any(outcome.status != "passed" for outcome in outcomes):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
