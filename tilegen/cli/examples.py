"""The command `tilegen examples`."""

from __future__ import annotations

import ast
import json
import sys
from importlib.resources import files
from typing import Annotated

import typer

from tilegen.cli.options import Json, console, print_json
from tilegen.errors import Unsupported, did_you_mean
from tilegen.parsing import parse_module


def examples(
    name: Annotated[str, typer.Argument(help="an example; default: list all")] = "",
    json_: Json = False,
) -> None:
    """List example programs and a notebook, or print one.

    Example: tilegen examples flex_port > port.py
    """
    sources = {
        path.name.partition(".")[0]: path.read_text(encoding="utf-8")
        for path in sorted(files("tilegen.examples").iterdir(), key=lambda path: path.name)
        if path.name.endswith((".py", ".ipynb")) and path.name != "__init__.py"
    }
    if name and name not in sources:
        hint = did_you_mean(name, sources)
        raise Unsupported(f"examples are {', '.join(sources)}; got {name!r}{hint}")
    if name:
        print_json({name: sources[name]}) if json_ else sys.stdout.write(sources[name])
        return
    titles = {key: _title(text) for key, text in sources.items()}
    if json_:
        print_json(titles)
        return
    for key, title in titles.items():
        console.print(f"{key:18}{title}")


def _title(text: str) -> str:
    if text.startswith("{"):  # a notebook, which begins with its title
        return json.loads(text)["cells"][0]["source"][0].strip("# \n") + ", a notebook."
    return (ast.get_docstring(parse_module(text)) or "").partition("\n")[0]
