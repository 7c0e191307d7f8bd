"""The part of a call that crosses into an operator: a text that says how mask and score are made,
and the tensors that they are made of. torch.compile traces this module."""

from __future__ import annotations

from typing import Any

import torch

from tilegen.errors import InvalidProblem
from tilegen.masks.kinds import check_mask
from tilegen.masks.made import Chain, InDocuments
from tilegen.masks.mask import TYPICAL, Mask, Not, values_of
from tilegen.masks.score import Score, check_function


class Crossing:
    """The text and the tensors of a call's mask, score and lengths.

    The text is JSON: `{"mask": ["&", ["plain", "causal", []], ["ids", 0, false]]}`, where
    numbers of tensors are their places in the list. "trained" has the places of tensors that a
    score gives gradients to.
    """

    def __init__(self) -> None:
        """`trained` holds the places of a score's tensors that need gradients, even gradients of
        0."""
        self.text = ""
        self.tensors: list[torch.Tensor] = []
        self.trained: list[int] = []

    def place(self, tensor: torch.Tensor) -> int:
        """Return the place of a tensor in the list."""
        for i, one in enumerate(self.tensors):
            if one is tensor:
                return i
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def fill(self, tensor: torch.Tensor) -> None:
        """Place a tensor that nobody reads where a program is exported with none: AOTInductor makes
        None of an empty list."""
        if torch.compiler.is_exporting() and not self.tensors:
            self.place(tensor)

    def places(self, tensors: Any) -> str:
        """Return the places of tensors, as JSON."""
        return "[" + ",".join([str(self.place(one)) for one in tensors]) + "]"

    def trained_places(self, tensors: Any) -> str:
        """Return the places of a score's tensors, as JSON, and note which get gradients."""
        for one in tensors:
            if one.requires_grad and self.place(one) not in self.trained:
                self.trained.append(self.place(one))
        return self.places(tensors)


def crossing(mask: Any, score: Any, kv_lengths: torch.Tensor | None) -> Crossing:
    """Return the text and the tensors of a call. Raises InvalidProblem and Unsupported."""
    found = Crossing()
    parts: list[str] = []
    if mask is not None:
        parts.append('"mask":' + _mask(mask, found))
    if score is not None:
        parts.append('"score":' + _score(score, found))
    if kv_lengths is not None:
        parts.append('"lengths":' + str(found.place(kv_lengths)))
    if found.trained and torch.is_grad_enabled():
        parts.append('"trained":[' + ",".join([str(place) for place in found.trained]) + "]")
    found.text = "{" + ",".join(parts) + "}"
    return found


def _mask(mask: Any, found: Crossing) -> str:
    check_mask(mask)
    made = getattr(mask, "_made", None)
    if made is None:
        if isinstance(mask, Not):
            return f'["~",{_mask(mask.part, found)}]'
        return _plain(mask, found)
    how = made[0]
    if how == "function":
        _, function, text, captured = made
        if text:  # as it was traced outside
            return f'["keep","{text}",{found.places(captured)}]'
        from tilegen.masks.tracing.compiled import trace

        its = trace(function, is_score=False)
        return f'["keep","{its.text}",{found.places(its.captured)}]'
    if how == "ids":
        return f'["ids",{found.place(made[1])},{"true" if made[2] else "false"}]'
    if how == "packed":
        _, cu_q, cu_kv, inner = made
        return f'["packed",{found.place(cu_q)},{found.place(cu_kv)},{_mask(inner, found)}]'
    if how == "tree":
        lengths = "null" if made[2] is None else str(found.place(made[2]))
        return f'["tree",{found.place(made[1])},{lengths}]'
    if how == "blocks":
        _, tensors, sides, inner = made
        sizes = f"[{int(sides[0])},{int(sides[1])}]"
        return f'["blocks",{found.places(tensors)},{sizes},{_mask(inner, found)}]'
    return f'["{how}",' + ",".join([_mask(one, found) for one in made[1]]) + "]"


def _plain(mask: Mask, found: Crossing) -> str:
    """Return a mask whose notation says all but its tensors."""
    tensors = [one.tensor for one, _ in values_of(mask)]
    for one in tensors:
        if one is None:
            raise InvalidProblem(f"expected a mask with its tensors, got {mask.notation}")
    # Typical numbers, which depend on elements, are for the other side to find.
    notation = mask.notation if not tensors else mask.described(typical=TYPICAL).notation
    return f'["plain","{notation}",{found.places(tensors)}]'


def _score(score: Any, found: Crossing) -> str:
    if isinstance(score, Chain):
        return '["then",' + ",".join([_score(one, found) for one in score.parts]) + "]"
    if isinstance(score, InDocuments):
        return f'["within",{_score(score.score, found)},{found.places(score.cu_seqlens)}]'
    if isinstance(score, Score):
        made = getattr(score, "_made", None)
        if made is not None and made[0] != "function":
            return _score(made[1], found)
        if made is not None and score.derived:  # made again by the function alone
            return _function(made[1], found)
        found.trained_places(score.unused)
        return _spelt(score.text, score.captured, score.sizes, score.sink_logits, found)
    check_function(score)
    return _function(score, found)


def _function(function: Any, found: Crossing) -> str:
    from tilegen.masks.tracing.compiled import trace

    its = trace(function, is_score=True)
    found.trained_places(its.unused)
    return _spelt(its.text, its.captured, (), None, found)


def _spelt(text: str, captured: Any, sizes: Any, sinks: Any, found: Crossing) -> str:
    shown = ",".join([f'[{int(slot)},"{axes}"]' for slot, axes in sizes])
    of_sinks = "null" if sinks is None else found.trained_places([sinks])[1:-1]
    return f'["score","{text}",{found.trained_places(captured)},[{shown}],{of_sinks}]'
