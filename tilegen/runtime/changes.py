"""What a call asks beside its tensors: how scores change, and which gradients it wants."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tilegen.masks.mask import Mask
from tilegen.masks.score import Score


@dataclass(frozen=True)
class Changes:
    """What a call does to the scores: a mask, and perhaps a score change."""

    mask: Mask
    score: Score | None = None

    @property
    def captured(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the score reads."""
        return self.score.captured if self.score else ()

    @property
    def sinks(self) -> torch.Tensor | None:
        """The logits of the sinks, (heads,)."""
        return self.score.sink_logits if self.score else None

    def on(self, device: torch.device) -> Changes:
        """Return the same with the score's tensors on a device, differentiably."""
        tensors = (*self.captured, *(() if self.sinks is None else (self.sinks,)))
        if self.score is None or all(one.device == device for one in tensors):
            return self
        sinks = None if self.sinks is None else self.sinks.to(device)
        captured = tuple(one.to(device) for one in self.captured)
        return Changes(self.mask, replace(self.score, captured=captured, sink_logits=sinks))


@dataclass(frozen=True)
class Gradients:
    """What a backward gives; None for what was not wanted."""

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None
    sinks: torch.Tensor | None
    captured: dict[int, torch.Tensor]
    """By slot, fp32."""


@dataclass(frozen=True)
class Wanted:
    """Which gradients a backward must give."""

    dq: bool
    dkdv: bool
    sinks: bool
    captured: tuple[int, ...]
