"""The table of benchmarks/README.md on kernels compiled for the CPU, from their result file.

python -m benchmarks.cpu_summary
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.environment import RESULTS
from benchmarks.rows import read

Row = Mapping[str, str]
Case = dict[str, Row]
"""The rows of one pass of a problem, by provider."""
HEAD = (
    "| threads | pass | dtype | cases | faster | speed: least, median, most "
    "| part of the measured peak | faster than the best of SDPA |\n" + "| --- " * 8 + "|"
)


def cases_of(rows: Sequence[Row]) -> dict[tuple[str, str, str], list[Case]]:
    """Return the cases that were timed beside SDPA, by threads, pass and dtype."""
    by_case: dict[tuple[str, ...], Case] = defaultdict(dict)
    for row in rows:
        by_case[row["threads"], row["direction"], row["problem"]][row["provider"]] = row
    groups: dict[tuple[str, str, str], list[Case]] = defaultdict(list)
    for (threads, direction, problem), case in by_case.items():
        if "sdpa" in case:
            dtype = next(word for word in problem.split() if word in ("fp32", "bf16"))
            groups[threads, direction, dtype].append(case)
    return groups


def speed(case: Case) -> float:
    """Return the time of SDPA's default back end over tilegen's."""
    return float(case["sdpa"]["tilegen_speedup"])


def best_speed(case: Case) -> float:
    """Return the time of SDPA's fastest back end over tilegen's."""
    of_sdpa = (row for provider, row in case.items() if provider.startswith("sdpa"))
    return min(float(row["tilegen_speedup"]) for row in of_sdpa)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table, its sums and the cases where tilegen is slower."""
    groups = cases_of(rows)
    order = ("forward", "backward"), ("fp32", "bf16")
    yield HEAD
    for threads, direction, dtype in sorted(
        groups, key=lambda one: (one[0], order[0].index(one[1]), order[1].index(one[2]))
    ):
        cases = groups[threads, direction, dtype]
        speeds = sorted(map(speed, cases))
        peaks = [float(case["tilegen"]["peak_fraction"]) for case in cases]
        of_speeds = f"{speeds[0]:.2f}, {statistics.median(speeds):.2f}, {speeds[-1]:.3g}"
        yield (
            f"| {threads} | {direction} | {dtype} | {len(cases)} | {sum(s > 1 for s in speeds)} "
            f"| {of_speeds} | {min(peaks):.2f} to {max(peaks):.2f} "
            f"| {sum(best_speed(case) > 1 for case in cases)} |"
        )
    yield ""
    for direction in order[0]:
        cases = [case for key, of_key in groups.items() if key[1] == direction for case in of_key]
        faster, best = (sum(of(case) > 1 for case in cases) for of in (speed, best_speed))
        yield f"{direction}: faster in {faster} of {len(cases)}, than the best of SDPA in {best}"
    every = [
        case["tilegen"] | {"speed": f"{speed(case):.2f}"} for of in groups.values() for case in of
    ]
    for row in sorted(every, key=lambda one: float(one["speed"])):
        if float(row["speed"]) < 1:
            where = f"{row['problem']}, {row['direction']}, {row['threads']}"
            yield f"slower: {row['speed']} x, {where}"


def main(
    results: Annotated[Path, typer.Option(help="result file")] = RESULTS / "cpu" / "kernels.csv",
) -> None:
    """Print the summary of a result file."""
    for line in lines(read(results)):
        print(line)


if __name__ == "__main__":
    typer.run(main)
