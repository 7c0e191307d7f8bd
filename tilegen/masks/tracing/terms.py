"""Values that remember how they were computed; traced functions are called with them.

They stand for tensors: of no dimension (`Term`), or of a few small ones (`Rows`, `Several`), which
may be reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import sympy
import torch

from tilegen.errors import Unsupported
from tilegen.masks.language.operations import condition, number

MAX_ELEMENTS = 256
"""Most elements of a row that a function computes with: each is a look-up of its own."""
Elements = np.ndarray[Any, np.dtype[np.object_]]


def _operator(name: str, *, reflected: bool = False) -> Callable[..., Any]:
    def apply(self: Value, *args: Any) -> Any:
        if any(isinstance(arg, (str, list, tuple, dict)) for arg in args):
            return NotImplemented
        return self.tracer.apply(name, [*args, self] if reflected else [self, *args], {})

    return apply


def _operators(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return an operator of two values, for the left one and for the right one."""
    return _operator(name), _operator(name, reflected=True)


class Value:
    """A traced value: Python's operators and torch's functions on it are told to its tracer."""

    __array_ufunc__ = None  # numpy's numbers leave arithmetic to this class
    __hash__ = object.__hash__
    tracer: Any
    """The `trace.Tracer` that is told of every operation."""
    shape: torch.Size
    dtype: torch.dtype
    """The dtype of the tensor that PyTorch has here."""

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def size(self) -> torch.Size:
        """Return the shape."""
        return self.shape

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        tracer = next(one.tracer for one in leaves((args, kwargs)) if isinstance(one, Value))
        return tracer.apply(func.__name__, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name == "where":  # `x.where(condition, y)` is torch.where(condition, x, y)
            return lambda condition, other: self.tracer.apply(name, [condition, self, other], {})
        return lambda *args, **kwargs: self.tracer.apply(name, [self, *args], kwargs)

    def __bool__(self) -> bool:
        raise Unsupported("expected a function without if, and, or, not on traced values")

    __add__, __radd__ = _operators("add")
    __sub__, __rsub__ = _operators("sub")
    __mul__, __rmul__ = _operators("mul")
    __truediv__, __rtruediv__ = _operators("truediv")
    __floordiv__, __rfloordiv__ = _operators("floordiv")
    __mod__, __rmod__ = _operators("mod")
    __pow__, __rpow__ = _operators("pow")
    __and__, __rand__ = _operators("and")
    __or__, __ror__ = _operators("or")
    __xor__, __rxor__ = _operators("xor")
    __lt__, __le__ = _operator("lt"), _operator("le")
    __gt__, __ge__ = _operator("gt"), _operator("ge")
    __eq__, __ne__ = _operator("eq"), _operator("ne")
    __neg__, __pos__ = _operator("neg"), _operator("pos")
    __abs__, __invert__ = _operator("abs"), _operator("invert")
    __lshift__, __rlshift__ = _operators("lshift")
    __rshift__, __rrshift__ = _operators("rshift")
    __matmul__, __rmatmul__ = _operators("matmul")


def _refusal(what: str, function: str) -> Callable[..., NoReturn]:
    def refuse(self: Term) -> NoReturn:
        raise Unsupported(
            f"expected a function without {what} traced values, got {function}({self.expr}); "
            "write torch.where, &, |, ~, torch.minimum, torch.maximum, .to(dtype)"
        )

    return refuse


class Term(Value):
    """A value that remembers how it was computed; stands for a 0-dimensional tensor."""

    def __init__(self, tracer: Any, expr: Any, dtype: torch.dtype) -> None:
        """Operations on the value collect tensors in `tracer`."""
        self.tracer = tracer
        self.expr = expr
        self.dtype = dtype

    def __repr__(self) -> str:
        return str(self.expr)

    @property
    def device(self) -> torch.device:
        """The CPU: a traced value is nowhere yet."""
        return torch.device("cpu")

    shape = torch.Size()

    __iadd__, __isub__, __imul__ = _operator("add_"), _operator("sub_"), _operator("mul_")
    __itruediv__, __ifloordiv__ = _operator("truediv_"), _operator("floordiv_")
    __imod__, __ipow__ = _operator("mod_"), _operator("pow_")
    __iand__, __ior__, __ixor__ = _operator("and_"), _operator("or_"), _operator("xor_")
    __ilshift__, __irshift__ = _operator("lshift_"), _operator("rshift_")

    def __getitem__(self, index: Any) -> Any:
        return self.tracer.apply("getitem", [self, index], {})

    __bool__ = _refusal("if, and, or, not, min(), max() or chained comparisons on", "bool")
    __index__ = _refusal("range(), list indices or int() of", "int")
    __int__ = _refusal("int() of", "int")
    __float__ = _refusal("float() or math functions of", "float")
    __iter__ = _refusal("loops over", "iter")
    __len__ = _refusal("len() of", "len")


class Rows(Value):
    """A real tensor with some of its indices given: `bias[h]` before `[q_idx - kv_idx]`, or a few
    elements to compute with: `(table[q_idx] == kv_idx).any(-1)`."""

    def __init__(self, tracer: Any, tensor: torch.Tensor, index: tuple[Any, ...]) -> None:
        """`index` holds the expressions given so far."""
        self.tracer = tracer
        self._tensor = tensor
        self._index = index
        self.shape = tensor.shape[len(index) :]
        self.dtype = tensor.dtype

    @property
    def elements(self) -> Elements:
        """The elements, each an expression. Raises Unsupported where there are many."""
        sizes = self._tensor.shape[len(self._index) :]
        if sizes.numel() > MAX_ELEMENTS:
            self.incomplete()
        found = np.empty(sizes, dtype=object)
        for place in np.ndindex(*sizes):
            index = (*self._index, *map(sympy.Integer, place))
            found[place] = self.tracer.element(self._tensor, index)
        return found

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        given = (Term(self.tracer, part, torch.int64) for part in self._index)
        if any(part is None or part is Ellipsis or isinstance(part, slice) for part in parts):
            return Several(self.tracer, self.elements, self.dtype)[index]
        return self.tracer.index(self._tensor, (*given, *parts))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(Several(self.tracer, self.elements, self.dtype), name)

    def __iter__(self) -> Iterator[Any]:
        return iter(Several(self.tracer, self.elements, self.dtype))

    def incomplete(self) -> NoReturn:
        """Raise Unsupported: too many rows to compute with."""
        raise Unsupported(
            f"expected {self._tensor.ndim} indices of a tensor of shape "
            f"{tuple(self._tensor.shape)}, or at most {MAX_ELEMENTS} elements left, got "
            f"{len(self._index)}: {self._index}"
        )


class Several(Value):
    """A small tensor of traced values."""

    def __init__(self, tracer: Any, elements: Elements, dtype: torch.dtype) -> None:
        """`elements` holds an expression for each."""
        self.tracer = tracer
        self.elements = elements
        self.dtype = dtype
        self.shape = torch.Size(elements.shape)

    def __getitem__(self, index: Any) -> Any:
        return self.tracer.several(self.elements[index], self.dtype)


def leaves(value: Any) -> Iterator[Any]:
    """Yield what tuples, lists and dicts hold, however deep."""
    match value:
        case tuple() | list():
            for one in value:
                yield from leaves(one)
        case dict():
            yield from leaves(list(value.values()))
        case _:
            yield value


REDUCTIONS: dict[str, Callable[[list[Any]], Any]] = {
    "any": lambda parts: sympy.Or(*(condition(part, "any") for part in parts)),
    "all": lambda parts: sympy.And(*(condition(part, "all") for part in parts)),
    "sum": lambda parts: sympy.Add(*map(number, parts)),
    "prod": lambda parts: sympy.Mul(*map(number, parts)),
    "mean": lambda parts: sympy.Add(*map(number, parts)) / max(1, len(parts)),
    "amax": lambda parts: sympy.Max(*map(number, parts)),
    "amin": lambda parts: sympy.Min(*map(number, parts)),
}
"""PyTorch's reductions by name, of the elements along a dimension."""

RESHAPES: dict[str, Callable[..., Any]] = {
    "unsqueeze": lambda values, dim: np.expand_dims(values, dim),
    "squeeze": lambda values, dim=None: np.squeeze(values, dim),
    "flatten": lambda values: values.reshape(-1),
}


def reduced(name: str, values: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """Return a reduction along one dimension, several, or all. Raises Unsupported."""
    every = tuple(range(values.ndim))
    chosen = every if dim is None else dim if isinstance(dim, tuple | list) else (dim,)
    axes = {axis % max(1, values.ndim) for axis in chosen}
    if not axes <= set(every):
        raise Unsupported(f"expected dimensions of {values.shape} in {name}, got {dim}")
    kept = [axis for axis in every if axis not in axes]
    moved = np.moveaxis(values, kept, range(len(kept)))
    flat = moved.reshape(*(values.shape[axis] for axis in kept), -1)
    found = np.empty(flat.shape[:-1], dtype=object)
    for place in np.ndindex(found.shape):
        found[place] = REDUCTIONS[name](list(flat[place]))
    return np.expand_dims(found, tuple(sorted(axes))) if keepdim else found
