"""Predicted beside measured times of configs: the first choice, its regret, rank correlation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilegen.kernels.config import TileConfig


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Times of configs, measured and predicted, in one unit."""

    measured: Mapping[TileConfig, float]
    predicted: Mapping[TileConfig, float]
    """Predicted times of all measured configs."""

    @property
    def order(self) -> list[TileConfig]:
        """The measured configs, those predicted to be fastest first; ties stay in their order."""
        return sorted(self.measured, key=self.predicted.__getitem__)

    @property
    def first(self) -> TileConfig:
        """The config that is predicted to be the fastest."""
        return self.order[0]

    @property
    def best(self) -> TileConfig:
        """The fastest config."""
        return min(self.measured, key=self.measured.__getitem__)

    @property
    def regret(self) -> float:
        """Time of the first config over the best time, less one."""
        return self.measured[self.first] / self.measured[self.best] - 1

    @property
    def correlation(self) -> float:
        """Spearman's rank correlation of predicted and measured times."""
        return spearman(
            [self.predicted[config] for config in self.measured], list(self.measured.values())
        )

    @property
    def ratio(self) -> float:
        """Predicted over measured time at the best config."""
        return self.predicted[self.best] / self.measured[self.best]


def spearman(numbers: Sequence[float], other: Sequence[float]) -> float:
    """Return the rank correlation of two lists, 0 if one of them is constant."""
    a, b = (_ranks(values) for values in (numbers, other))
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / size if size else 0.0


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Return ranks from 0; equal values share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[place]
