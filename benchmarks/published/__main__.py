"""Judge the model by tables that others published, and fit constants to them.

    python -m benchmarks.published --data DIR

`DIR` holds one folder for each source, with a README that names where it comes from; the data is
not part of this repository. Needs no GPU; takes minutes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.environment import RESULTS
from benchmarks.published import decoding, fit, readers, winners
from benchmarks.published.judge import (
    PointVerdict,
    SweepVerdict,
    judge_point,
    judge_sweep,
    judge_winners,
    predictions,
)
from benchmarks.published.records import Point, Sweep
from benchmarks.rows import table, write
from tilegen.errors import TilegenError, Unsupported

OUT = RESULTS / "published"
FITTED = ("rates.tensor_efficiency", "rates.step_clk", "rates.spilled")
"""Constants of the RTX 3090's family that its sweeps can distinguish."""


def in_absolute_terms(sweep: Sweep) -> bool:
    """True if a sweep's times are of kernels alone: those of the backward include PyTorch's work
    around them, and short ones include launches."""
    return len(sweep.kernels) == 1 and sweep.length > 512


def judge_sweeps(sweeps: Sequence[Sweep], out: Path, *, fitting: bool) -> None:
    """Judge the model unchanged, then with constants fitted to other sweeps."""
    for compiled, name, file in (
        (False, "registers predicted for tilegen's kernels", "sweeps_predicted"),
        (True, "registers of the published kernels", "sweeps"),
    ):
        print(f"Sweeps over tiles, RTX 3090, the model as it is, {name}:")
        verdicts = [judge_sweep(one, predictions(one, compiled=compiled)) for one in sweeps]
        show_sweeps(verdicts)
        write(out / f"{file}.csv", verdicts)
    if not fitting:
        return
    left_out = list(fit.leave_one_length_out(sweeps, FITTED, absolute=in_absolute_terms))
    print("Each length judged with constants that the other lengths gave:")
    show_sweeps([verdict for verdict, _ in left_out])
    for length, factors in {verdict.length: factors for verdict, factors in left_out}.items():
        print(f"  without {length} rows: {_factors(factors)}")
    write(out / "sweeps_left_out.csv", [verdict for verdict, _ in left_out])
    print("All sweeps:", _factors(fit.fit(sweeps, FITTED, absolute=in_absolute_terms)))


def _factors(factors: fit.Factors) -> str:
    return ", ".join(f"{name.split('.')[1]} x {value:.2f}" for name, value in factors.items())


def judge_points(points: Sequence[Point]) -> Iterator[PointVerdict]:
    """Yield the verdict on each time; print why others are left out."""
    for point in points:
        try:
            yield judge_point(point)
        except Unsupported as error:
            print(f"  left out: {point.problem}: {error}")


def show_sweeps(verdicts: Sequence[SweepVerdict]) -> None:
    """Print a line for each sweep, then the median and the worst regret."""
    names = "sweep length configs spearman regret trials ratio chosen best"
    print(table(verdicts, names.split()))
    regrets = [row.regret for row in verdicts]
    print(
        f"regret: median {statistics.median(regrets):.1%}, worst {max(regrets):.1%}; "
        f"rank correlation: median {statistics.median(row.spearman for row in verdicts):.2f}"
    )


def point_lines(verdicts: Sequence[PointVerdict]) -> Iterator[str]:
    """Yield a line for each kind of curve: median and range of model over published."""
    for kind in dict.fromkeys((one.gpu, one.name, one.library) for one in verdicts):
        mine = [one for one in verdicts if (one.gpu, one.name, one.library) == kind]
        ratios = [one.ratio for one in mine]
        bounds = [one.model_over_bound for one in mine]
        yield (
            f"  {' '.join(kind):48} {len(mine):3} problems  model/published "
            f"{statistics.median(ratios):5.2f} ({min(ratios):.2f}..{max(ratios):.2f})  "
            f"model/bound at least {min(bounds):.2f}"
        )


def main(
    data: Annotated[Path, typer.Option(help="Folder of published tables.")],
    out: Annotated[Path, typer.Option(help="Folder of results; files are replaced.")] = OUT,
    stride: Annotated[
        int, typer.Option(help="Every which row of the largest tables is judged.", min=1)
    ] = 37,
    fitting: Annotated[bool, typer.Option("--fit/--no-fit", help="Fit constants too.")] = True,
) -> None:
    """Report how well the model predicts what others measured.

    Example: python -m benchmarks.published --data ../data --stride 101
    """
    ibm = data / "ibm-vllm-triton-backend"
    try:
        judge_sweeps(readers.attentionfuse(data / "attentionfuse"), out, fitting=fitting)
        tables = [
            *winners.aotriton(data / "aotriton", stride),
            *winners.ffpa(data / "ffpa-attn"),
            *winners.ibm(ibm),
        ]
        print("Winners of searches, in the model's order:")
        judged = [verdict for of in tables if (verdict := judge_winners(of))]
        names = "measured_on table judged grid first_1 first_4 first_8 first_16 in_own own_first_8"
        print(table(judged, names.split()))
        write(out / "winners.csv", judged)
        points = [*winners.ibm_times(ibm), *readers.library_times(data)]
        print("Times of libraries, and the model's of tilegen's kernels:")
        envelope = list(judge_points(points))
        print(*point_lines(envelope), sep="\n")
        write(out / "curves.csv", envelope)
        decoded = decoding.judge(points)
        print(*decoding.lines(points, decoded), sep="\n")
        write(out / "decode.csv", decoded)
        print("Split counts of a decoding kernel on an H100:")
        splits = readers.split_times(data / "flash-attention-lab")
        counts = list(decoding.judge_splits(splits))
        show_sweeps(counts)
        write(out / "splits.csv", counts)
    except TilegenError as error:
        raise SystemExit(str(error)) from None
    print(f"written to {out}")


if __name__ == "__main__":
    typer.run(main)
