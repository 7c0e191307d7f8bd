"""One problem of the net: everything that a call gets, as text that can be run again."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch

from tilegen.kernels.registry import family_among
from tilegen.problem import DType

Layout = Literal["dense", "inside", "padded", "sliced", "expanded", "transposed"]
Call = Literal["attention", "flex", "varlen", "paged", "packed pages"]
DENSE: tuple[Layout, ...] = ("dense",) * 4
PLAIN = {
    "fwd": "m16n16w4s2",
    "bwd_preprocess": "m16n16w4s2",
    "bwd_dkdv": "m16n16w4s2",
    "bwd_dq": "m16n16w4s2",
}
"""The smallest tiles of the kernels that hold whole heads."""
CHANGED = 1000
"""Added to the seeds of tables, all smaller, when tables are changed in place."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A call of one of tilegen's functions; prints as text that recreates it."""

    batch: int = 1
    heads: int = 1
    heads_kv: int = 1
    rows: int
    columns: int
    requests: tuple[tuple[int, int], ...] = ()
    """Queries and keys of each batch entry, where these have their own: rows and columns at most.
    """
    head_dim: int = 16
    head_dim_v: int = 16
    dtype: DType = "fp32"
    mask: str = "full()"
    """Source text of tilegen's masks; `predicate(lambda b, h, q, k: ...)` is a user's function."""
    kv_lengths: str = ""
    """The table with the number of keys of each batch entry; empty for all keys."""
    score: str = ""
    """Source text of tilegen's scores; empty for none."""
    tables: dict[str, str] = field(default_factory=dict[str, str])
    """Tensors that mask and score capture: source texts that call the functions of `makers`."""
    trained: tuple[str, ...] = ()
    """The tables that get gradients."""
    layouts: tuple[Layout, ...] = DENSE
    """Memory layout of q, k, v and the gradient of out."""
    configs: dict[str, str] = field(default_factory=dict[str, str])
    """The kernels and their tiles; empty: the model's choice."""
    invariant: bool = False
    """True if kernels are those of batch-invariant mode."""
    call: Call = "attention"
    """The function: attention, flex_attention, attention_varlen, or attention_paged with as many
    queries for each request, or with packed queries."""
    latent: bool = False
    """True if values are the first columns of keys."""
    page: int = 0
    """Keys of a page, where they are in pages."""
    page_layout: Literal["NHD", "HND"] = "NHD"
    compiled: bool = False
    """True if torch.compile traces the call, with its mask and score."""
    dropout: float = 0.0
    """The probability that a weight is dropped."""
    scale: float | None = None
    backward: bool = True
    trains_lse: bool = False
    """True if lse, too, has a gradient."""
    changed: bool = False
    """True if tables are changed in place, and the call is made once more."""
    seed: int = 0

    def __str__(self) -> str:
        given = ((f.name, getattr(self, f.name)) for f in fields(self))
        defaults = Problem(rows=0, columns=0)
        shown = (
            f"{name}={'PLAIN' if value == PLAIN else _source(value)}"
            for name, value in given
            if value != getattr(defaults, name)
        )
        return f"Problem({', '.join(shown)})"

    @property
    def keeps(self) -> str:
        """Source text of all that decides which pairs are kept."""
        lengths = f"kv_lengths({self.kv_lengths})"
        return f"({self.mask}) & {lengths}" if self.kv_lengths else self.mask

    @property
    def factor(self) -> float:
        """The factor of scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def family(self) -> str:
        """The kernels that compute it, as the summary counts them."""
        if self.call == "flex":
            return "flex_attention"
        if self.call == "varlen":
            return "attention_varlen"
        actual = (family_among(self.configs, way) for way in ("forward", "backward"))
        return "+".join(one.name for one in actual if one) or "the model's choice"

    def captured(self) -> dict[str, Any]:
        """Return the tables, those that are trained as leaves."""
        names = makers(self)
        made = {name: eval(text, names) for name, text in self.tables.items()}
        for name in self.trained:
            made[name].requires_grad_()
        return made

    def change(self, tables: dict[str, Any]) -> None:
        """Give the tensors among tables other values, in place."""
        names = makers(self, CHANGED)
        for name, text in self.tables.items():
            if isinstance(tables[name], torch.Tensor):
                with torch.no_grad():
                    tables[name].copy_(eval(text, names))


def parse(text: str) -> Problem:
    """Return the problem that a text re-creates."""
    return eval(text, {"Problem": Problem, "PLAIN": PLAIN})


def _source(value: Any) -> str:
    """Return the source text of a value, with double quotes alone, for a shell's single ones."""
    match value:
        case str():
            return json.dumps(value.replace("'", '"'))
        case tuple():
            return f"({''.join(f'{_source(one)}, ' for one in value)})"
        case dict():
            items = (f"{_source(name)}: {_source(one)}" for name, one in value.items())
            return f"{{{', '.join(items)}}}"
        case _:
            return repr(value)


def reads(text: str, names: dict[str, str]) -> dict[str, str]:
    """Return the tables that a source text names."""
    words = set(re.findall(r"\w+", text))
    return {name: made for name, made in names.items() if name in words}


def makers(problem: Problem, more: int = 0) -> dict[str, Any]:
    """Return the functions and sizes that texts of tables may name; `more` is added to seeds."""

    def generator(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed + more)

    def ints(seed: int, low: int, high: int, *sizes: int, dtype: str = "int64") -> torch.Tensor:
        """Integers in low..high."""
        made = torch.randint(low, high + 1, sizes, generator=generator(seed))
        return made.to(getattr(torch, dtype))

    def floats(seed: int, *sizes: int, dtype: str = "float32") -> torch.Tensor:
        return torch.randn(sizes, generator=generator(seed)).to(getattr(torch, dtype))

    def positive(seed: int, *sizes: int) -> torch.Tensor:
        """Floats in 0.5..1.5."""
        return torch.rand(sizes, generator=generator(seed)) + 0.5

    def bools(seed: int, percent: int, *sizes: int) -> torch.Tensor:
        return torch.rand(sizes, generator=generator(seed)) < percent / 100

    def runs(seed: int, count: int, size: int, dtype: str = "int64") -> torch.Tensor:
        """Sorted ids of `count` documents."""
        return ints(seed, 0, count - 1, size, dtype=dtype).sort().values

    def cuts(seed: int, count: int, size: int) -> torch.Tensor:
        """Where documents start, and where the last one ends."""
        inner = ints(seed, 0, size, count - 1).sort().values
        return torch.cat([torch.tensor([0]), inner, torch.tensor([size])])

    def parents(seed: int, *sizes: int, dtype: str = "int64") -> torch.Tensor:
        """Tokens of trees, each before its children; -1 for a root."""
        before = torch.arange(sizes[-1]) + 1
        made = (torch.rand(sizes, generator=generator(seed)) * before).long() - 1
        return made.to(getattr(torch, dtype))

    sizes = {"batch": problem.batch, "heads": problem.heads}
    lengths = {"rows": problem.rows, "columns": problem.columns}
    functions = (ints, floats, positive, bools, runs, cuts, parents)
    return {
        "torch": torch,
        "longest": max(lengths.values()),
        **sizes,
        **lengths,
        **{function.__name__: function for function in functions},
    }
