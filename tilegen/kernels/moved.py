"""Words that kernels move, as formulas in the symbols of model/symbols.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tilegen.kernels.tensors import Tensor


@dataclass(frozen=True)
class Moved:
    """Words of one tensor that a kernel loads, or stores, for one key-value head."""

    tensor: Tensor
    direction: Literal["read", "write"]
    words: str
    """A formula in the symbols of model/symbols.py."""


def read(tensor: Tensor, words: str) -> Moved:
    """Create the record of a load."""
    return Moved(tensor, "read", words)


def write(tensor: Tensor, words: str) -> Moved:
    """Create the record of a store."""
    return Moved(tensor, "write", words)


def words(tensor: Tensor, rows: str = "") -> str:
    """Return the words of `rows` of a tensor, by default of all rows."""
    if tensor.is_panel:
        return "g*A_w"
    if tensor.of_tiles:
        return "T_s*g*N_q"
    if tensor.in_parts:
        rows = "W_s" if tensor.head_dim else f"N_{_side(tensor)}*n_s"
    return _times(tensor, rows or f"N_{_side(tensor)}")


def words_of_visits(tensor: Tensor, visits: str) -> str:
    """Return the words of a streamed tensor: its rows move at each of the `visits`."""
    return f"{visits}_{_side(tensor)}{_width(tensor)}"


def least_words(tensor: Tensor, rows: Literal["n", "N"]) -> str:
    """Return the words of a tensor whose rows move once: all, N, or those that a mask keeps, n."""
    return "g*nnz" if tensor.is_panel else _times(tensor, f"{rows}_{_side(tensor)}")


def _times(tensor: Tensor, rows: str) -> str:
    heads = "" if tensor.side == "columns" else "g*"
    return f"{heads}{rows}{_width(tensor)}"


def _side(tensor: Tensor) -> str:
    return "kv" if tensor.side == "columns" else "q"


def _width(tensor: Tensor) -> str:
    return f"*d_{tensor.head_dim}" if tensor.head_dim else ""
