"""tilegen as an attention back end of sglang: `--attention-backend tilegen`.

If tilegen is installed, sglang calls `register` in each of its processes, by the entry point in
tilegen's metadata. The back end is in sglang_backend.py, imported when a model is served with it.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.choices import (  # pyright: ignore[reportMissingImports]
    ATTENTION_BACKEND_CHOICES,
    add_attention_backend_choices,
)

NAME = "tilegen"


def register() -> None:
    """Register the name `tilegen` with sglang, once per process."""
    from sglang.srt.layers.attention.attention_registry import (  # pyright: ignore
        register_attention_backend,
    )

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(create)


def create(runner: Any) -> Any:
    """Return the back end of a model. Raises Unsupported."""
    from tilegen.integrations.sglang_backend import TilegenAttnBackend

    return TilegenAttnBackend(runner)
