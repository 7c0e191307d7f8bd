"""Reader of texts in Python's syntax, node by node of a syntax tree. Only the listed
constructors are accepted, and no code is run."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from tilegen.errors import InvalidProblem, TilegenError


class Reader(ABC):
    """Reads masks or expressions, which have calls, names, numbers, `&`, `|` and `~` in common."""

    what: ClassVar[str]
    """The name of what is read, for errors."""
    longest: ClassVar[int]
    """Longest text read, in characters."""
    deepest: ClassVar[int]
    """Deepest nesting read, of operators that are not chains, and calls."""
    operators: ClassVar[Mapping[type, Callable[..., Any]]]
    """Functions of operands by `ast.BitAnd`, `ast.BitOr` and `ast.Invert`."""
    unread: ClassVar[str] = "it does not read as an expression of Python"
    """The reason in the error for a text without a syntax tree."""

    def parse(self, text: str) -> Any:
        """Read a text as a mask or an expression. Raises InvalidProblem for any other text."""
        if len(text) > self.longest:
            raise InvalidProblem(
                f"expected at most {self.longest} characters in {self.what}, got {len(text)}"
            )
        try:
            return self.whole(text)
        except SyntaxError:
            reason = self.unread
        except (ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as e:
            reason = str(e) if isinstance(e, InvalidProblem) else f"{type(e).__name__}: {e}"
        except TilegenError as e:
            reason = str(e)
        raise InvalidProblem(f"expected {self.what}, got {text[:200]!r}: {reason}")

    @abstractmethod
    def whole(self, text: str) -> Any:
        """Read the syntax tree of a text. `parse` turns its errors into an InvalidProblem."""

    def read(self, node: ast.expr, depth: int) -> Any:
        """Read a node."""
        if depth > self.deepest:
            raise InvalidProblem(f"expected at most {self.deepest} levels of nesting")
        depth += 1
        match node:
            case ast.Constant(value=value) | ast.Name(id=value):
                return self.leaf(value, is_name=isinstance(node, ast.Name))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return self.call(name, args, depth)
            case ast.UnaryOp(op=ast.Invert() as op, operand=operand):
                return self.operators[type(op)](self.operand(operand, depth))
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr() as op):
                parts = (self.operand(part, depth) for _, part in chain(node, type(op)))
                return self.operators[type(op)](*parts)
            case _:
                return self.other(node, depth)

    @abstractmethod
    def leaf(self, value: Any, *, is_name: bool) -> Any:
        """Read a name, or a number or another constant of Python."""

    @abstractmethod
    def call(self, name: str, args: list[ast.expr], depth: int) -> Any:
        """Call a constructor with the arguments that its nodes give."""

    @abstractmethod
    def operand(self, node: ast.expr, depth: int) -> Any:
        """Return an operand of `&`, `|` or `~`."""

    def other(self, node: ast.expr, depth: int) -> Any:
        """Read any other node."""
        raise InvalidProblem(f"{ast.unparse(node)[:80]!r} is not part of {self.what}")


def chain(
    node: ast.expr, *operators: type[ast.operator]
) -> list[tuple[ast.operator | None, ast.expr]]:
    """Return the operands of `a - b + c`, however long, from the last, each with the operator
    before it."""
    parts: list[tuple[ast.operator | None, ast.expr]] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, operators):
        parts.append((node.op, node.right))
        node = node.left
    return [*parts, (None, node)]
