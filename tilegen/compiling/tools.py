"""Programs in Triton's wheel."""

from __future__ import annotations

from pathlib import Path


def nvidia_tool(name: str) -> str:
    """Return the path of an NVIDIA program in Triton's wheel, such as cuobjdump."""
    import triton.backends.nvidia as backend

    return str(Path(next(iter(backend.__path__))) / "bin" / name)
