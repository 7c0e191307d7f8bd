"""Kernels compiled ahead of time: folders of binaries with a manifest. README.md is the guide,
format.md the format."""

from __future__ import annotations

from typing import Any

loaded: list[Any] = []
"""Loaded bundles (`served.Bundle`), in the order in which `attention` searches them for kernels. It
compiles its own kernels only if no bundle has them."""
