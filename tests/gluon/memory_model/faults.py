"""Errors of the memory model: `Fault` and `NotModelled`."""

from __future__ import annotations

from tilegen.errors import TilegenError


class Fault(TilegenError):
    """A kernel breaks a rule of the machine. The message says which, where, and by which schedule:
    its seed is enough to see the same again."""


class NotModelled(TilegenError):
    """A kernel does something that is not modelled."""
