"""List the benchmarks: `python -m benchmarks`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent


def benchmarks() -> Iterator[tuple[str, str]]:
    """Yield the name and the first sentence of each module that is a command."""
    for path in sorted((*FOLDER.glob("*.py"), *FOLDER.glob("*/__main__.py"))):
        text = path.read_text(encoding="utf-8")
        is_main = path.name == "__main__.py"
        if path != Path(__file__) and (is_main or '__name__ == "__main__"' in text):
            first = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0]
            yield (path.parent.name if is_main else path.stem), " ".join(first.split())


if __name__ == "__main__":
    print("python -m benchmarks.NAME --help describes one; results: benchmarks/README.md\n")
    for name, first in benchmarks():
        print(f"{name:20}{first}")
