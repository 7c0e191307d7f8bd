"""Kernels compiled ahead of time: folders of binaries with a manifest. README.md describes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilegen.bundles.served import Bundle

loaded: list[Bundle] = []
"""What `attention` asks for its kernels, in this order, before it chooses and compiles its own."""
