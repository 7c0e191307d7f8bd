"""The command `tilegen help`: the words of the notation, and what may be named."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, cast

import typer

from tilegen.cli.options import Json, console, print_json, print_wrapped
from tilegen.environment import Settings
from tilegen.errors import Unsupported, Word, did_you_mean
from tilegen.gpus.spec import catalogue
from tilegen.kernels.config import OPTIONS, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.masks.notation import MASKS
from tilegen.parsing import parse_module
from tilegen.problem import WORDS

TOPICS = ("notation", "masks", "gpus", "kernels", "settings")


def help_(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(help=f"{', '.join(TOPICS)}, or a command")] = "",
    json_: Json = False,
) -> None:
    """Explain a topic: the notation of problems and tiles, masks, GPUs, kernels or settings.

    Example: tilegen help notation
    """
    group = context.find_root()
    commands: dict[str, Any] = getattr(group.command, "commands", {})
    if topic in TOPICS:
        words = list(_words(topic))
        if json_:
            print_json([word._asdict() for word in words])
            return
        width = max(len(word.written) for word in words) + 2
        for word in words:
            as_in = word.example not in ("", word.written)
            example = f", such as {word.example}" if as_in else ""
            print_wrapped([f"{word.written:{width}}{word.meaning}{example}"], width)
    elif topic == "":
        console.print(group.get_help())
    elif topic in commands:
        console.print(commands[topic].get_help(typer.Context(commands[topic], group, topic)))
    else:
        hint = did_you_mean(topic, (*TOPICS, *commands))
        raise Unsupported(f"topics are {', '.join(TOPICS)} and commands; got {topic!r}{hint}")


def _words(topic: str) -> Iterator[Word]:
    if topic == "notation":
        yield from WORDS
        yield Word("TILE", "the knobs below, written together", "m128n64w8s3t")
        for name, meaning in _documented(TileConfig).items():
            option = OPTIONS[name]
            yield Word(option.letter if option.is_flag else f"{option.letter}N", meaning, "")
    elif topic == "masks":
        yield from MASKS
        yield Word("A & B, A | B, ~A", "pairs in both, in one, not in it", "causal&~window(9,0)")
    elif topic == "gpus":
        for spec in catalogue():
            yield Word(spec.name, f"{spec.title}, {spec.arch}", "")
        yield Word("FILE.toml", "another GPU, with the fields of tilegen.gpus.spec.GpuSpec", "")
    elif topic == "kernels":
        for kernel in KERNELS.values():
            yield Word(kernel.name, kernel.title, "")
    else:
        for meaning in _documented(Settings).values():
            variable, _, rest = meaning.partition(": ")
            yield Word(variable, rest, "")


def _documented(record: type) -> dict[str, str]:
    """Return the documentation of a record's fields, by name, from its source."""
    body = cast("ast.ClassDef", parse_module(inspect.getsource(record)).body[0]).body
    return {
        field.target.id: " ".join(text.split())
        for field, after in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(text := after.value.value, str)
    }
