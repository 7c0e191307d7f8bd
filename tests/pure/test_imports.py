"""Which module of tilegen needs which: folders that can be read from the bottom up."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def needed(path: Path, modules: set[str]) -> set[str]:
    """The modules that one imports, inside functions too, and only for types."""
    actual: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(module=str() as module, names=names):
                actual |= {f"{module}.{one.name}" for one in names} & modules or {module}
            case ast.Import(names=names):
                actual |= {one.name for one in names}
            case _:
                pass
    return actual & modules


def test_no_modules_need_each_other() -> None:
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "tilegen").rglob("*.py")
    }
    try:
        TopologicalSorter(
            {name: needed(path, set(paths)) - {name} for name, path in paths.items()}
        ).prepare()
    except CycleError as circle:
        pytest.fail(f"modules need each other: {' -> '.join(circle.args[1])}")
