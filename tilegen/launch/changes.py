"""Arguments of a call besides q, k, v and scale: mask, score, lengths, dropout, pages; and the
gradients that a backward must give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilegen.emit.identity import VECTOR_BYTES
from tilegen.masks.dropout import Dropout
from tilegen.masks.form import Shape
from tilegen.masks.kinds import MaskKind, kind_of_mask, lengths_of
from tilegen.masks.mask import Mask
from tilegen.masks.score import Score
from tilegen.masks.tensors import check_kv_lengths, tensors_of
from tilegen.masks.usual import kv_prefix
from tilegen.masks.values import LIMIT, check_range, has_values


@dataclass(slots=True)
class Pages:
    """Where the queries and the keys of a call over the pages of a cache lie, as `attention_paged`
    describes it. Instances are never changed."""

    block_table: torch.Tensor
    lengths: torch.Tensor
    q_starts: torch.Tensor | None
    max_q_length: int | None
    max_kv_length: int | None
    layout: str
    out: torch.Tensor | None
    """The tensor to write the result to."""

    @property
    def facts(self) -> tuple[Any, ...]:
        """The properties that the plan of a call depends on."""
        table, lengths, starts, out = self.block_table, self.lengths, self.q_starts, self.out
        return (
            *(table.shape, table.stride(), table.dtype, table.device),
            *(lengths.shape, lengths.stride(), lengths.dtype, lengths.device),
            starts is not None and (starts.shape, starts.stride(), starts.dtype, starts.device),
            out is not None
            and (out.shape, out.stride(), out.dtype, out.device, out.data_ptr() % VECTOR_BYTES),
            *(self.max_q_length, self.max_kv_length, self.layout),
        )


@dataclass(slots=True)
class Changes:
    """The mask of a call, its score, lengths of padded batches, dropout and pages. Instances are
    never changed, but not frozen: a frozen dataclass takes longer to make."""

    given: Mask
    """The mask without the lengths."""
    score: Score | None = None
    kv_lengths: torch.Tensor | None = None
    dropout: Dropout | None = None
    pages: Pages | None = None

    @property
    def kind(self) -> MaskKind:
        """The kind of the mask, including lengths. Raises InvalidProblem if it is not a mask."""
        kind: MaskKind = getattr(self.given, "_kind", None) or kind_of_mask(self.given)
        return kind if self.kv_lengths is None else kind.padded[0]

    @property
    def mask(self) -> Mask:
        """The mask, including lengths. Raises InvalidProblem if it is not a mask."""
        if self.kv_lengths is None:
            return self.given
        check_kv_lengths(self.kv_lengths)
        return self.given & kv_prefix(lengths_of(self.kv_lengths))

    @property
    def sources(self) -> Iterator[torch.Tensor]:
        """The tensors that the mask reads."""
        for value in self.given.tables:
            yield from value.sources
        if self.kv_lengths is not None:
            yield self.kv_lengths

    def tables(
        self, q: torch.Tensor, k: torch.Tensor, device: torch.device, converts: bool
    ) -> tuple[torch.Tensor, ...]:
        """Return the tensors of the mask that kernels read, in the order of the mask's values.

        With `converts`, lengths are made int32 on the device. The plan has checked the lengths.
        Raises InvalidProblem for other sizes that do not fit.
        """
        given = self.given
        if self.kv_lengths is None:
            return tensors_of(given, Shape.of(q, k), device)
        lengths = self.lengths(device, converts)
        if not given.tables:
            return (lengths,)
        tables = tensors_of(given, Shape.of(q, k), device)
        at = kind_of_mask(given).padded[1]
        return *tables[:at], lengths, *tables[at:]

    def lengths(self, device: torch.device, converts: bool) -> torch.Tensor:
        """Return the lengths of padded batches, which must be set, as kernels read them; see
        `tables` for `converts`. Raises InvalidProblem."""
        lengths = self.kv_lengths
        assert lengths is not None
        if has_values(lengths):
            check_range(lengths, LIMIT)
        return lengths.to(device, torch.int32).contiguous() if converts else lengths

    @property
    def captured(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the score reads."""
        return self.score.captured if self.score else ()

    @property
    def sinks(self) -> torch.Tensor | None:
        """The logits of the sinks, (heads,)."""
        return self.score.sink_logits if self.score else None

    def on(self, device: torch.device) -> Changes:
        """Move the score's tensors to a device, differentiably."""
        tensors = (*self.captured, *(() if self.sinks is None else (self.sinks,)))
        if self.score is None or all(tensor.device == device for tensor in tensors):
            return self
        return replace(self, score=self.score.with_tensors(lambda tensor: tensor.to(device)))


@dataclass(slots=True)
class Gradients:
    """Gradients of a call; None for gradients that were not wanted."""

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None
    sinks: torch.Tensor | None
    captured: dict[int, torch.Tensor]
    """The gradients of captured tensors, by slot."""


@dataclass(slots=True)
class Wanted:
    """The gradients that a backward must compute."""

    dq: bool
    dkdv: bool
    sinks: bool = False
    captured: tuple[int, ...] = ()
