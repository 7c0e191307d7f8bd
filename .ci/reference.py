"""Write the API reference, made from the docstrings, to build/reference or the folder named.

Fails at any warning, and at a public name without a docstring.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pdoc
from pdoc.doc import Class, Doc, Module

import tilegen
import tilegen.errors

ROOT = Path(__file__).parents[1]
PAGES = ("tilegen", r"!tilegen\..+", "tilegen.errors")
"""The package's names and its errors; the modules behind them are no interface."""


def undocumented(owner: Class | Module) -> Iterator[str]:
    """Yield the public names below a class or a module that have no docstring."""
    for name, member in owner.members.items():
        if name.startswith("_") or _is_of_another(member):
            continue
        if not member.docstring.strip():
            yield member.fullname
        if isinstance(member, Class):
            yield from undocumented(member)


def _is_of_another(member: Doc) -> bool:
    """True for what a class inherits from Python's own."""
    return not member.taken_from[0].startswith("tilegen")


def write(folder: Path) -> None:
    """Write the reference. Exits with a line for each name without a docstring."""
    for name in tilegen.__all__:  # loaded on first use, and pdoc sees what is loaded
        getattr(tilegen, name)
    missing = [*undocumented(Module(tilegen)), *undocumented(Module(tilegen.errors))]
    if missing:
        sys.exit("\n".join(f"{name} has no docstring" for name in missing))
    pdoc.render.configure(docformat="markdown", show_source=False, footer_text="tilegen")
    pdoc.pdoc(*PAGES, output_directory=folder)


if __name__ == "__main__":
    warnings.simplefilter("error")
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "reference"
    write(target)
    print(f"{target / 'index.html'}: {len(tilegen.__all__)} names")
