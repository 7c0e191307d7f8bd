"""tilegen: an autotuning compiler for attention.

Importing this package does nothing: every name below is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tilegen.version import __version__ as __version__

if TYPE_CHECKING:
    from tilegen.api import explain, generate, propose, read_code, show, tune, verify
    from tilegen.bundles.manifest import Manifest
    from tilegen.bundles.served import Bundle, load_bundle
    from tilegen.calls.append import append_paged
    from tilegen.calls.attention import attention
    from tilegen.calls.flex import flex_attention, from_block_mask
    from tilegen.calls.paged import attention_paged
    from tilegen.calls.ranks import agree
    from tilegen.calls.varlen import attention_jagged, attention_varlen
    from tilegen.calls.warm import warm
    from tilegen.check.verification import Check
    from tilegen.comparing.compare import compare
    from tilegen.emit.identity import RenderedKernel
    from tilegen.environment import settings
    from tilegen.explaining.explanation import Explanation
    from tilegen.gpus.spec import GpuSpec, detect, gpu
    from tilegen.integrations.flash_backend import activate, deactivate
    from tilegen.integrations.sdpa import scaled_dot_product_attention
    from tilegen.kernels.config import TileConfig
    from tilegen.masks import (
        Mask,
        ancestors,
        bigbird,
        block_sparse,
        causal,
        dilated,
        documents,
        from_bool,
        full,
        global_tokens,
        kv_lengths,
        neighborhood,
        predicate,
        prefix_lm,
        random_blocks,
        sliding_window,
        streaming,
        tree,
        values,
    )
    from tilegen.masks.score import (
        Score,
        alibi,
        bias,
        relative_bias,
        score,
        sinks,
        softcap,
        temperature,
    )
    from tilegen.model.estimate import Candidate
    from tilegen.problem import AttentionProblem
    from tilegen.store import TuningRecord


_HOME = {
    "AttentionProblem": "tilegen.problem",
    "Bundle": "tilegen.bundles.served",
    "Candidate": "tilegen.model.estimate",
    "Check": "tilegen.check.verification",
    "Explanation": "tilegen.explaining.explanation",
    "GpuSpec": "tilegen.gpus.spec",
    "Manifest": "tilegen.bundles.manifest",
    "Mask": "tilegen.masks",
    "RenderedKernel": "tilegen.emit.identity",
    "Score": "tilegen.masks.score",
    "TileConfig": "tilegen.kernels.config",
    "TuningRecord": "tilegen.store",
    "activate": "tilegen.integrations.flash_backend",
    "agree": "tilegen.calls.ranks",
    "alibi": "tilegen.masks.score",
    "ancestors": "tilegen.masks",
    "append_paged": "tilegen.calls.append",
    "attention": "tilegen.calls.attention",
    "attention_paged": "tilegen.calls.paged",
    "attention_jagged": "tilegen.calls.varlen",
    "attention_varlen": "tilegen.calls.varlen",
    "bias": "tilegen.masks.score",
    "bigbird": "tilegen.masks",
    "block_sparse": "tilegen.masks",
    "causal": "tilegen.masks",
    "compare": "tilegen.comparing.compare",
    "deactivate": "tilegen.integrations.flash_backend",
    "detect": "tilegen.gpus.spec",
    "dilated": "tilegen.masks",
    "documents": "tilegen.masks",
    "explain": "tilegen.api",
    "flex_attention": "tilegen.calls.flex",
    "from_block_mask": "tilegen.calls.flex",
    "from_bool": "tilegen.masks",
    "full": "tilegen.masks",
    "generate": "tilegen.api",
    "global_tokens": "tilegen.masks",
    "gpu": "tilegen.gpus.spec",
    "kv_lengths": "tilegen.masks",
    "load_bundle": "tilegen.bundles.served",
    "neighborhood": "tilegen.masks",
    "predicate": "tilegen.masks",
    "prefix_lm": "tilegen.masks",
    "propose": "tilegen.api",
    "random_blocks": "tilegen.masks",
    "read_code": "tilegen.api",
    "relative_bias": "tilegen.masks.score",
    "scaled_dot_product_attention": "tilegen.integrations.sdpa",
    "score": "tilegen.masks.score",
    "settings": "tilegen.environment",
    "show": "tilegen.api",
    "sinks": "tilegen.masks.score",
    "sliding_window": "tilegen.masks",
    "softcap": "tilegen.masks.score",
    "streaming": "tilegen.masks",
    "temperature": "tilegen.masks.score",
    "tree": "tilegen.masks",
    "tune": "tilegen.api",
    "values": "tilegen.masks",
    "verify": "tilegen.api",
    "warm": "tilegen.calls.warm",
}

__all__ = [
    "AttentionProblem",
    "Bundle",
    "Candidate",
    "Check",
    "Explanation",
    "GpuSpec",
    "Manifest",
    "Mask",
    "RenderedKernel",
    "Score",
    "TileConfig",
    "TuningRecord",
    "activate",
    "agree",
    "alibi",
    "ancestors",
    "append_paged",
    "attention",
    "attention_jagged",
    "attention_paged",
    "attention_varlen",
    "bias",
    "bigbird",
    "block_sparse",
    "causal",
    "compare",
    "deactivate",
    "detect",
    "dilated",
    "documents",
    "explain",
    "flex_attention",
    "from_block_mask",
    "from_bool",
    "full",
    "generate",
    "global_tokens",
    "gpu",
    "kv_lengths",
    "load_bundle",
    "neighborhood",
    "predicate",
    "prefix_lm",
    "propose",
    "random_blocks",
    "read_code",
    "relative_bias",
    "scaled_dot_product_attention",
    "score",
    "settings",
    "show",
    "sinks",
    "sliding_window",
    "softcap",
    "streaming",
    "temperature",
    "tree",
    "tune",
    "values",
    "verify",
    "warm",
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
