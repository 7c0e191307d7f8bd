"""The names of PyTorch that its documentation lacks, all of which tilegen's other modules take from
here. Operators of `torch.ops` are no such names: their schemas are versioned."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

if TYPE_CHECKING:
    Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
    """Returns a tensor of a size, strides and dtype."""

__all__ = ["TorchDispatchMode"]

count_modes = torch._C._len_torch_dispatch_stack
"""Returns the number of dispatch modes. There is no public query."""
transform: Any = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]
"""Returns the transform of torch.func that runs the caller, or None. There is no public query."""
without_modes: Any = _disable_current_modes
"""A context without dispatch modes: torch.export would record what is computed in it."""
without_overrides: Any = torch._C.DisableTorchFunction
"""A context without `__torch_function__`, that of modes included."""
NO_OVERRIDE: Any = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of classes that have none, such as DTensor."""
Function: Any = getattr(torch.autograd.function, "_SingleLevelFunction", torch.autograd.Function)
"""`Function` without its support for transforms of torch.func, whose tensors have no addresses and
never get to it. It takes a quarter less time."""


def empty_on(device: str) -> Empty:
    """Return the function by which PyTorch's compiled code allocates on the CPU or the current GPU,
    in half the time of `torch.empty_strided`, which replaces it if it is missing."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    function: Any = getattr(guards, f"_empty_strided_{device}", None)
    if function is not None:
        return function
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def largest_block() -> int:
    """Return the size of blocks by which FlexAttention marks a mask of one block."""
    from torch.nn.attention.flex_attention import _LARGE_SPARSE_BLOCK_SIZE

    return _LARGE_SPARSE_BLOCK_SIZE


def dynamo() -> Any:
    """Return torch._dynamo; None if nothing has loaded it, which takes more than a second."""
    return getattr(torch, "_dynamo", None)
