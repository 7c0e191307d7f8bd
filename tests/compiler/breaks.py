"""Deliberate breaks of the CPU compiler, each of which must turn a test red.

    python -m tests.compiler.breaks [NAME ...]

A break of breaks.toml replaces a text of a module while a process of its own imports it; no file
changes. `test_breaks.py` keeps the texts up to date.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
VARIABLE = "TILEGEN_TEST_BREAK"
_FILE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Break:
    """A mistake in one module, and the tests that must notice it."""

    name: str
    module: str
    old: str
    new: str
    tests: str

    @property
    def path(self) -> Path:
        """The module's file."""
        return ROOT / "tilegen" / "cpu" / f"{self.module}.py"


BREAKS = [Break(**one) for one in tomllib.loads(_FILE.read_text(encoding="utf-8"))["break"]]


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

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if fullname != f"tilegen.cpu.{self._broken.module}":
            return None
        loader = _Breaking(self._broken, fullname, str(self._broken.path))
        return importlib.util.spec_from_loader(fullname, loader)


def pytest_configure() -> None:
    """Break the compiler in a process that has this module as a plugin."""
    broken = Break(**json.loads(os.environ[VARIABLE]))
    sys.meta_path.insert(0, _Finder(broken))


def noticed(broken: Break) -> bool:
    """Return True if the tests of a break fail with it, in a process of their own."""
    tests = [str(ROOT / "tests" / "compiler" / name) for name in broken.tests.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, "-p", "tests.compiler.breaks", *tests],
        cwd=ROOT,
        env={**os.environ, VARIABLE: json.dumps(asdict(broken))},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode not in (0, 1) and result.returncode > 0:  # below 0: it crashed, noticed
        raise RuntimeError(
            f"{broken.name}: pytest exited with {result.returncode}: {result.stdout}"
        )
    return result.returncode != 0


def main(names: Sequence[str]) -> int:
    """Try breaks and return the number of those that no test noticed."""
    missed = 0
    for broken in BREAKS:
        if names and broken.name not in names:
            continue
        started = time.perf_counter()
        seen = noticed(broken)
        missed += not seen
        seconds = time.perf_counter() - started
        print(f"{broken.name:30}{'noticed' if seen else 'MISSED':10}{seconds:5.1f} s", flush=True)
    return missed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="break the CPU compiler on purpose")
    parser.add_argument("names", nargs="*", help="names of breaks; none: all")
    sys.exit(main(parser.parse_args().names))
