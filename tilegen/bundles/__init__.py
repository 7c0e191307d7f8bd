"""Kernels compiled ahead of time: folders of binaries with a manifest. README.md describes them."""

from __future__ import annotations

from typing import Any

loaded: list[Any] = []
"""Bundles (`served.Bundle`) that `attention` asks for its kernels, in this order, before it chooses
and compiles its own."""
