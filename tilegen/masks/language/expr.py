"""Typed expressions of masks and scores: immutable nodes, of which equal ones are one object.

A node has an operation, a dtype by PyTorch's name, and arguments. Integers of all widths are
widened to 64 bits where they are computed with, and wrap around there; a `cast` makes them narrow
again. float32 stands for the precision of scores in a score. `algebra` makes nodes, and gives them
their operators.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from importlib import import_module
from threading import RLock
from typing import Any
from weakref import WeakValueDictionary

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
WIDEST_KEY = 120

# "natural" are integers that are never negative.
ELEMENT_OF_KIND: dict[str, str] = {
    "bool": "uint8",
    "natural": "int32",
    "int": "int32",
    "int64": "int64",
    "float": "float32",
    "float64": "float64",
    **{name: name for name in ("int8", "uint8", "int16")},
}
"""The dtype of a look-up, by the kind of the tensor's elements; a bool is 0 or 1."""


class Expr:
    """A node of an expression. Compare nodes by `is`; `==` does the same."""

    __slots__ = ("__weakref__", "_free", "args", "dtype", "key", "limits", "op", "value")

    op: str
    dtype: str
    args: tuple[Expr, ...]
    value: Any
    """What else a node is: a number, a symbol's name, an exponent, or a look-up's tensor."""
    key: str
    """A text by which arguments are put in an order that no process changes."""

    def __new__(cls, op: str, dtype: str, args: tuple[Expr, ...] = (), value: Any = None) -> Expr:
        # The texts of 0.0 and -0.0 differ, and the text of NaN equals itself.
        spelt = repr(value) if isinstance(value, float) else value
        identity = (op, dtype, args, type(value), spelt)
        with _lock:
            known = _known.get(identity)
            if known is None:
                known = super().__new__(cls)
                for name, part in zip(("op", "dtype", "args", "value"), identity, strict=False):
                    object.__setattr__(known, name, part)
                object.__setattr__(known, "value", value)
                object.__setattr__(known, "key", _key(op, dtype, args, value))
                object.__setattr__(known, "limits", None)
                object.__setattr__(known, "_free", None)
                _known[identity] = known
        return known

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"expressions do not change, not even their {name}")

    def __reduce__(self) -> Any:
        return Expr, (self.op, self.dtype, self.args, self.value)

    def __copy__(self) -> Expr:
        return self

    def __deepcopy__(self, _: Any) -> Expr:
        return self

    def __str__(self) -> str:
        return SPELLING[0](self) if SPELLING else self.key

    __repr__ = __str__

    def __bool__(self) -> bool:
        raise TypeError(f"an expression is neither true nor false: {self}")

    @property
    def is_condition(self) -> bool:
        """Whether the value is true or false rather than a number."""
        return self.dtype == "bool"

    @property
    def is_int(self) -> bool:
        """Whether the value is an integer, computed as one all the way."""
        return self.dtype in INTEGERS

    @property
    def is_float(self) -> bool:
        """Whether the value is computed in floating point."""
        return self.dtype in FLOATS

    @property
    def is_const(self) -> bool:
        """Whether the node is a number, or true or false."""
        return self.op == "const"

    @property
    def free(self) -> frozenset[Expr]:
        """The symbols that the expression depends on, those in indices among them."""
        if self._free is None:  # type: ignore[has-type]
            own = frozenset((self,) if self.op == "symbol" else ())
            object.__setattr__(self, "_free", own.union(*(arg.free for arg in self.args)))
        free: frozenset[Expr] = self._free  # type: ignore[has-type]
        return free

    def walk(self) -> Iterator[Expr]:
        """Yield every node once, each before its arguments."""
        seen: set[Expr] = set()
        stack: list[Expr] = [self]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                yield node
                stack.extend(reversed(node.args))

    def levels(self) -> int:
        """Return how many nodes the longest path from here has, without recursion."""
        known: dict[Expr, int] = {}
        stack: list[Expr] = [self]
        while stack:
            node = stack[-1]
            missing = [arg for arg in node.args if arg not in known]
            stack.extend(missing)
            if not missing:
                known[stack.pop()] = 1 + max((known[arg] for arg in node.args), default=0)
        return known[self]

    def loads(self) -> list[Expr]:
        """Return the look-ups of captured tensors, those in indices among them, in one order."""
        return sorted((node for node in self.walk() if node.op == "load"), key=lambda one: one.key)

    def has(self, *parts: Expr) -> bool:
        """Return whether any of some nodes is a part of the expression."""
        if all(part.op == "symbol" for part in parts):
            return not self.free.isdisjoint(parts)
        return any(node in parts for node in self.walk())

    # Operators: masks and tests write their conditions with them.

    def __add__(self, other: Any) -> Expr:
        return OPERATORS["add"](self, other)

    def __radd__(self, other: Any) -> Expr:
        return OPERATORS["add"](other, self)

    def __sub__(self, other: Any) -> Expr:
        return OPERATORS["sub"](self, other)

    def __rsub__(self, other: Any) -> Expr:
        return OPERATORS["sub"](other, self)

    def __mul__(self, other: Any) -> Expr:
        return OPERATORS["mul"](self, other)

    def __rmul__(self, other: Any) -> Expr:
        return OPERATORS["mul"](other, self)

    def __truediv__(self, other: Any) -> Expr:
        return OPERATORS["truediv"](self, other)

    def __rtruediv__(self, other: Any) -> Expr:
        return OPERATORS["truediv"](other, self)

    def __floordiv__(self, other: Any) -> Expr:
        return OPERATORS["floordiv"](self, other)

    def __mod__(self, other: Any) -> Expr:
        return OPERATORS["mod"](self, other)

    def __pow__(self, other: Any) -> Expr:
        return OPERATORS["pow"](self, other)

    def __neg__(self) -> Expr:
        return OPERATORS["neg"](self)

    def __abs__(self) -> Expr:
        return OPERATORS["abs"](self)

    def __lt__(self, other: Any) -> Expr:
        return OPERATORS["lt"](self, other)

    def __le__(self, other: Any) -> Expr:
        return OPERATORS["le"](self, other)

    def __gt__(self, other: Any) -> Expr:
        return OPERATORS["lt"](other, self)

    def __ge__(self, other: Any) -> Expr:
        return OPERATORS["le"](other, self)

    def __and__(self, other: Any) -> Expr:
        return OPERATORS["and"](self, other)

    def __rand__(self, other: Any) -> Expr:
        return OPERATORS["and"](other, self)

    def __or__(self, other: Any) -> Expr:
        return OPERATORS["or"](self, other)

    def __ror__(self, other: Any) -> Expr:
        return OPERATORS["or"](other, self)

    def __invert__(self) -> Expr:
        return OPERATORS["invert"](self)


