"""Try some problems in this process, on kernels compiled for the CPU; `__main__` starts it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.differential.draw import draw
from tests.differential.problems import Problem, parse
from tests.differential.report import Line, append, command, read
from tests.differential.shrink import shrink
from tests.differential.trial import Outcome, attempt
from tilegen.compiling.workers import Pool


def examine(problem: Problem, pool: Pool | None = None) -> tuple[Outcome, Problem, Outcome]:
    """Try a problem; if it fails, return also a simpler problem with the same failure."""
    outcome = attempt(problem, pool)
    if not outcome.failed or outcome.kind.startswith(
        "crashed timeout"
    ):  # each try would take as long
        return outcome, problem, outcome
    small = shrink(problem, lambda one: attempt(one, pool).kind == outcome.kind)
    return outcome, small, attempt(small, pool)


def run(seed: int, first: int, end: int, every: int, seconds: float, path: Path) -> None:
    """Run problems of a range that the file lacks; 0 seconds: all of them."""
    known = {line.number for line in read([path]) if line.seed == seed}
    deadline = time.monotonic() + seconds if seconds else None
    with Pool(1) as pool:
        for number in range(first, end):
            if number in known:
                continue
            if deadline and time.monotonic() > deadline:
                return
            problem = draw(seed, number)
            compiles = bool(every) and number % every == 0
            outcome, small, why = examine(problem, pool if compiles else None)
            shrunk = (small, why) if outcome.failed else None
            line = Line.of(seed, number, problem, outcome, compiles, shrunk)
            append(path, line)
            print(line, flush=True)


def main() -> int:
    """Run a chunk, or one problem, by the arguments."""
    kind, text, *rest = sys.argv[1:]
    if kind == "--problem":
        with Pool(1) as pool:
            outcome, small, why = examine(parse(text), pool)
        print(outcome.what, outcome.detail)
        if str(small) != text and outcome.failed:
            print(f"simpler: {why.detail}\n  {command(str(small))}")
        return int(outcome.what != "right")
    seed, first, end, every, seconds = text.split()
    run(int(seed), int(first), int(end), int(every), float(seconds), Path(rest[0]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
