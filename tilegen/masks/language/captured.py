"""Captured tensors of expressions: their kinds, and the slots in which expressions name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilegen.errors import InvalidProblem
from tilegen.masks.language.elements import kind_of
from tilegen.masks.language.expr import B, Expr, H, K, Q, captured_slots, slot_of
from tilegen.masks.language.rewriting import renamed

if TYPE_CHECKING:
    import torch


def free_parts(expr: Expr) -> frozenset[str]:
    """Return which of b, h, q and k an expression depends on."""
    return frozenset(str(symbol.value) for symbol in expr.free & {B, H, Q, K})


def kind_of_tensor(tensor: torch.Tensor) -> str:
    """Return the kind of a tensor's elements. Raises InvalidProblem."""
    if tensor.dtype.is_complex:
        raise InvalidProblem(f"expected captured tensors of real numbers, got {tensor.dtype}")
    return kind_of(str(tensor.dtype).removeprefix("torch."))


def rename(expr: Expr, slots: Sequence[int]) -> Expr:
    """Return the expression with captured tensor i in slot slots[i]."""
    loads = (node for node in expr.walk() if node.op == "load")
    return renamed(expr, {slot_of(one): (slots[slot_of(one)], one.value[1]) for one in loads})


def without(
    tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return the tensors without repetitions."""
    known = {id(one) for one in others}
    return tuple({id(one): one for one in tensors if id(one) not in known}.values())


def merge(
    parts: Sequence[tuple[Expr, Sequence[torch.Tensor]]],
) -> tuple[list[Expr], tuple[torch.Tensor, ...]]:
    """Return expressions over one tuple of captured tensors: the same tensor has one slot, unread
    ones none."""
    merged: list[torch.Tensor] = []
    moved: list[Expr] = []
    for expr, captured in parts:
        slots = [-1] * len(captured)
        for slot in captured_slots(expr):
            same = [i for i, tensor in enumerate(merged) if tensor is captured[slot]]
            slots[slot] = same[0] if same else len(merged)
            if not same:
                merged.append(captured[slot])
        moved.append(rename(expr, slots))
    return moved, tuple(merged)
