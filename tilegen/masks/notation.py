"""Masks from their notation: `(causal|prefix_lm(100))&window(4095,0)`."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, cast, get_args

from tilegen.errors import InvalidProblem, Word, did_you_mean
from tilegen.masks.language.reader import Reader
from tilegen.masks.mask import Mask, causal, full, intersect, sliding_window, unite
from tilegen.masks.usual import (
    BLOCK_SPARSE,
    KEEP,
    SAME_ID,
    TREE,
    UNLISTED,
    dilated,
    global_tokens,
    intervals,
    kv_prefix,
    neighborhood,
    prefix_lm,
    text_of,
)
from tilegen.masks.values import AXES, Alignment, Kind, Pattern, Table, check_number
from tilegen.parsing import parse_expression

MAX_TREE = 2**14
"""Most drafted tokens of a tree."""
MASKS = (
    Word("full", "every pair", "full"),
    Word("causal", "k <= q", "causal"),
    Word(
        "causal(bottom_right)",
        "the same, where the last query meets the last key",
        "causal(bottom_right)",
    ),
    Word("window(LEFT,RIGHT)", "q - LEFT <= k <= q + RIGHT; -1: no limit", "window(127,0)"),
    Word(
        "window(LEFT,RIGHT,bottom_right)",
        "the same, where the last query meets the last key",
        "window(127,0,bottom_right)",
    ),
    Word("prefix_lm(N)", "k <= q or k < N", "prefix_lm(100)"),
    Word("global(N)", "q < N or k < N", "global(4)"),
    Word("kv_prefix(N)", "k < N; @b: a length of each batch entry", "kv_prefix(@b:1000)"),
    Word("dilated(STEP)", "(q - k) % STEP == 0", "dilated(4)"),
    Word(
        "neighborhood(HxW,HxW)",
        "the window of HxW around a position of a grid of HxW",
        "neighborhood(16x16,5x5)",
    ),
    Word(
        "documents(@q:LENGTH)",
        "both in one of the packed documents, whole, LENGTH tokens each",
        "documents(@q:64)",
    ),
    Word(
        "same_id(@q:LENGTH,@k:LENGTH)",
        "ids[q] == ids[k]; LENGTH tokens share an id",
        "same_id(@q:64,@k:64)",
    ),
    Word(
        "within(same_id(...),MASK)",
        "MASK inside of each document, counted from its first token",
        "within(same_id(@q:64,@k:64),causal)",
    ),
    Word(
        "tree(@:TOKENS)",
        "keys before the queries; of TOKENS drafted ones the ancestors",
        "tree(@:32)",
    ),
    Word(
        "block_sparse(@:PERCENT,BLOCK)",
        "the blocks of a layout, PERCENT of all",
        "block_sparse(@:25,64)",
    ),
    Word(
        "ordered(@k:LENGTH)",
        "a number of the key that is at most one of the query",
        "ordered(@k:64)",
    ),
    Word("matched(@k:LENGTH)", "a number of the key that is one of the query's", "matched(@k:64)"),
    Word("keep(EXPRESSION of b, h, q and k)", "where the expression is true", "keep(k%4==q%4)"),
    Word("unlisted(MASK)", "MASK, without lists of tiles", "unlisted(dilated(4))"),
)
"""The masks of the notation. `@` stands for a tensor: its axes, and a typical value."""
FORMS = f"{', '.join(word.written for word in MASKS)}, joined by & | ~ and parentheses"


def parse_mask(text: str) -> Mask:
    """Return the mask a notation such as `causal&window(4095,0)` describes; tensors in it come back
    as stand-ins. Raises InvalidProblem."""
    if not isinstance(text, str):
        raise InvalidProblem(f"expected the notation of a mask, got {type(text).__name__}")
    mask: Mask = _Masks().parse(text)
    return mask


def older_notations(mask: Mask) -> tuple[str, ...]:
    """Return notations under which earlier tilegens stored records of the mask: parts that end at
    the diagonal were joined, or came from functions."""
    parts = mask.conjuncts
    at = next((i for i, part in enumerate(parts) if part.window and not part.tables), None)
    if at is None:
        return ()
    left, right, alignment = parts[at].window or (None, None, "")
    if right != 0 or alignment != "top_left":
        return ()
    older = [("keep(k<=q)",)]
    if left is not None:
        older = [("causal", f"window({left},{side})") for side in (0, -1)]
        older += [(f"keep((k<=q)&({part}))",) for part in (f"q-k<={left}", f"q-{left}<=k")]
    others = [part.notation for i, part in enumerate(parts) if i != at]
    return tuple("&".join(sorted([*one, *others])) for one in older)


_FOREIGN = re.compile(
    r"""['"#\\\r\n]|,\s*\)|(?<!\[)\(\s*\)|(?<![:\d])\d+(?:_|and|else|for|i[fns]|not|or)"""
)
"""Python beyond the notation: strings, comments, lines, `(1,)`, `causal()`, `1_000` and `1if`."""
_TOKEN = re.compile(r"@[^\s,()&|~]*|\b\d+x\w*|\bglobal\b")
"""Words that Python cannot read: values, grids, and a name that is a keyword."""


