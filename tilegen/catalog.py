"""Catalogues: files that list problems to generate, tune or measure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from tilegen.errors import InvalidProblem, TilegenError, Unsupported
from tilegen.problem import AttentionProblem

YAML = (".yaml", ".yml")


def read_catalogue(path: Path) -> list[AttentionProblem]:
    """Read the problems of a file, each once, in the order of the file.

    A text file has one notation per line, and `#` starts a comment. A `.yaml` file has a list of
    notations, or such lists under names: `llama: [hq32 hkv8 q8192 d128 bf16 causal]`. Raises
    InvalidProblem with the place of the mistake, and Unsupported if the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Unsupported(f"expected a file of problems, cannot read {path}: {error}") from None
    problems: list[AttentionProblem] = []
    for place, notation in _from_yaml(path, text) if path.suffix in YAML else _from_lines(text):
        try:
            problems.append(AttentionProblem.parse(notation))
        except TilegenError as error:
            raise InvalidProblem(f"{path}, {place}: {error}") from None
    if not problems:
        raise InvalidProblem(f"expected at least one problem in {path}, found none")
    return list(dict.fromkeys(problems))


def _from_lines(text: str) -> Iterator[tuple[str, str]]:
    """Yield the place and text of each notation in a text file."""
    for number, line in enumerate(text.splitlines(), 1):
        if notation := line.split("#")[0].strip():
            yield f"line {number}", notation


def _from_yaml(path: Path, text: str) -> Iterator[tuple[str, str]]:
    """Yield the place and text of each notation in a YAML file."""
    import yaml

    try:
        yield from _notations(yaml.safe_load(text), "")
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidProblem(
            f"expected YAML in {path}, found something else: {' '.join(str(error).split())[:300]}"
        ) from None


def _notations(value: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, below in cast("dict[Any, Any]", value).items():
            yield from _notations(below, f"{place}.{name}" if place else f"{name}")
    elif isinstance(value, list):
        for index, below in enumerate(cast("list[Any]", value)):
            yield from _notations(below, f"{place}[{index}]")
    elif value is not None:  # parsing rejects values of other types
        yield place or "the whole file", value
