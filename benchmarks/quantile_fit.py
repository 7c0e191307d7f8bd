"""Linear laws with no negative coefficient, by coordinate descent."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

QUANTILE = 0.5  # of kernels whose registers the prediction covers
RIDGE = 1e-3  # decides between features that never vary apart

Array = NDArray[Any]


def descend(normal: Array, right: Array, coefficients: Array) -> None:
    """Improve the non-negative solution of a least-squares problem: each coefficient in turn, the
    others as they are."""
    for i in range(len(coefficients)):
        if normal[i, i] > 0:
            change = (right[i] - normal[i] @ coefficients) / normal[i, i]
            coefficients[i] = max(0.0, coefficients[i] + change)


def quantile_fit(features: Array, values: Array, at_least: Array) -> list[float]:
    """Return non-negative coefficients whose prediction lies above QUANTILE of the values.

    Least squares, reweighted until it minimises the pinball loss. Where a value is only a least
    one, predicting more is no error.
    """
    scale = np.maximum(features.max(axis=0), 1e-9)
    columns = features / scale
    coefficients = np.full(columns.shape[1], values.mean() / columns.shape[1])
    for _ in range(400):
        error = values - columns @ coefficients
        weight = np.where(error > 0, QUANTILE, (1 - QUANTILE) * ~at_least)
        weight /= np.maximum(np.abs(error), 4.0)
        weighted = columns.T * weight
        descend(weighted @ columns + RIDGE * np.eye(len(scale)), weighted @ values, coefficients)
    return [round(float(value), 3) for value in coefficients / scale]
