"""The tensors of kernels, as records.

The sizes of a tensor have names. A result's shape, the arguments of a kernel, traffic and the words
on a tensor in emitted files follow from these names, its dtype and the tensor's place among inputs
and outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from tilegen.kernels.config import Dim

if TYPE_CHECKING:
    from tilegen.masks.mask import Side

_IN_WORDS = {
    "num_heads_q": "heads",
    "num_heads_kv": "heads_kv",
    "num_splits": "splits",
    "num_shares": "shares",
    "score_tiles": "score tiles",
    "padded_kv": "seqlen_kv padded to STRIDE_UNIT",
}
"""Names of sizes in notes, if they differ."""


@dataclass(frozen=True)
class Tensor:
    """A tensor that a launch is given, or makes."""

    name: str
    """Its name in `launch`."""
    shape: str
    """The names of its sizes. `_` is a size of its own: a note then describes the tensor alone."""
    note: str = ""
    """The meaning, after the shape in words: it starts with a comma or a colon."""
    dtype: Literal["element", "fp32", "i32"] = "element"
    """`element` is the dtype of the problem."""
    stride_name: str = ""
    """The name that strides use, if it differs."""
    stride_note: str = ""
    """A comment on the strides."""
    address: str = ""
    """The name of its address, if not that of the tensor with `_ptr`."""
    alias: str = ""
    """The tensor whose first columns it may be: a problem says so (`AttentionProblem.latent`)."""
    paired: bool = False
    """True if it has two numbers for each row where scores are changed. The first is a natural
    logarithm; the second, in base 2, is the part that the first loses in fp32. The pair is the
    dimension before rows."""

    @cached_property
    def sizes(self) -> tuple[str, ...]:
        """The names of its sizes, in order."""
        return tuple(self.shape.split())

    @property
    def side(self) -> Side:
        """`columns` if its rows are key-value rows, otherwise `rows`."""
        return "columns" if "num_heads_kv" in self.sizes else "rows"

    @property
    def head_dim(self) -> Dim | None:
        """The head dim of its rows; None for a single number per row."""
        return {"head_dim_qk": "qk", "head_dim_v": "v"}.get(self.sizes[-1])  # type: ignore

    @property
    def is_panel(self) -> bool:
        """True if the kernels of a panel share it. All panels have the same strides."""
        return "padded_kv" in self.sizes

    @property
    def is_strided(self) -> bool:
        """True for a tensor (batch, heads, rows, head dim) of any strides."""
        return self.dtype == "element" and not self.is_panel

    @property
    def in_parts(self) -> bool:
        """True if each split, or each share, has a part of its own."""
        return "num_splits" in self.sizes or "num_shares" in self.sizes

    @property
    def of_tiles(self) -> bool:
        """True if it has a number for each row of a score tile."""
        return "score_tiles" in self.sizes

    def described(self, *, pairs: bool = False) -> str:
        """Describe shape, dtype and meaning."""
        if "_" in self.sizes:
            return self.note
        pairs &= self.paired
        sizes = [_IN_WORDS.get(size, size) for size in self.sizes]
        sizes[-1:] = ["2", *sizes[-1:]] if pairs else sizes[-1:]
        note = f"({', '.join(sizes)}){', fp32' * (self.dtype == 'fp32')}{self.note}"
        rest = "; the second of a pair, in base 2, is what the first leaves out in fp32"
        return note + rest * pairs


@dataclass(frozen=True)
class Number:
    """A number that a launch is given, and that no line of the kernel's arguments places."""

    name: str
    note: str = ""
    """The meaning, in words."""

    def described(self, *, pairs: bool = False) -> str:
        """Describe the meaning."""
        return self.note


QUERIES = "batch num_heads_q seqlen_q head_dim_qk"
OUTPUTS = "batch num_heads_q seqlen_q head_dim_v"
KEYS = "batch num_heads_kv seqlen_kv head_dim_qk"
VALUES = "batch num_heads_kv seqlen_kv head_dim_v"
ROWS = "batch num_heads_q seqlen_q"

Q, K, V = Tensor("q", QUERIES), Tensor("k", KEYS), Tensor("v", VALUES, alias="k")
OUT = Tensor("out", OUTPUTS, stride_name="o")
DOUT = Tensor("dout", OUTPUTS, stride_name="do")
DQ, DK, DV = Tensor("dq", QUERIES), Tensor("dk", KEYS), Tensor("dv", VALUES)
LSE = Tensor("lse", ROWS, ", dense: natural log-sum-exp of each row", "fp32", paired=True)
DELTA = Tensor("delta", ROWS, ", dense: rowsum(out * dout)", "fp32")

NOT_WRITTEN = "where the mask leaves a tile nothing of the split, whose {part} not written"
