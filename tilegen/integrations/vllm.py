"""tilegen as an attention back end of vLLM: `--attention-backend CUSTOM`.

Where tilegen is installed, vLLM calls `register` in each of its processes, by the entry point in
tilegen's metadata; the back end itself is in vllm_backend.py, which vLLM imports when it is asked
for.
"""

from __future__ import annotations

from vllm.v1.attention.backends.registry import (  # pyright: ignore[reportMissingImports]
    AttentionBackendEnum,
    register_backend,
)

from tilegen.disk import say_once

BACKEND = "tilegen.integrations.vllm_backend.TilegenBackend"


def register() -> None:
    """Make vLLM's name CUSTOM mean tilegen, unless another package has taken it.

    A name of our own would be lost on the way to vLLM's processes: members of its enumeration that
    plugins add are not there yet when a process unpickles its configuration.
    """
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        say_once(f"vLLM's back end CUSTOM is {custom.get_path()}: tilegen's is not registered")
        return
    register_backend(custom, BACKEND)
