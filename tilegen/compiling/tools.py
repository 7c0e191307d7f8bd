"""Programs in Triton's wheel."""

from __future__ import annotations


def nvidia_tool(name: str) -> str:
    """Return the path of an NVIDIA program in Triton's wheel, such as cuobjdump."""
    from tilegen.private_triton import PROGRAMS

    return str(PROGRAMS / name)
