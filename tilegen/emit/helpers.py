"""Functions that a kernel calls. Their parameters are the names that their lines read.

A template has the lines of a step. Masks, scores and dropout add to these lines, so the parameters
are computed, not written by hand.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tilegen.emit.arguments import WIDTH, packed
from tilegen.parsing import parse_module

SWITCHES = ("MASKED", "PART")
"""The parameters that are constexprs, in lines that read them."""


_IMPORTED = ("tl", "fence_async_shared", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait")
"""Names that emitted files import, and that are no parameters."""


@dataclass(frozen=True)
class Helper:
    """A function that Triton compiles, made of lines."""

    name: str
    doc: str
    gives: str
    """The variables that it returns, separated by commas."""
    body: str
    decorator: str = "@triton.jit"

    @property
    def definition(self) -> str:
        """The text of the function."""
        lines = [f'"""{self.doc}"""', *self.body.strip().splitlines()]
        lines += [f"return {self.gives}"] if self.gives else []
        body = "\n".join(line and f"    {line}" for line in lines)
        switches = [f"{name}: tl.constexpr" for name in self._switches]
        return f"{self.decorator}\ndef {self.name}{self._listed(switches, 0)}:\n{body}\n"

    def call(self, masked: bool | str = "", indent: int = 8) -> str:
        """Return the call as a line with the given indentation."""
        values = {"MASKED": masked, "PART": "PART"}
        switches = [f"{name}={values[name]}" for name in self._switches]
        return f"{self.gives} = {self.name}{self._listed(switches, indent)}"

    def role(self, *switches: int) -> str:
        """Return the function with its arguments, as an entry of `warp_specialize`."""
        arguments = [*self.parameters, *map(str, switches)]
        lines = packed([[name] for name in arguments], WIDTH - 8)
        return "\n".join([f"({self.name}, (", *(f"    {line}" for line in lines), ")),"])

    @cached_property
    def parameters(self) -> list[str]:
        """The names that the lines read, those that the function returns first."""
        changed = [name for name in self.gives.split(", ") if name in self._read]
        return changed + [name for name in self._read if name not in (*changed, *SWITCHES)]

    @cached_property
    def assigned(self) -> list[str]:
        """The names that the lines assign."""
        nodes = _in_order(parse_module(self.body))
        return list(dict.fromkeys(node.id for node in nodes if isinstance(node.ctx, ast.Store)))

    @property
    def _switches(self) -> list[str]:
        return [name for name in SWITCHES if name in self._read]

    @cached_property
    def _read(self) -> list[str]:
        return _read(self.body)

    def _listed(self, switches: list[str], indent: int) -> str:
        names = [*self.parameters, *switches]
        line = ", ".join(names)
        if indent + len(f"{self.gives} = {self.name}({line}):") <= WIDTH:
            return f"({line})"
        return (
            "(\n    "
            + "\n    ".join(packed([[name] for name in names], WIDTH - 4 - indent))
            + "\n)"
        )


def _read(body: str) -> list[str]:
    """Return the names that lines read before they assign them, in order of use."""
    names: dict[str, None] = {}
    assigned: set[str] = set()
    for node in _in_order(parse_module(body)):
        if isinstance(node.ctx, ast.Store):
            assigned.add(node.id)
        elif node.id not in assigned and not _is_global(node.id):
            names[node.id] = None
    return list(names)


def _in_order(node: ast.AST) -> Iterator[ast.Name]:
    """Yield names in the order of evaluation: the value of an assignment before its targets."""
    match node:
        case ast.Name():
            yield node
            return
        case ast.Assign(targets=targets, value=value):
            parts: list[ast.AST] = [value, *targets]
        case ast.AugAssign(target=ast.Name(id=name) as target, value=value):
            parts = [value, ast.Name(id=name, ctx=ast.Load()), target]
        case ast.For(target=target, iter=over, body=body):
            parts = [over, target, *body]
        case ast.If(test=test, body=body, orelse=orelse):
            parts = [test, *body, *orelse]
        case _:
            parts = list(ast.iter_child_nodes(node))
    for part in parts:
        yield from _in_order(part)


def _is_global(name: str) -> bool:
    constant = name.isupper() and name not in SWITCHES
    return constant or name.startswith("_") or name in (*_IMPORTED, *dir(builtins))
