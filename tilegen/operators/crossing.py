"""Encode mask, score and lengths of a call as arguments of an operator: a text and a list of
tensors. `rebuilding` decodes them. torch.compile traces this module."""

from __future__ import annotations

from typing import Any

import torch

from tilegen.errors import InvalidProblem
from tilegen.masks.kinds import check_mask
from tilegen.masks.made import Chain, InDocuments, OfFunction
from tilegen.masks.mask import NOT, TYPICAL, Mask, tables_of
from tilegen.masks.plain import check_plain
from tilegen.masks.score import Score, check_function


class Crossing:
    """The text and the tensors that encode a call's mask, score and lengths.

    The text is JSON, such as `{"mask": ["&", ["plain", "causal", []], ["ids", 0, false]]}`, and
    refers to tensors by their index in the list. "trained" lists the indices of the tensors of a
    score that need gradients.
    """

    def __init__(self) -> None:
        """`trained` holds the indices of the tensors of a score that need gradients, including
        tensors whose gradients are 0."""
        self.text = ""
        self.tensors: list[torch.Tensor] = []
        self.trained: list[int] = []

    def place(self, tensor: torch.Tensor) -> int:
        """Return the index of a tensor in the list, adding the tensor if it is new."""
        for i, known in enumerate(self.tensors):
            if known is tensor:
                return i
        check_plain(**{"a tensor of the mask, the score or the lengths": tensor})
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def fill(self, tensor: torch.Tensor) -> None:
        """Add an unused tensor if a program without tensors is exported: AOTInductor would turn an
        empty list into None."""
        if torch.compiler.is_exporting() and not self.tensors:
            self.place(tensor)

    def places(self, tensors: Any) -> str:
        """Return the indices of tensors as JSON."""
        return "[" + ",".join([str(self.place(tensor)) for tensor in tensors]) + "]"

    def trained_places(self, tensors: Any) -> str:
        """Return the indices of a score's tensors as JSON, and record which need gradients."""
        for tensor in tensors:
            if tensor.requires_grad and self.place(tensor) not in self.trained:
                self.trained.append(self.place(tensor))
        return self.places(tensors)


def crossing(mask: Any, score: Any, kv_lengths: torch.Tensor | None) -> Crossing:
    """Encode mask, score and lengths of a call. Raises InvalidProblem and Unsupported."""
    encoded = Crossing()
    parts: list[str] = []
    if mask is not None:
        parts.append('"mask":' + _mask(mask, encoded))
    if score is not None:
        parts.append('"score":' + _score(score, encoded))
    if kv_lengths is not None:
        parts.append('"lengths":' + str(encoded.place(kv_lengths)))
    if encoded.trained and torch.is_grad_enabled():
        parts.append('"trained":[' + ",".join([str(place) for place in encoded.trained]) + "]")
    encoded.text = "{" + ",".join(parts) + "}"
    return encoded


def _mask(mask: Any, encoded: Crossing) -> str:
    check_mask(mask)
    made = getattr(mask, "_made", None)
    if made is None:
        if mask.form is NOT:
            return f'["~",{_mask(mask.args[0], encoded)}]'
        return _plain(mask, encoded)
    how = made[0]
    if how == "notation":
        return f'["plain","{made[1]}",[]]'
    if how == "function":
        _, function, text, captured = made
        if isinstance(mask.follows, OfFunction):  # which looks attributes up, of copies in a copy
            function, text = mask.follows.function, ""
        if not text:  # otherwise it was traced outside of torch.compile
            from tilegen.masks.tracing.trace import trace_compiled

            text, captured, _ = trace_compiled(function, is_score=False)
        return f'["keep","{text}",{encoded.places(captured)}]'
    if how == "ids":
        return f'["ids",{encoded.place(made[1])},{"true" if made[2] else "false"}]'
    if how == "packed":
        _, cu_q, cu_kv, inner = made
        return f'["packed",{encoded.place(cu_q)},{encoded.place(cu_kv)},{_mask(inner, encoded)}]'
    if how == "tree":
        lengths = "null" if made[2] is None else str(encoded.place(made[2]))
        return f'["tree",{encoded.place(made[1])},{lengths}]'
    if how == "blocks":
        _, tensors, sides, inner = made
        sizes = f"[{int(sides[0])},{int(sides[1])}]"
        return f'["blocks",{encoded.places(tensors)},{sizes},{_mask(inner, encoded)}]'
    return f'["{how}",' + ",".join([_mask(part, encoded) for part in made[1]]) + "]"


def _plain(mask: Mask, encoded: Crossing) -> str:
    """Encode a mask that its notation and its tensors determine."""
    tensors = [table.tensor for table, _ in tables_of(mask)]
    for tensor in tensors:
        if tensor is None:
            raise InvalidProblem(f"expected a mask with its tensors, got {mask.notation}")
    # Typical numbers depend on elements: the operator's side computes them from the tensors.
    notation = mask.notation if not tensors else mask.described(typical=TYPICAL).notation
    return f'["plain","{notation}",{encoded.places(tensors)}]'


def _score(score: Any, encoded: Crossing) -> str:
    if isinstance(score, Chain):
        return '["then",' + ",".join([_score(part, encoded) for part in score.parts]) + "]"
    if isinstance(score, InDocuments):
        return f'["within",{_score(score.score, encoded)},{encoded.places(score.cu_seqlens)}]'
    if isinstance(score, Score):
        made = getattr(score, "_made", None)
        if made is not None and made[0] != "function":
            return _score(made[1], encoded)
        if made is not None and isinstance(score.follows, OfFunction):
            return _function(score.follows.function, encoded)
        read = (*score.tables, *score.unused)
        if made is not None and any([table.recipe is not None for table in read]):
            return _function(made[1], encoded)  # which makes the tensors inside
        encoded.trained_places([table.tensor for table in score.unused])
        sizes = [(i, one.axes) for i, one in enumerate(score.tables) if one.axes is not None]
        captured = [one.tensor for one in score.tables]
        return _spelt(score.text, captured, sizes, score.sink_logits, encoded)
    check_function(score)
    return _function(score, encoded)


def _function(function: Any, encoded: Crossing) -> str:
    from tilegen.masks.tracing.trace import trace_compiled

    text, captured, unused = trace_compiled(function, is_score=True)
    encoded.trained_places(unused)
    return _spelt(text, captured, (), None, encoded)


def _spelt(text: str, captured: Any, sizes: Any, sinks: Any, encoded: Crossing) -> str:
    shown = ",".join([f'[{int(slot)},"{axes}"]' for slot, axes in sizes])
    of_sinks = "null" if sinks is None else encoded.trained_places([sinks])[1:-1]
    return f'["score","{text}",{encoded.trained_places(captured)},[{shown}],{of_sinks}]'
