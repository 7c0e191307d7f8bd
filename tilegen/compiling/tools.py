"""Programs that Triton's wheel brings."""

from __future__ import annotations

from pathlib import Path


def nvidia_tool(name: str) -> str:
    """Return the path of a program that Triton's wheel brings, such as cuobjdump."""
    import triton.backends.nvidia as backend

    return str(Path(next(iter(backend.__path__))) / "bin" / name)
