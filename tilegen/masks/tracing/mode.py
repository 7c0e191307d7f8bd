"""The function mode under which a function of a mask or a score is called.

The function is called once, with tensors without elements. The mode intercepts each operation on
them, and passes it, as constants, to a `Tracer`, which builds the expressions. torch.compile traces
this module with the function: it guards the values that the function reads, and the tensors that
the function captures or makes are those of its graph. The tracer stays outside of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from operator import index
from threading import RLock
from typing import Any

import numpy as np
import torch
from cachetools import LRUCache
from torch.overrides import TorchFunctionMode

from tilegen import private_torch
from tilegen.errors import TilegenError, Unsupported
from tilegen.masks.made import assume_constant_result, is_traced
from tilegen.masks.plain import check_plain
from tilegen.masks.tracing.derived import Derived
from tilegen.masks.tracing.reads import looked
from tilegen.masks.tracing.stand_ins import MAX_ELEMENTS, CapturedTable
from tilegen.masks.tracing.tracer import Tracer, refusal

MAX_SESSIONS = 64
"""Traces under way at once, in all threads."""
LARGE = 2 * MAX_ELEMENTS
"""Size that stands for a dimension that torch.compile must not guard."""
_METADATA = frozenset(
    "dim size numel stride element_size is_floating_point is_complex is_contiguous "  # noqa: SIM905
    "get_device data_ptr storage_offset is_inference __hash__ __get__ __len__".split()
)
"""Methods that read no element."""
_NUMBERS = ((int, torch.SymInt, torch.int64), (float, torch.SymFloat, torch.float64))
"""Kinds of numbers, the variables that torch.compile makes of them, and what holds their values."""
_DRAWS = ("rand", "normal_", "bernoulli_", "multinomial_", "poisson_", "uniform_")
"""Prefixes of the names of functions that draw random numbers; `_` is appended to each name."""


class Mode(TorchFunctionMode):
    """A function's side of a trace. Values are tensors without elements, known by identity, which
    the tracer knows by number."""

    def __init__(self, number: int, *, is_score: bool, keeps_sizes: bool = False) -> None:
        """`number` is that of the trace, which begins with the function's arguments. With
        `keeps_sizes` sizes that torch.compile made variables of stay variables."""
        super().__init__()
        self.number = number
        self.keeps_sizes = keeps_sizes
        self.values: list[torch.Tensor] = []
        self.captured: list[torch.Tensor] = []
        """The tensors that the function reads, by their slot in the tracer."""
        self.derived = Derived()
        self.is_traced = is_traced()
        for i in range(4 + is_score):
            self.value((i, torch.float32 if is_score and i == 0 else torch.int64, ()))

    def value(self, answer: Any) -> Any:
        """Return the tensor of a result of the tracer: a value, or several. Raises the error
        that the tracer returned."""
        if isinstance(answer, str):
            raise Unsupported(answer)
        if isinstance(answer, list):
            return tuple([self.value(one) for one in answer])
        number, dtype, shape = answer
        if number == len(self.values):
            self.values.append(torch.empty((), dtype=dtype, device="meta").expand(shape))
        return self.values[number]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if not self._has_value(args) and not self._has_value(tuple(named.values())):
            return self._made(func, args, named)
        name = func.__name__
        if name == "__get__":
            return self._attribute(func, args)
        is_metadata = name in _METADATA or name in ("__repr__", "__format__")
        if is_metadata and (name != "__len__" or args[0].ndim):
            return func(*args, **named)
        given = 0
        if name == "__getitem__":
            given = len(args[1]) if isinstance(args[1], tuple) else 1
        told = [self.told(one, 0 if i else given) for i, one in enumerate(args)]
        options = [(key, self.told(one)) for key, one in named.items()]
        return self.value(_applied(self.number, func, tuple(told), tuple(options)))

    def _made(self, func: Any, args: Any, named: Any) -> Any:
        """Run an operation on tensors with elements, and record it outside of a graph."""
        if named.get("device") == torch.device("meta"):  # a value's
            named = {**named, "device": "cpu"}
        if self.is_traced:
            return func(*args, **named)
        result = self.derived.call(func, args, named, self.captured)
        name = func.__name__
        if f"{name}_".startswith(_DRAWS) or (name not in _METADATA and _holds_numbers(result)):
            looked()
        return result

    def _attribute(self, func: Any, args: Any) -> Any:
        result = func(*args)
        if isinstance(result, torch.device):
            return torch.device("cpu")  # a value is nowhere yet
        if isinstance(result, torch.Tensor):
            raise Unsupported(
                f"expected a function without .{func.__self__.__name__} of traced values; "
                "write it with torch's functions"
            )
        return result

    def told(self, value: Any, indices: int = 0) -> Any:
        """Convert a value for the tracer. A tensor comes with the sizes of the dimensions left
        after so many indices, if those have few elements: the function may compute with them."""
        if isinstance(value, torch.Tensor):
            number = _place(self.values, value)
            if number is not None:
                return ("value", number)
            if value.is_meta and self.is_traced:  # made of values by what the mode was not told of
                raise Unsupported(
                    "expected operations that torch.compile shows the tracer, which it does not "
                    "the builtin abs, unpacked rows, or attributes such as .T and .data: write "
                    "torch.abs(x) and row[0], or make the mask or the score outside of the "
                    "compiled function"
                )
            slot = _place(self.captured, value)
            if slot is None:
                check_plain(**{"a tensor that a function reads": value})
                slot = len(self.captured)
                self.captured.append(value)
            return ("table", slot, value.dtype, self._sizes(value, indices))
        if isinstance(value, tuple):
            return ("tuple", tuple([self.told(one) for one in value]))
        if isinstance(value, list):
            return ("list", tuple([self.told(one) for one in value]))
        if isinstance(value, slice):
            return ("slice", self.told((value.start, value.stop, value.step))[1])
        if isinstance(value, np.generic):
            return ("constant", value.item())
        if isinstance(value, bool):
            return ("constant", value)
        # torch.compile may have made variables of sizes, and of numbers made of these.
        for number, symbolic, dtype in _NUMBERS:
            if isinstance(value, (number, symbolic)) and self.keeps_sizes and not _is_fixed(value):
                given: Any = value
                self.captured.append(torch.full((), given, dtype=dtype))
                return ("number", len(self.captured) - 1, dtype)
        if isinstance(value, (int, torch.SymInt)):
            value = index(value)
        elif isinstance(value, float):
            value = value.__float__()
        return ("constant", value)

    def _sizes(self, tensor: torch.Tensor, indices: int) -> tuple[int, ...]:
        if not self.is_traced:
            return tuple(tensor.shape)
        sizes = tensor.shape[indices:]
        few: list[int] = []  # guarded as they are
        if len(sizes) and sizes.numel() <= MAX_ELEMENTS:
            few = [int(size) for size in sizes]
        return tuple([LARGE] * (tensor.ndim - len(few)) + few)

    def _has_value(self, given: Any) -> bool:
        for argument in given:
            if isinstance(argument, torch.Tensor):
                if _place(self.values, argument) is not None:
                    return True
            elif isinstance(argument, (tuple, list)):
                if self._has_value(argument):
                    return True
            elif isinstance(argument, slice) and self._has_value(
                (argument.start, argument.stop, argument.step)
            ):
                return True
        return False


def _is_fixed(value: Any) -> bool:
    """Check whether torch.compile knows a number, which is not made of a size that varies."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(value)


