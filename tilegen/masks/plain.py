"""Plain tensors and numbers among the arguments that callers pass."""

from __future__ import annotations

from typing import Any, cast

from tilegen.errors import Unsupported
from tilegen.masks.made import assume_constant_result


def plain_number(value: Any) -> Any:
    """Return a number of NumPy, or a tensor or array of no dimensions, as Python's number. Other
    values, and tensors that need a gradient, are returned unchanged."""
    if isinstance(value, int | float) or getattr(value, "ndim", None) != 0:
        return value
    return value if getattr(value, "requires_grad", False) else value.item()


def check_plain(**given: Any) -> None:
    """Raise Unsupported, naming the argument, for a nested tensor, or a tensor of a class that
    overrides PyTorch's functions: kernels would read its memory, whatever the class makes of it."""
    import torch

    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            continue
        if x.is_nested:
            raise Unsupported(
                f"{name} must be a dense tensor, got a nested tensor of layout {x.layout}; pass "
                "jagged q, k and v (layout=torch.jagged) to tilegen.attention"
            )
        kind = type(x)
        if kind not in (torch.Tensor, torch.nn.Parameter) and _overrides(kind):
            raise Unsupported(
                f"{name} must be a plain tensor, got {kind.__name__}, whose __torch_function__ "
                "kernels would not call; pass a plain tensor of its elements"
            )


@assume_constant_result
def _overrides(kind: type) -> bool:
    """Check whether a class has a `__torch_function__` of its own."""
    import torch

    from tilegen.private_torch import NO_OVERRIDE

    own, inherited = (cast("Any", one).__torch_function__ for one in (kind, torch.Tensor))
    return own is not NO_OVERRIDE and getattr(own, "__func__", None) is not inherited.__func__
