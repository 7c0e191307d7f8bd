"""Masks from their notation: `(causal|prefix_lm(100))&window(4095,0)`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, cast, get_args

from tilegen.errors import InvalidProblem
from tilegen.masks.mask import Causal, Full, Mask, intersect, sliding_window, unite
from tilegen.masks.tree import Tree
from tilegen.masks.unlisted import Unlisted
from tilegen.masks.usual import (
    BlockSparse,
    Dilated,
    GlobalTokens,
    Intervals,
    KvPrefix,
    Neighborhood,
    PrefixLM,
    SameDocument,
)
from tilegen.masks.values import AXES, Kind, Pattern, Values, check_number

MAX_DEPTH = 32
MAX_TREE = 2**14
"""Most drafted tokens of a tree."""
MAX_TEXT = 2**14
"""Longest notation read, in characters."""


def parse_mask(text: str) -> Mask:
    """Return the mask a notation such as `causal&window(4095,0)` describes; tensors in it come back
    as stand-ins. Raises InvalidProblem."""
    if not isinstance(text, str):
        raise InvalidProblem(f"expected the notation of a mask, got {type(text).__name__}")
    if len(text) > MAX_TEXT:
        raise InvalidProblem(f"expected at most {MAX_TEXT} characters in a mask, got {len(text)}")
    return _parse(text, text, 0)


FORMS = (
    "full, causal, causal(bottom_right), window(LEFT,RIGHT), window(LEFT,RIGHT,bottom_right), "
    "prefix_lm(N), global(N), kv_prefix(N), dilated(STEP), neighborhood(HxW,HxW), "
    "documents(@q:LENGTH), same_id(@q:LENGTH,@k:LENGTH), within(same_id(...),MASK), "
    "tree(@:TOKENS), block_sparse(@:PERCENT,BLOCK), ordered(@k:LENGTH), matched(@k:LENGTH), "
    "keep(EXPRESSION of b, h, q and k), unlisted(MASK), joined by & | ~ and parentheses"
)


def split_arguments(text: str, whole: str) -> list[str]:
    """Return the parts of a text between commas outside of brackets. Raises InvalidProblem."""
    return [part.strip() for part in _split(text, ",", whole)]


def _parse(text: str, whole: str, depth: int) -> Mask:
    text = text.strip()
    if depth > MAX_DEPTH:
        raise InvalidProblem(f"expected at most {MAX_DEPTH} levels of parentheses in a mask")
    for operator, join in (("|", unite), ("&", intersect)):
        parts = _split(text, operator, whole)
        if len(parts) > 1:
            return join(*(_parse(part, whole, depth + 1) for part in parts))
    if text.startswith("~"):
        return ~_parse(text[1:], whole, depth + 1)
    if text.startswith("(") and text.endswith(")"):
        return _parse(text[1:-1], whole, depth + 1)
    match = re.fullmatch(r"([a-z_]+)(?:\((.*)\))?", text)
    if not match or match[1] not in _MAKERS:
        raise _unexpected(whole)
    arguments = split_arguments(match[2], whole) if match[2] else []
    if match[2] == "":
        raise _unexpected(whole)
    try:
        return _MAKERS[match[1]](*arguments)
    except TypeError:  # too many arguments, or too few
        raise _unexpected(whole) from None


def _split(text: str, separator: str, whole: str) -> list[str]:
    """Split where no parenthesis is open."""
    parts, depth, start = list[str](), 0, 0
    for i, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if depth < 0:
            raise _unexpected(whole)
        if character == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    if depth:
        raise _unexpected(whole)
    return [*parts, text[start:]]


def _unexpected(text: str) -> InvalidProblem:
    return InvalidProblem(f"expected a mask ({FORMS}), got {text[:200]!r}")


def _integer(text: str) -> int:
    if not re.fullmatch(r"-?\d{1,12}", text):
        raise InvalidProblem(f"expected an integer in a mask, got {text!r}")
    return int(text)


def _stand_in(
    text: str,
    pattern: Pattern = "constant",
    kind: Kind = "int",
    block: int = 1,
    axes: tuple[str, ...] = AXES,
) -> Values:
    match = re.fullmatch(r"@([bhqk]*):(\d{1,9})", text)
    if not match or match[1] not in axes:
        example = "@h:128" if axes is AXES else f"@{axes[0]}:64"
        raise InvalidProblem(f"expected values such as {example}, got {text!r}")
    return Values(axes=match[1], typical=int(match[2]), pattern=pattern, kind=kind, block=block)


def _number(text: str) -> int | Values:
    return _stand_in(text) if text.startswith("@") else _integer(text)


def _grid(text: str) -> tuple[int, ...]:
    return tuple(map(_integer, text.split("x")))


ROWS, COLUMNS = (tuple(axes for axes in AXES if axes.endswith(end)) for end in "qk")
"""Axes of values for each row, and for each column."""


def _within(same: str, mask: str) -> Mask:
    from tilegen.masks.packed import Within  # loads torch

    documents = parse_mask(same)
    if not isinstance(documents, SameDocument) or "within(" in mask:
        raise InvalidProblem(
            f"expected within(same_id(...),MASK), got {same[:200]!r} and {mask[:200]!r}"
        )
    return Within.of(documents, parse_mask(mask))


def _block_sparse(layout: str, block: str) -> Mask:
    size = _integer(block)
    check_number("block", size, low=1)
    blocks = _stand_in(layout, "layout", "bool", size, axes=("", "b", "h", "bh"))
    if blocks.typical > 100:
        raise InvalidProblem(f"expected percent of blocks, got {layout!r}")
    return BlockSparse(blocks, size)


def _tree(table: str, lengths: str | None = None) -> Tree:
    found = _stand_in(table, "tree", "bool", axes=("", "b"))
    if not 1 <= found.typical <= MAX_TREE:
        raise InvalidProblem(f"expected a tree of 1..{MAX_TREE} tokens, got {table!r}")
    return Tree(found, None if lengths is None else _stand_in(lengths, axes=("b",)))


def _keep(text: str, *tables: str) -> Mask:
    from tilegen.masks.expression_mask import Expression, canonical  # loads SymPy

    captured: list[Values] = []
    for table in tables:
        match = re.fullmatch(rf"(@:\d{{1,9}})({'|'.join(get_args(Kind))})", table)
        if not match:
            raise InvalidProblem(f"expected values such as @:50int, got {table!r}")
        stand_in = _stand_in(match[1], "table", cast("Kind", match[2]))
        captured.append(replace(stand_in, axes=None))
    return Expression(canonical(text, tuple(one.kind for one in captured)), tuple(captured))


def _comparison(relation: Literal["<", "=="], column: str) -> Mask:
    from tilegen.masks.comparison import compared  # loads SymPy

    return compared(relation, _stand_in(column, "table", axes=("k", "bk")))


_MAKERS: dict[str, Callable[..., Mask]] = {
    "full": Full,
    "causal": Causal,
    "window": lambda left, right, *alignment: sliding_window(
        _number(left), _number(right), *alignment
    ),
    "prefix_lm": lambda prefix: PrefixLM(_number(prefix)),
    "global": lambda tokens: GlobalTokens(_number(tokens)),
    "kv_prefix": lambda length: KvPrefix(_number(length)),
    "dilated": lambda step: Dilated(_integer(step)),
    "neighborhood": lambda grid, window: Neighborhood(_grid(grid), _grid(window)),
    "documents": lambda firsts: Intervals.of(_stand_in(firsts, axes=ROWS)),
    "same_id": lambda q, k: SameDocument(
        _stand_in(q, "ids", axes=ROWS), _stand_in(k, "ids", axes=COLUMNS)
    ),
    "within": _within,
    "tree": _tree,
    "unlisted": lambda mask: Unlisted(parse_mask(mask)),
    "block_sparse": _block_sparse,
    "keep": _keep,
    "ordered": lambda column: _comparison("<", column),
    "matched": lambda column: _comparison("==", column),
}
