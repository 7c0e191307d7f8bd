"""tilegen as an attention back end of vLLM: `--attention-backend CUSTOM`.

If tilegen is installed, vLLM calls `register` in each of its processes, by the entry point in
tilegen's metadata. The back ends are in vllm_backend.py and, for models with multi-head latent
attention (MLA), vllm_latent.py. vLLM imports them when they are requested.
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
    """Register tilegen under vLLM's names CUSTOM, of back ends and of MLA prefill, unless another
    package has taken them.

    A new name would be lost on the way to vLLM's processes: members that plugins add to its
    enumeration do not exist yet when a process unpickles its configuration.
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

    vLLM has one name for two classes. It looks the name up by `getattr` for each kind of layer, and
    afterwards uses the module and name of the class that it got.
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
