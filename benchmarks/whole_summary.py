"""The tables of benchmarks/whole_runs.md, from the result files of whole runs.

python -m benchmarks.whole_summary [--figure]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.environment import RESULTS
from benchmarks.rows import markdown, read
from benchmarks.whole.lines import fitted_lines

Row = Mapping[str, str]
Case = dict[str, Row]
"""The rows of a case, by attention."""
MISSING = "-"
PAGE = RESULTS.parent / "whole_runs.md"
TABLES = "## Tables\n"
"""Heading of the page, after which nothing else follows."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A paper's claim about a whole run, and the case here that is like it."""

    text: str
    hardware: str
    ratio: str
    """The paper's speedup."""
    case: str
    """A case of `benchmarks.train`."""
    over: str
    """The attention that the ratio compares with."""
    source: str
    """The paper, and the place there; or a word that nobody has checked it."""


CLAIMS = (
    Claim(
        text="GPT-2, 1k tokens, FlashAttention over the standard implementation",
        hardware="8 A100", ratio="3", case="gpt2 b1 q1024 bf16 plain", over="eager",
        source="arXiv 2205.14135, abstract",
    ),
    Claim(
        text="GPT-3 1.3B, 2k tokens, FlashAttention-2 over none (196 and 142 TFLOP/s)",
        hardware="8 A100", ratio="1.38", case="gpt2 b1 q2048 bf16 plain", over="eager",
        source="arXiv 2307.08691, table 1, from memory",
    ),
    Claim(
        text="BERT-large, 512 tokens, FlashAttention over the record of MLPerf 1.1",
        hardware="8 A100", ratio="1.15", case="bert b2 q512 bf16 plain", over="eager",
        source="arXiv 2205.14135, abstract",
    ),
    Claim(
        text="Long Range Arena, 1k to 4k tokens, FlashAttention over standard attention",
        hardware="1 A100", ratio="2.4", case="classifier b1 q4096 bf16 plain", over="eager",
        source="arXiv 2205.14135, abstract",
    ),
    Claim(
        text="GPT-3 1.3B, 8k tokens, FlashAttention-2 over none (220 and 72 TFLOP/s)",
        hardware="8 A100", ratio="3.06", case="classifier b1 q8192 bf16 plain", over="eager",
        source="arXiv 2307.08691, table 1, from memory",
    ),
    Claim(
        text="packed documents in torchtune, FlexAttention over SDPA with a mask",
        hardware="H100", ratio="up to 2.4", case="gpt2 b1 q2048 bf16 documents", over="sdpa",
        source="arXiv 2412.05496, from memory",
    ),
)  # fmt: skip
"""Claims of FlashAttention (2022), FlashAttention-2 (2023) and FlexAttention (2024)."""


def tables(folder: Path) -> dict[str, str]:
    """Return the tables of a folder's result files, by title; those without rows are left out."""
    made = {
        "Training": training(read(folder / "train.csv")),
        "Losses of fifty steps": losses(read(folder / "losses.csv")),
        "Generation": generation(read(folder / "generate.csv")),
        "Block-sparse": sparse(read(folder / "sparse_share.csv")),
        "What the papers claim": claims(read(folder / "train.csv")),
    }
    return {title: table for title, table in made.items() if table}


def by_case(rows: Sequence[Row]) -> dict[tuple[str, str], Case]:
    """Return rows by case and number of threads, and by attention."""
    grouped: dict[tuple[str, str], Case] = defaultdict(dict)
    for row in rows:
        grouped[row["case"], row.get("threads", "")][row["attention"]] = row
    return grouped


def training(rows: Sequence[Row]) -> str:
    """Return speeds, shares and memory of each case."""
    lines: list[list[str]] = []
    for (case, threads), of_case in by_case(rows).items():
        cells = [
            _cell(of_case, name, column, "{:.2f}")
            for name in ("eager", "sdpa")
            for column in ("over_tilegen", "cpu_over_tilegen")
        ]
        speed = _cell(of_case, "tilegen", "tokens_per_s", "{:.0f}")
        order = "tilegen", "sdpa", "eager"
        shares = [_cell(of_case, name, "attention_share", "{:.0%}") for name in order]
        peaks = [_cell(of_case, name, "peak_mib", "{:.0f}") for name in order]
        deviation = _cell(of_case, "tilegen", "deviation", "{:.1g}")
        over = [", ".join(cells[:2]), ", ".join(cells[2:])]
        lines.append([case, threads, speed, *over, ", ".join(shares), ", ".join(peaks), deviation])
    names = (
        "case", "threads", "tokens/s", "over eager: wall, CPU", "over SDPA: wall, CPU",
        "attention's share: tilegen, SDPA, eager",
        "peak MiB: tilegen, SDPA, eager", "losses apart from eager",
    )  # fmt: skip
    return markdown(names, lines) if lines else ""