class _Operators(dict[str, Callable[..., "Expr"]]):
    def __missing__(self, name: str) -> Callable[..., Expr]:
        import_module("tilegen.masks.language.rewriting")  # loads the modules that fill it
        return self[name]


OPERATORS: dict[str, Callable[..., Expr]] = _Operators()
"""The functions behind the operators, by Python's names of these. `algebra`, `remainders` and
`functions` fill it."""
SPELLING: list[Callable[[Expr], str]] = []
"""The function that writes an expression as text. `texts` fills it."""
_known: WeakValueDictionary[Any, Expr] = WeakValueDictionary()
_lock = RLock()  # reentrant: garbage may be collected while it is held


def _key(op: str, dtype: str, args: tuple[Expr, ...], value: Any) -> str:
    if op == "symbol":
        return str(value)
    if op == "const":
        return f"{value!r}"
    own = "" if value is None else f"{value}"
    text = f"{op}{own}({','.join(arg.key for arg in args)}){dtype if op == 'cast' else ''}"
    if len(text) <= WIDEST_KEY:
        return text
    return f"{text[: WIDEST_KEY // 2]}{hashlib.sha1(text.encode()).hexdigest()}"


def _symbol(name: str, dtype: str = "int64") -> Expr:
    return Expr("symbol", dtype, (), name)


B, H, Q, K = map(_symbol, "bhqk")
"""Batch, query head, query row, key-value column."""
SEQLEN_Q, SEQLEN_KV = _symbol("seqlen_q"), _symbol("seqlen_kv")
PAIR = (B, H, Q, K, SEQLEN_Q, SEQLEN_KV)
"""The symbols that a mask may depend on: a pair's indices and the lengths of its sequences."""
FIRST, LAST = _symbol("first"), _symbol("last")
"""First and last index of a stationary tile."""
S = _symbol("s", "float32")
"""A score after scaling, which a score change starts from."""
SYMBOLS = {str(symbol.value): symbol for symbol in (*PAIR, S)}
"""The symbols of masks and scores by name."""


def const(value: Any, dtype: str | None = None) -> Expr:
    """Return a number, or true or false. A float32 keeps the digits that it was written with."""
    if dtype is None:
        is_bool, is_int = isinstance(value, bool), isinstance(value, int)
        dtype = "bool" if is_bool else "int64" if is_int else "float32"
    if dtype == "int64":
        value = (int(value) + 2**63) % 2**64 - 2**63
    return Expr("const", dtype, (), value)


TRUE, FALSE, ZERO, ONE = const(True), const(False), const(0), const(1)


def order(expr: Expr) -> tuple[bool, str]:
    """Return a key that sorts expressions the same in every process, numbers last."""
    return expr.is_const, expr.key


def slot_of(lookup: Expr) -> int:
    """Return the slot of the captured tensor that a look-up reads, but for its indices."""
    slot: int = lookup.value[0]
    return slot


def captured_slots(expr: Expr) -> list[int]:
    """Return the slots of the captured tensors an expression reads, in order."""
    return sorted({slot_of(one) for one in expr.walk() if one.op == "load"})