class _Masks(Reader):
    """Reads masks, and numbers, values, grids and alignments in them."""

    what = "a mask"
    longest = 2**14
    deepest = 32
    unread = f"masks are {FORMS}"
    operators: ClassVar = {ast.BitAnd: intersect, ast.BitOr: unite, ast.Invert: Mask.inverted}

    def whole(self, text: str) -> Any:
        if _FOREIGN.search(text.strip()):
            raise SyntaxError
        return self.operand(parse_expression(_TOKEN.sub(_as_python, text.strip())), 0)

    def leaf(self, value: Any, *, is_name: bool) -> Any:
        if is_name and value not in get_args(Alignment):
            return self.call(value, [], 0)
        if not isinstance(value, int | str):
            raise InvalidProblem(f"expected an integer, got {value!r}")
        return value

    def call(self, name: str, args: list[ast.expr], depth: int) -> Any:
        texts = args[:1] if name == "keep" else []  # which another reader reads
        given = [*map(ast.unparse, texts), *(self.read(arg, depth) for arg in args[len(texts) :])]
        if name not in ("within", "unlisted") and any(isinstance(one, Mask) for one in given):
            raise InvalidProblem(f"{name} takes no masks; {self.unread}")
        try:
            return CONSTRUCTORS[name](*given)
        except (KeyError, TypeError):  # no such name, too many arguments, or too few
            hint = "" if name in CONSTRUCTORS else did_you_mean(name, NAMES)[2:]
            raise InvalidProblem(hint or self.unread) from None

    def operand(self, node: ast.expr, depth: int) -> Any:
        return _mask(self.read(node, depth))

    def other(self, node: ast.expr, depth: int) -> Any:
        match node:
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)):
                return -value
            case _:
                return super().other(node, depth)


def _as_python(token: re.Match[str]) -> str:
    return "global_" if token[0] == "global" else repr(token[0])


def _mask(value: Any) -> Mask:
    if not isinstance(value, Mask):
        raise InvalidProblem(f"expected a mask, got {value}")
    return value


def _stand_in(
    value: Any,
    pattern: Pattern = "constant",
    kind: Kind = "int",
    block: int = 1,
    axes: tuple[str, ...] = AXES,
) -> Table:
    match = re.fullmatch(r"@([bhqk]*):(\d{1,9})", str(value))
    if not match or match[1] not in axes:
        example = "@h:128" if axes is AXES else f"@{axes[0]}:64"
        raise InvalidProblem(f"expected values such as {example}, got {str(value)[:200]!r}")
    return Table(axes=match[1], typical=int(match[2]), pattern=pattern, kind=kind, block=block)


def _number(value: Any) -> int | Table:
    return _stand_in(value) if isinstance(value, str) else value


