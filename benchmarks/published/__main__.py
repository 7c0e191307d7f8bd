"""Judge the model by tables that others published, and fit constants to them.

    python -m benchmarks.published --data DIR

`DIR` holds one folder for each source, with a README that names where it comes from; the data is
not part of this repository. Needs no GPU; takes minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.environment import RESULTS
from benchmarks.published import (
    aotriton,
    attentionfuse,
    curves,
    decoding,
    ffpa,
    fit,
    ibm,
    report,
    splits,
)
from benchmarks.published.judge import judge_point, judge_sweep, judge_winners, predictions
from benchmarks.published.records import Sweep
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
        print(*report.sweep_lines(verdicts), sep="\n")
        report.write(out / f"{file}.csv", verdicts)
    if not fitting:
        return
    left_out = list(fit.leave_one_length_out(sweeps, FITTED, absolute=in_absolute_terms))
    print("Each length judged with constants that the other lengths gave:")
    print(*report.sweep_lines([verdict for verdict, _ in left_out]), sep="\n")
    for length, factors in {verdict.length: factors for verdict, factors in left_out}.items():
        print(f"  without {length} rows: {_factors(factors)}")
    report.write(out / "sweeps_left_out.csv", [verdict for verdict, _ in left_out])
    print("All sweeps:", _factors(fit.fit(sweeps, FITTED, absolute=in_absolute_terms)))


def _factors(factors: fit.Factors) -> str:
    return ", ".join(f"{name.split('.')[1]} x {value:.2f}" for name, value in factors.items())


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
    try:
        judge_sweeps(attentionfuse.sweeps(data / "attentionfuse"), out, fitting=fitting)
        tables = [
            *aotriton.winners(data / "aotriton", stride),
            *ffpa.winners(data / "ffpa-attn", 1),
            *ibm.winners(data / "ibm-vllm-triton-backend"),
        ]
        print("Winners of searches, in the model's order:")
        winners = [verdict for point in tables if (verdict := judge_winners(point))]
        print(*report.winner_lines(winners), sep="\n")
        report.write(out / "winners.csv", winners, stride=stride)
        points = [*ibm.timed(data / "ibm-vllm-triton-backend"), *curves.points(data)]
        envelope = []
        for point in points:
            try:
                envelope.append(judge_point(point))
            except Unsupported as error:
                print(f"  left out: {point.problem}: {error}")
        print("Times of libraries, and the model's of tilegen's kernels:")
        print(*report.point_lines(envelope), sep="\n")
        report.write(out / "curves.csv", envelope)
        decoded = decoding.judge(points)
        print(*decoding.lines(points, decoded), sep="\n")
        report.write(out / "decode.csv", decoded)
        print("Split counts of a decoding kernel on an H100:")
        counts = splits.judge(data / "flash-attention-lab" / "decode_splits_h100.csv")
        print(*report.sweep_lines(counts), sep="\n")
        report.write(out / "splits.csv", counts)
    except TilegenError as error:
        raise SystemExit(str(error)) from None
    print(f"written to {out}")


if __name__ == "__main__":
    typer.run(main)