def losses(rows: Sequence[Row]) -> str:
    """Return how far losses are from eager attention in fp32."""
    lines: list[list[str]] = []
    for (case, _), of_case in by_case(rows).items():
        order = "eager", "sdpa", "tilegen"
        apart = [_cell(of_case, name, "deviation", "{:.2g}") for name in order]
        last = [_cell(of_case, "tilegen", name, "{:.2g}") for name in ("of_sdpa", "noise")]
        lines.append([case, *apart, *last])
    names = "case", "eager", "SDPA", "tilegen", "of SDPA's", "a repeat"
    return markdown(names, lines) if lines else ""


def generation(rows: Sequence[Row]) -> str:
    """Return times to the first token and per token."""
    lines: list[list[str]] = []
    for (case, threads), of_case in by_case(rows).items():
        first, each = (_cell(of_case, "tilegen", name, "{:.1f} ms") for name in _TIMES)
        ratios = [
            ", ".join(_cell(of_case, name, f"{what}_over_tilegen", "{:.2f}") for what in _WHAT)
            for name in ("eager", "sdpa")
        ]
        tokens = _cell(of_case, "tilegen", "same_tokens", "{:.0%}")
        error = _cell(of_case, "tilegen", "logits_of_sdpa", "{:.2f}")
        lines.append([case, threads, first, each, *ratios, tokens, error])
    names = (
        "case", "threads", "first token", "each",
        "over eager: first, each", "over SDPA: first, each",
        "tokens like eager's", "error of logits, of SDPA's",
    )  # fmt: skip
    return markdown(names, lines) if lines else ""


_TIMES, _WHAT = ("first_ms", "per_token_ms"), ("first", "per_token")


def sparse(rows: Sequence[Row]) -> str:
    """Return the straight lines through the times of blocks, and SDPA's time over tilegen's."""
    cells: list[list[str]] = []
    for (seqlen, dtype, direction), line in fitted_lines(rows).items():
        of_key = [
            row
            for row in rows
            if (row["seqlen"], row["dtype"], row["direction"]) == (seqlen, dtype, direction)
        ]
        ratios = [float(row["over_tilegen"]) for row in of_key if row["attention"] == "sdpa"]
        cells.append(
            [
                *(seqlen, dtype, direction, f"{line.overhead:.2f} ms", f"{line.slope:.1f} ms"),
                *(f"{line.apart:.1%}", f"{min(ratios):.1f} to {max(ratios):.0f}"),
            ]
        )
    names = (
        "tokens", "dtype", "pass", "overhead", "all blocks", "farthest from the line",
        "SDPA's time over tilegen's",
    )  # fmt: skip
    return markdown(names, cells) if cells else ""


def claims(rows: Sequence[Row]) -> str:
    """Return the papers' claims beside what was measured, and the most that Amdahl allows."""
    # The most threads come last, and stay.
    cases = {case: by for (case, _), by in sorted(by_case(rows).items(), key=lambda one: one[0])}
    cells: list[list[str]] = []
    for claim in CLAIMS:
        of_case = cases.get(claim.case, {})
        row = of_case.get(claim.over, {})
        share, most = MISSING, MISSING
        if row.get("attention_share"):
            part = float(row["attention_share"])
            share, most = f"{part:.0%}", f"{1 / (1 - part):.2f}"
        measured = _cell(of_case, claim.over, "over_tilegen", "{:.2f}")
        where = row.get("gpu", MISSING).replace("cores", "cores, CPU")
        cells.append(
            [
                *(claim.text, claim.hardware, claim.ratio, claim.source),
                *(claim.case, where, measured, share, most, ""),
            ]
        )
    names = (
        "claim", "on", "ratio", "source", "here", "on", "ratio", "attention's share before",
        "most that attention can give", "GPU",
    )  # fmt: skip
    return markdown(names, cells) if any(claim.case in cases for claim in CLAIMS) else ""


def _cell(of_case: Case, name: str, column: str, form: str) -> str:
    """Return a number of an attention, or why there is none."""
    row = of_case.get(name)
    if row is None:
        return MISSING
    if row.get("status", "ok") != "ok":
        return row["status"]
    return form.format(float(row[column])) if row[column] else MISSING


def lines_of(folder: Path) -> Iterator[str]:
    """Yield the tables with their titles."""
    for title, table in tables(folder).items():
        yield f"### {title}\n\n{table}\n"


def with_tables(page: str, folder: Path) -> str:
    """Return a page with the tables of a folder after its heading TABLES."""
    prose, heading, _ = page.partition(TABLES)
    return f"{prose}{heading}\n" + "\n".join(lines_of(folder))


def main(
    folder: Annotated[Path, typer.Option(help="folder of result files")] = RESULTS / "cpu",
    write: Annotated[bool, typer.Option("--write", help="write them into the page")] = False,
    figure: Annotated[bool, typer.Option("--figure", help="draw the figures, too")] = False,
) -> None:
    """Print the tables of a folder's result files."""
    for text in lines_of(folder):
        print(text)
    if write:
        PAGE.write_text(with_tables(PAGE.read_text("utf-8"), folder), encoding="utf-8")
    if figure:
        from benchmarks.whole import figures

        figures.draw_all(folder)


if __name__ == "__main__":
    typer.run(main)