def _grid(value: Any) -> tuple[int, ...]:
    sizes = str(value).split("x")
    if not all(map(str.isdecimal, sizes)):
        raise InvalidProblem(f"expected a grid such as 16x16, got {str(value)[:200]}")
    return tuple(map(int, sizes))


ROWS, COLUMNS = (tuple(axes for axes in AXES if axes.endswith(end)) for end in "qk")
"""Axes of values for each row, and for each column."""


def _within(same: Any, mask: Any) -> Mask:
    from tilegen.masks.packed import WITHIN, within  # loads torch

    def holds_documents(part: Mask) -> bool:
        return part.form is WITHIN or any(map(holds_documents, part.parts))

    if _mask(same).form is not SAME_ID or holds_documents(_mask(mask)):
        raise InvalidProblem(
            f"expected within(same_id(...),MASK), got {str(same)[:200]} and {str(mask)[:200]}"
        )
    return within(same, mask)


def _block_sparse(layout: Any, block: Any) -> Mask:
    block = check_number("block", block, low=1)
    blocks = _stand_in(layout, "layout", "bool", block, axes=("", "b", "h", "bh"))
    if blocks.typical > 100:
        raise InvalidProblem(f"expected percent of blocks, got {layout!r}")
    return Mask.of(BLOCK_SPARSE, blocks, block)


def _tree(table: Any, *lengths: Any) -> Mask:
    tokens = _stand_in(table, "tree", "bool", axes=("", "b"))
    if not 1 <= tokens.typical <= MAX_TREE:
        raise InvalidProblem(f"expected a tree of 1..{MAX_TREE} tokens, got {table!r}")
    if len(lengths) > 1:
        raise TypeError
    return Mask.of(TREE, tokens, *(_stand_in(length, axes=("b",)) for length in lengths))


def _keep(text: str, *tables: Any) -> Mask:
    from tilegen.masks.naming import canonical

    captured: list[Table] = []
    for table in tables:
        match = re.fullmatch(rf"(@:\d{{1,9}})({'|'.join(get_args(Kind))})", str(table))
        if not match:
            raise InvalidProblem(f"expected values such as @:50int, got {str(table)[:200]!r}")
        stand_in = _stand_in(match[1], "table", cast("Kind", match[2]))
        captured.append(replace(stand_in, axes=None))
    text = text_of(text, tuple(table.kind for table in captured))
    return canonical(Mask.of(KEEP, text, *captured))


def _comparison(name: str, column: Any) -> Mask:
    from tilegen.masks import comparison  # loads torch

    form = comparison.ORDERED if name == "ordered" else comparison.MATCHED
    return comparison.compared(form, _stand_in(column, "table", axes=("k", "bk")))


CONSTRUCTORS: dict[str, Callable[..., Mask]] = {
    "full": full,
    "causal": causal,
    "window": lambda left, right, *alignment: sliding_window(
        _number(left), _number(right), *alignment
    ),
    "prefix_lm": lambda prefix: prefix_lm(_number(prefix)),
    "global_": lambda tokens: global_tokens(_number(tokens)),
    "kv_prefix": lambda length: kv_prefix(_number(length)),
    "dilated": dilated,
    "neighborhood": lambda grid, window: neighborhood(_grid(grid), _grid(window)),
    "documents": lambda firsts: intervals(_stand_in(firsts, axes=ROWS)),
    "same_id": lambda q, k: Mask.of(
        SAME_ID, _stand_in(q, "ids", axes=ROWS), _stand_in(k, "ids", axes=COLUMNS)
    ),
    "within": _within,
    "tree": _tree,
    "unlisted": lambda mask: Mask.of(UNLISTED, _mask(mask)),
    "block_sparse": _block_sparse,
    "keep": _keep,
    "ordered": lambda column: _comparison("ordered", column),
    "matched": lambda column: _comparison("matched", column),
}
"""The masks that a notation may name, made of what it has in brackets; `global_` is `global`."""
NAMES = tuple(dict.fromkeys(word.written.partition("(")[0] for word in MASKS))
