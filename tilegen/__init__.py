"""tilegen: an autotuning compiler for attention.

Importing this package does nothing: every name below is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilegen.config import TileConfig
    from tilegen.device import GpuSpec, detect, gpu
    from tilegen.dispatch import attention
    from tilegen.masks import causal, full, sliding_window
    from tilegen.problem import AttentionProblem
    from tilegen.ranks import agree

__version__ = "0.1.0"

_HOME = {
    "AttentionProblem": "tilegen.problem",
    "GpuSpec": "tilegen.device",
    "TileConfig": "tilegen.config",
    "agree": "tilegen.ranks",
    "attention": "tilegen.dispatch",
    "causal": "tilegen.masks",
    "detect": "tilegen.device",
    "full": "tilegen.masks",
    "gpu": "tilegen.device",
    "sliding_window": "tilegen.masks",
}

__all__ = [
    "AttentionProblem",
    "GpuSpec",
    "TileConfig",
    "agree",
    "attention",
    "causal",
    "detect",
    "full",
    "gpu",
    "sliding_window",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module 'tilegen' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
