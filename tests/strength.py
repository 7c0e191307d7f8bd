"""Deliberate breaks, each of which must turn a test red.

    python -m tests.strength [NAME ...] [--jobs 2] [--report FILE]

A break of `*/breaks.toml` replaces a text of a module while a process of its own imports it; no
file changes. The tests beside the file that it names must fail. Breaks of emitted kernels are tests
themselves, which run whole. Each result is a line of the report; where a report of the same commit
is there, its results are not computed again. Exits with 1 if a break was noticed by no test.
"""

from __future__ import annotations

import argparse
import csv
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
VARIABLE = "TILEGEN_TEST_BREAK"
FIELDS = ("commit", "where", "name", "noticed", "seconds")
KERNELS = {
    "compiled/test_mutations.py": "mutation",
    "gluon/test_gluon_forward.py": "breaks_are_noticed or no_statement",
    "gluon/test_gluon_backward.py": "breaks_are_noticed or no_statement",
}
"""Tests that break emitted kernels, and which of their file."""


@dataclass(frozen=True)
class Break:
    """A mistake in one module, and the tests that must notice it."""

    folder: str
    """The folder of tests whose breaks.toml has it."""
    name: str
    module: str
    """A file below tilegen/, without its suffix."""
    old: str
    new: str
    tests: str
    """Files or tests of the folder."""

    def __str__(self) -> str:
        return f"{self.folder}: {self.name}"

    @property
    def path(self) -> Path:
        """The module's file."""
        return ROOT / "tilegen" / f"{self.module}.py"


def _read(path: Path) -> list[Break]:
    listed = tomllib.loads(path.read_text(encoding="utf-8"))
    package = listed["package"]
    return [
        Break(path.parent.name, **(each | {"module": f"{package}/{each['module']}".lstrip("/")}))
        for each in listed["break"]
    ]


BREAKS = [
    each
    for folder in ("compiler", "pure")
    for each in _read(ROOT / "tests" / folder / "breaks.toml")
]


class _Breaking(importlib.machinery.SourceFileLoader):
    def __init__(self, broken: Break, name: str, path: str) -> None:
        super().__init__(name, path)
        self._broken = broken

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        assert source.count(self._broken.old) == 1
        return compile(source.replace(self._broken.old, self._broken.new), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, broken: Break) -> None:
        self._broken = broken
        self._name = f"tilegen.{broken.module.replace('/', '.')}".removesuffix(".__init__")

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if fullname != self._name:
            return None
        file = str(self._broken.path)
        inside = [str(self._broken.path.parent)] if self._broken.path.stem == "__init__" else None
        loader = _Breaking(self._broken, fullname, file)
        return importlib.util.spec_from_file_location(
            fullname, file, loader=loader, submodule_search_locations=inside
        )


if VARIABLE in os.environ:  # a plugin of pytest, imported before anything of tilegen
    sys.meta_path.insert(0, _Finder(Break(**json.loads(os.environ[VARIABLE]))))


def _pytest(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "--all", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def noticed(broken: Break) -> bool:
    """Return True if the tests of a break fail with it, in a process of their own. Raises
    RuntimeError if they cannot run."""
    tests = [str(ROOT / "tests" / broken.folder / name) for name in broken.tests.split()]
    given = {VARIABLE: json.dumps(asdict(broken))}
    result = _pytest("-x", "-n", "0", "-p", "tests.strength", *tests, **given)
    # 2: an import failed at the break. Below 0: the process crashed.
    if result.returncode > 2 or (result.returncode == 2 and "usage:" in result.stderr):
        raise RuntimeError(f"{broken}: pytest exited with {result.returncode}: {result.stdout}")
    return result.returncode != 0


def _of_kernels(file: str, chosen: str, jobs: int) -> Iterator[tuple[str, bool, float]]:
    """Return name, verdict and seconds of each broken kernel of a file of tests."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = ["-n", str(jobs), "-k", chosen, f"--junitxml={report}"]
        result = _pytest(*options, str(ROOT / "tests" / file))
        if result.returncode not in (0, 1):
            raise RuntimeError(f"{file}: pytest exited with {result.returncode}: {result.stdout}")
        for case in ElementTree.parse(report).iter("testcase"):
            failed = any(child.tag in ("failure", "error") for child in case)
            yield case.attrib["name"], not failed, float(case.attrib["time"])


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout[:-1]


def _timed(broken: Break) -> tuple[bool, float]:
    started = time.perf_counter()
    return noticed(broken), time.perf_counter() - started


def main(names: Sequence[str], jobs: int, report: Path) -> int:
    """Try breaks, all or those named, and return the number of those that no test noticed."""
    commit, missed, done = _commit(), 0, set[tuple[str, str]]()
    if report.exists():
        with report.open(newline="", encoding="utf-8") as rows:
            done = {(row["where"], row["name"]) for row in csv.DictReader(rows)
                    if row["commit"] == commit}  # fmt: skip
    with report.open("a" if done else "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        if not done:
            table.writerow(FIELDS)

        def add(where: str, name: str, seen: bool, seconds: float) -> None:
            nonlocal missed
            missed += not seen
            verdict = "noticed" if seen else "MISSED"
            table.writerow((commit, where, name, verdict, f"{seconds:.1f}"))
            file.flush()
            print(f"{where:28} {name:60} {verdict:8} {seconds:6.1f} s", flush=True)

        with ThreadPoolExecutor(jobs) as pool:
            running = {
                pool.submit(_timed, broken): broken
                for broken in BREAKS
                if broken.name in names or not (names or (broken.folder, broken.name) in done)
            }
            for future in as_completed(running):
                broken = running[future]
                add(broken.folder, broken.name, *future.result())
        for where, chosen in KERNELS.items():
            if not names and all(place != where for place, _ in done):
                for name, seen, seconds in _of_kernels(where, chosen, jobs):
                    add(where, name, seen, seconds)
    return missed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="break tilegen on purpose")
    parser.add_argument("names", nargs="*", help="names of breaks of modules; none: all breaks")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--report", type=Path, default=Path("strength.csv"), help="rows go here")
    options = parser.parse_args()
    sys.exit(min(main(options.names, options.jobs, options.report), 1))
