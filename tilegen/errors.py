"""All errors that tilegen raises on purpose. Messages name the expected value, the actual value,
and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NamedTuple


class Word(NamedTuple):
    """A word of a notation, for `tilegen help` and for errors."""

    written: str
    """The form, with capitals for the parts that vary."""
    meaning: str
    example: str


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown word: the known words like it, if there are
    any."""
    lower, known = str(word).lower(), list(known)
    close = [lower] if lower in known else difflib.get_close_matches(lower, known)
    return f"; did you mean {' or '.join(close)}?" if close else ""


class TilegenError(Exception):
    """Base class: `except TilegenError` catches all errors of tilegen."""


class InvalidProblem(TilegenError, ValueError, RuntimeError):
    """The arguments do not describe an attention problem: shapes, dtypes or notation are wrong.
    Also a ValueError, as FlexAttention raises, and a RuntimeError, as SDPA and flash-attn raise."""


class Unsupported(TilegenError, NotImplementedError):
    """A well-formed request that tilegen cannot serve. Also a NotImplementedError, which is a
    RuntimeError, as PyTorch raises."""


class BuildFailed(TilegenError):
    """An emitted kernel could not be compiled, or its binary could not be loaded or launched."""


class WrongResult(TilegenError):
    """A kernel disagrees with the reference by more than the tolerance rule allows, or reads or
    writes outside its tensors (found by TILEGEN_CHECK=bounds)."""


class NoRecord(TilegenError):
    """There is no tuning record for a problem, or tuning found no config that runs."""


class InvalidRecord(TilegenError, ValueError):
    """A file of records, trials or a manifest cannot be used: it is unreadable or not JSON, or a
    field is missing, ill-typed or out of range."""
