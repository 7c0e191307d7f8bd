"""The table of benchmarks/README.md on calls on a CPU, and its figure, from their result file.

python -m benchmarks.cpu_summary [--figure]
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.environment import RESULTS
from benchmarks.rows import read
from benchmarks.study import figures
from benchmarks.study.figures import BLUE, GREEN, GREY, ORANGE
from tilegen.problem import AttentionProblem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, str]
Case = dict[str, Row]
"""The rows of one pass of a problem, by provider."""
STYLES = {
    "tilegen": (BLUE, "tilegen"),
    "sdpa": (ORANGE, "SDPA"),
    "sdpa math": (GREEN, "SDPA, math back end"),
    "standard": (GREY, "standard attention"),
}
"""Colour and label of each provider."""
SHOWN = {
    "b1 hq8 hkv8 q512 kv512 d64 fp32 causal": "512 tokens, head dim 64, fp32, causal",
    "b1 hq8 hkv8 q2048 kv2048 d64 fp32 full": "2048 tokens, head dim 64, fp32, full",
    "b1 hq8 hkv8 q2048 kv2048 d128 fp32 causal": "2048 tokens, head dim 128, fp32, causal",
    "b1 hq8 hkv8 q2048 kv2048 d64 bf16 causal": "2048 tokens, head dim 64, bf16, causal",
    "b1 hq8 hkv8 q2048 kv2048 d64 fp32 window(255,0)": "2048 tokens, fp32, window of 256",
}
"""Cases of the table of the project's README, and their titles."""
HEAD = (
    "| threads | pass | dtype | cases | faster | speed: least, median, most "
    "| part of the fp32 peak | faster than the best of SDPA |\n" + "| --- " * 8 + "|"
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


def readme_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table of the project's README: a few cases with two threads."""
    by_case: dict[tuple[str, str], Case] = defaultdict(dict)
    for row in rows:
        if row["threads"] == "2":
            by_case[row["problem"], row["direction"]][row["provider"]] = row
    yield "| 8 heads, two threads | forward | of SDPA's speed | backward | of SDPA's speed |"
    yield "| --- " * 5 + "|"
    for problem, title in SHOWN.items():
        cells = [title]
        for direction in ("forward", "backward"):
            case = by_case[problem, direction]
            median = float(case["tilegen"]["median_ms"])
            cells += [f"{median:.3g} ms", f"{speed(case):.3g} times"]
        yield f"| {' | '.join(cells)} |"


def curves(
    rows: Sequence[Row], *, dtype: str, mask: str, direction: str
) -> dict[str, list[tuple[int, float]]]:
    """Return (length, milliseconds a head) of each provider: head dim 64, two threads."""
    by_provider: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        problem = AttentionProblem.parse(row["problem"])
        is_drawn = (problem.dtype, problem.mask.notation, problem.head_dim_qk) == (dtype, mask, 64)
        if is_drawn and (row["direction"], row["threads"]) == (direction, "2"):
            heads = problem.batch * problem.num_heads_q
            by_provider[row["provider"]].append((problem.seqlen_q, float(row["median_ms"]) / heads))
    return {provider: sorted(points) for provider, points in by_provider.items()}


def figure(rows: Sequence[Row]) -> Figure:
    """Draw the time of a head against the length, of forwards and backwards."""
    import matplotlib.pyplot as plt

    masks = ("causal", "window(255,0)")
    panels = list(product(("fp32", "bf16"), ("forward", "backward"), masks))
    drawn, axes = plt.subplots(2, 4, figsize=(13.0, 6.2), sharex=True, sharey=True)
    for axis, (dtype, direction, mask) in zip(axes.flat, panels, strict=True):
        for provider, points in curves(rows, dtype=dtype, mask=mask, direction=direction).items():
            colour, label = STYLES[provider]
            lengths, times = zip(*points, strict=True)
            axis.plot(lengths, times, marker="o", markersize=4, color=colour, label=label)
        axis.set_title(f"{direction}, {dtype}, {mask}", fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
    for axis in axes[-1]:
        axis.set_xlabel("tokens")
    for axis in axes[:, 0]:
        axis.set_ylabel("ms a head, two threads")
    axes[0, 0].legend()
    drawn.tight_layout()
    return drawn


def main(
    results: Annotated[Path, typer.Option(help="result file")] = RESULTS / "cpu" / "calls.csv",
    draw: Annotated[bool, typer.Option("--figure", help="draw the figure, too")] = False,
) -> None:
    """Print the summary of a result file."""
    rows = read(results)
    for line in (*lines(rows), "", *readme_table(rows)):
        print(line)
    if draw:
        figures.require_matplotlib()
        figures.save(figure(rows), results.with_suffix(""))


if __name__ == "__main__":
    typer.run(main)
