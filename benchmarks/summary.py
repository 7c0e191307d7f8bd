"""The summary of a GPU check: what its files hold, as one page of Markdown."""

from __future__ import annotations

import json
import tarfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.parts import Outcome
from benchmarks.rows import markdown, read
from benchmarks.whole.summary import lines_of


def summarise(out: Path, outcomes: Sequence[Outcome]) -> str:
    """Return the page on what is in `out`; files that are missing or cut short are no error."""
    sections = {
        "Parts": _table(
            ("part", "ended", "seconds", "of", "last line"),
            (
                (o.name, o.status, f"{o.seconds:.0f}", f"{o.allowed:.0f}", o.message)
                for o in outcomes
            ),
        ),
        "Environment": _environment(out / "environment.txt"),
        "Tests": _tests(out / "tests.xml"),
        "Tuning": _tuning(out / "records.tar.gz"),
        "Benchmarks": _benchmarks(out / "benchmarks.csv"),
        "First results": _first_results(out / "first_result.csv"),
        "Predicted and counted": _counters(out / "counters.csv"),
        "Experiments on I/O": _experiments(out / "io" / "verdicts.csv"),
        "Whole runs": "\n".join(lines_of(out / "whole")),
    }
    body = "\n\n".join(f"## {title}\n\n{text or 'No result.'}" for title, text in sections.items())
    return f"# GPU check\n\n{body}\n"


def _environment(path: Path) -> str:
    if not path.exists():
        return ""
    return f"```\n{path.read_text(encoding='utf-8').strip()}\n```"


def _tests(path: Path) -> str:
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError):
        return ""
    suite = root if root.tag == "testsuite" else root.find("testsuite")
    if suite is None:
        return ""
    counts = ", ".join(
        f"{suite.get(name, '0')} {name}" for name in ("tests", "failures", "errors", "skipped")
    )
    broken = [
        f"- {case.get('classname')}::{case.get('name')}: {_first_line(problem.get('message'))}"
        for case in suite.iter("testcase")
        for problem in (*case.findall("failure"), *case.findall("error"))
    ]
    return "\n".join([f"{counts}; {float(suite.get('time', 0)):.0f} s", *broken])


def _tuning(path: Path) -> str:
    """One line per record; predicted is the model's time for the config that won."""
    rows: list[tuple[str, ...]] = []
    for record in _records(path):
        predicted = 1e6 * record["estimate"]["seconds"] if record["estimate"] else None
        median = record["measurement"]["median_us"]
        config = record["config"]
        rows.append(
            (
                record["problem"],
                record["kernel"],
                " ".join(f"{name}={value}" for name, value in config.items()),
                _number(median),
                _number(predicted),
                _number(median / predicted if median and predicted else None, 2),
                str(record["trials"]),
                f"{record['seconds_spent']:.0f}",
            )
        )
    names = ("problem", "kernel", "config", "us", "predicted us", "ratio", "trials", "seconds")
    return _table(names, rows)


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        with tarfile.open(path) as archive:
            files = [archive.extractfile(member) for member in archive if member.isfile()]
            return [json.load(file) for file in files if file is not None]
    except (OSError, EOFError, tarfile.TarError, ValueError):
        return []


def _benchmarks(path: Path) -> str:
    """One line per workload and direction, one column per provider: TFLOP/s or a status."""
    rows = read(path)
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    by_case: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        cell = _number(float(row["tflops"])) if row["tflops"] else row["status"]
        if row["tflops"] and row["status"] != "ok":
            cell += f" ({row['status']})"
        by_case.setdefault((row["workload"], row["direction"]), {})[row["provider"]] = cell
    table = _table(
        ("workload", "direction", *providers),
        (
            (*case, *(cells.get(provider, "") for provider in providers))
            for case, cells in by_case.items()
        ),
    )
    again = "".join(f"\n\n{line}" for line in _one_binary(rows))
    return f"TFLOP/s of kept pairs.\n\n{table}{again}" if rows else ""


def _one_binary(rows: Sequence[dict[str, str]]) -> Iterator[str]:
    """Yield a line for binaries that were timed under several names in one case."""
    by_digest: dict[tuple[str, ...], dict[str, None]] = {}
    for row in rows:
        if digest := row.get("digest"):  # which older rows lack
            name = " ".join(filter(None, (row["provider"], row["detail"])))
            by_digest.setdefault((row["workload"], row["direction"], digest), {})[name] = None
    for (workload, direction, digest), names in by_digest.items():
        if len(names) > 1:
            yield f"{workload} {direction}: one binary ({digest}) was timed as {'; '.join(names)}."


def _counters(path: Path) -> str:
    """One line per kernel: counted over predicted, 1.00 where the model is exact."""
    rows = read(path)
    ratios = [name for name in (rows[0] if rows else ()) if name.endswith("_ratio")]
    return _table(
        ("workload", "kernel", "config", *(name.removesuffix("_ratio") for name in ratios)),
        (
            (row["workload"], row["kernel"], row["config"], *(row[name] for name in ratios))
            for row in rows
        ),
    )


def _first_results(path: Path) -> str:
    names = ("problem", "direction", "provider", "seconds", "ratio", "detail")
    return _table(names, ([row[name] for name in names] for row in read(path)))


def _experiments(path: Path) -> str:
    names = ("experiment", "question", "verdict", "passed", "failed", "measured", "broken", "worst")
    return _table(names, ([row[name] for name in names] for row in read(path)))


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, empty without rows."""
    rows = list(rows)
    return markdown(names, rows) if rows else ""


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _first_line(text: str | None) -> str:
    return next(iter((text or "").splitlines()), "")
