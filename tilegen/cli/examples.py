"""The command `tilegen examples`."""

from __future__ import annotations

import ast
import json
import sys
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from tilegen.cli.options import Json, console, print_json
from tilegen.errors import Unsupported, did_you_mean
from tilegen.parsing import parse_module


def examples(
    name: Annotated[str, typer.Argument(help="an example; default: list all")] = "",
    json_: Json = False,
) -> None:
    """List example programs, or print one.

    Example: tilegen examples flex_port > port.py
    """
    sources = {
        Path(path.name).stem: _program(path)
        for path in sorted(files("tilegen.examples").iterdir(), key=lambda path: path.name)
        if path.name.endswith((".py", ".ipynb")) and path.name != "__init__.py"
    }
    if name and name not in sources:
        hint = did_you_mean(name, sources)
        raise Unsupported(f"examples are {', '.join(sources)}; got {name!r}{hint}")
    if name:
        print_json({name: sources[name]}) if json_ else sys.stdout.write(sources[name])
        return
    titles = {
        key: (ast.get_docstring(parse_module(text)) or "").partition("\n")[0].removeprefix("# ")
        for key, text in sources.items()
    }
    if json_:
        print_json(titles)
        return
    for key, title in titles.items():
        console.print(f"{key:18}{title}")


def _program(path: Traversable) -> str:
    """Return the text of an example. The cells of a notebook are marked as editors know them."""
    text = path.read_text(encoding="utf-8")
    if path.name.endswith(".py"):
        return text
    parts: list[str] = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        is_code = cell["cell_type"] == "code"
        parts.append(f"# %%\n{source}" if is_code else f'# %% [markdown]\n"""\n{source}\n"""')
    return "\n\n".join(parts) + "\n"
