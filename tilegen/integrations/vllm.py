"""tilegen as an attention back end of vLLM: `--attention-backend CUSTOM`.

Where tilegen is installed, vLLM calls `register` in each of its processes, by the entry point in
tilegen's metadata; the back ends themselves are in vllm_backend.py and, for models with multi-head
latent attention (MLA), vllm_latent.py, which vLLM imports when it is asked for one.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.mla.prefill.registry import (  # pyright: ignore[reportMissingImports]
    MLAPrefillBackendEnum,
    register_mla_prefill_backend,
)
from vllm.v1.attention.backends.registry import (  # pyright: ignore[reportMissingImports]
    AttentionBackendEnum,
    register_backend,
)

from tilegen.disk import say_once

BACKEND = f"{__name__}.Backend"
PREFILL = "tilegen.integrations.vllm_latent.TilegenPrefillBackend"


def register() -> None:
    """Make vLLM's names CUSTOM, of back ends and of those for prompts of MLA, mean tilegen, unless
    another package has taken them.

    A name of our own would be lost on the way to vLLM's processes: members of its enumeration that
    plugins add are not there yet when a process unpickles its configuration.
    """
    for what, custom, give, path in (
        ("back end", AttentionBackendEnum.CUSTOM, register_backend, BACKEND),
        ("MLA prefill", MLAPrefillBackendEnum.CUSTOM, register_mla_prefill_backend, PREFILL),
    ):
        if custom.is_overridden() and custom.get_path() != path:
            say_once(f"vLLM's {what} CUSTOM is {custom.get_path()}: tilegen's is not registered")
        else:
            give(custom, path)


def __getattr__(name: str) -> Any:
    """Return, as `Backend`, the back end for the model whose layers vLLM makes.

    vLLM has one name for two classes, looks it up by `getattr` for each kind of layers, and asks
    the class it finds where it lies: from there on, the name is the class's own.
    """
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import (  # pyright: ignore[reportMissingImports]
        get_current_vllm_config_or_none,
    )

    config = get_current_vllm_config_or_none()
    if config is not None and config.model_config is not None and config.model_config.use_mla:
        from tilegen.integrations.vllm_latent import TilegenLatentBackend

        return TilegenLatentBackend
    from tilegen.integrations.vllm_backend import TilegenBackend

    return TilegenBackend