def call(
    fn: Callable[..., Any], *, is_score: bool, keeps_sizes: bool = False
) -> tuple[int, Mode, Any]:
    """Call a function under a mode. Return the number of the trace, the mode, and the result in
    the tracer's form. Raises Unsupported."""
    number = _started(is_score)
    mode = Mode(number, is_score=is_score, keeps_sizes=keeps_sizes)
    arguments = list(mode.values)
    with mode:
        try:
            result = fn(*arguments)
        except TypeError as error:
            # PyTorch's own loops ask for the dimensions alone, of which the mode tells the truth.
            if "iteration over a 0-d tensor" not in str(error):
                raise
            raise refusal("__iter__", "a number") from None
    return number, mode, mode.told(result)


def _holds_numbers(value: Any) -> bool:
    """Check whether the result of a function gives Python the elements of a tensor."""
    if isinstance(value, (tuple, list)):
        return any(map(_holds_numbers, value))
    return value is not None and not isinstance(value, torch.Tensor)


def _place(tensors: list[torch.Tensor], tensor: torch.Tensor) -> int | None:
    for i, given_tensor in enumerate(tensors):
        if given_tensor is tensor:
            return i
    return None


# --------------------------------------------------------------------------------------------------
# The tracer's side, which torch.compile calls while it traces. Arguments and results are constants.

_tracers: LRUCache[int, Tracer] = LRUCache(MAX_SESSIONS)
_numbers = count()
_lock = RLock()


@assume_constant_result
def _started(is_score: bool) -> int:
    """Return the number of a new trace, whose first values are the function's arguments."""
    _allow_mode()
    number = next(_numbers)
    with _lock:
        _tracers[number] = Tracer(is_score=is_score)
    return number


def _allow_mode() -> None:
    """Have torch.compile allow that a mode is entered, inside of a checkpoint too.

    There it refuses all effects on what is outside. Entering and leaving a mode have none in the
    end, and a mode noted earlier in the graph is allowed. PyTorch documents no way to say so.
    """
    dynamo = private_torch.dynamo()
    try:
        traced = dynamo.symbolic_convert.InstructionTranslator.current_tx()
        tracer, stack = traced.output.current_tracer, dynamo.variables.torch_function
        before, tracer.allow_side_effects_in_hop = tracer.allow_side_effects_in_hop, True
    except AttributeError:  # nothing is traced, or by a torch without this check
        return
    try:
        stack.TorchFunctionModeStackVariable.register_mutation(traced)
    finally:
        tracer.allow_side_effects_in_hop = before


@assume_constant_result
def _applied(number: int, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return number, dtype and shape of the result of an operation, a list of several results,
    or the reason for an error."""
    try:
        with _lock:
            tracer = _tracers[number]
            named = {key: actual(tracer, value) for key, value in kwargs}
            result = tracer.apply(function, [actual(tracer, one) for one in args], named)
    except TilegenError as error:
        return str(error)
    answers: list[Any] = []
    for value in result if isinstance(result, tuple) else (result,):
        known = [i for i, one in enumerate(tracer.values) if one is value]
        if not known:
            tracer.values.append(value)
        place = known[0] if known else len(tracer.values) - 1
        answers.append((place, value.dtype, tuple(value.shape)))
    return answers if isinstance(result, tuple) else answers[0]


def finished(number: int) -> Tracer:
    """Remove and return the tracer of a trace."""
    with _lock:
        return _tracers.pop(number)


def actual(tracer: Tracer, told: Any) -> Any:
    """Convert a value to the tracer's form."""
    match told:
        case "value", number:
            return tracer.values[number]
        case "table", slot, dtype, sizes:
            return CapturedTable(slot, dtype, sizes)
        case "number", slot, dtype:
            return CapturedTable(slot, dtype, (), is_number=True)
        case ("tuple" | "list" | "slice") as kind, parts:
            made = [actual(tracer, part) for part in parts]
            return slice(*made) if kind == "slice" else tuple(made) if kind == "tuple" else made
        case _:
            return told[1]
