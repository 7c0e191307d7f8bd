"""Errors for derivatives that kernels do not compute."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from tilegen.errors import Unsupported


def refuse_second() -> NoReturn:
    """Raise Unsupported."""
    raise Unsupported(
        "attention has first derivatives only; for second derivatives call "
        "torch.nn.functional.scaled_dot_product_attention"
    )


def refuse_tangents(*tensors: Any) -> None:
    """Raise Unsupported if a tensor has a tangent, which kernels would ignore.

    Raises it for any call that torch.compile traces inside of forward mode: the tensors of its
    graph show no tangents, and its operators drop them.
    """
    level: int = forward_ad._current_level  # pyright: ignore[reportPrivateUsage]
    if level < 0:  # outside of forward mode; torch.compile traces again where this changes
        return
    if is_dynamo_compiling():
        refuse_forward_mode()
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and _has_tangent(tensor):
            refuse_forward_mode()


def _has_tangent(tensor: torch.Tensor) -> bool:
    try:
        return forward_ad.unpack_dual(tensor).tangent is not None
    except RuntimeError:  # PyTorch unpacks no tensor inside of an operator that a mode dispatches
        return False


def refuse_forward_mode() -> NoReturn:
    """Raise Unsupported."""
    raise Unsupported(
        "attention has no forward-mode derivatives; use reverse mode (torch.autograd.grad), or "
        "PyTorch's own attention"
    )
