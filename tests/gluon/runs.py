"""The Gluon forward in the memory model: inputs, expected results, and verdicts of runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tests.gluon.forward import TWINS, HopperForward
from tests.gluon.memory_model import Fault, Report, run
from tilegen.check.reference import TORCH_DTYPES

TRITON = "3.7.1"


@dataclass(frozen=True)
class Case:
    """A forward, and the sizes that it runs on."""

    kernel: HopperForward
    batch: int = 1
    heads: int = 1
    rows: int = 128
    keys: int = 128

    def __str__(self) -> str:
        kernel = self.kernel
        mask = "causal" if kernel.causal else "full"
        return (
            f"d{kernel.head_dim}-{kernel.dtype}-n{kernel.block_n}s{kernel.stages}-{mask}-b{self.batch}"
            f"-h{self.heads}/{kernel.group_size}-q{self.rows}-kv{self.keys}"
        )


@cache
def inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    kernel = case.kernel

    def random(heads: int, rows: int) -> torch.Tensor:
        shape = case.batch, heads, rows, kernel.head_dim
        return torch.randn(shape, generator=generator).to(TORCH_DTYPES[kernel.dtype])

    heads_kv = case.heads // kernel.group_size
    return random(case.heads, case.rows), random(heads_kv, case.keys), random(heads_kv, case.keys)


@cache
def expected(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) in fp64."""
    q, k, v = (one.double() for one in inputs(case))
    k, v = (one.repeat_interleave(case.kernel.group_size, 1) for one in (k, v))
    s = q @ k.transpose(2, 3) * case.kernel.head_dim**-0.5
    if case.kernel.causal:
        above = torch.ones(case.rows, case.keys, dtype=torch.bool).triu(1)
        s = s.masked_fill(above, float("-inf"))
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def results(case: Case, source: str = "", **options: Any) -> tuple[Any, Report]:
    """Launch a case; return the results and the report."""
    text = source or case.kernel.source(TRITON)
    return run(text, *inputs(case), case.kernel.head_dim**-0.5, twins=TWINS, **options)


def is_right(case: Case, value: Any) -> bool:
    """Return True if out and lse are those of fp64, but for roundings of weights and out."""
    out, lse = expected(case)
    unit = 2.0**-8 if case.kernel.dtype == "bf16" else 2.0**-11
    return bool(
        ((value[0].double() - out).abs() <= 4 * unit * (1 + out.abs())).all()
        and torch.isclose(value[1].double(), lse, rtol=1e-5, atol=1e-5).all()
    )


def verdict(case: Case, source: str, seed: int) -> str:
    """Return the verdict of a run: `right`, `wrong`, or the fault."""
    try:
        checks, _ = results(case, source, seed=seed)
    except Fault as fault:
        return str(fault)
    return "right" if is_right(case, checks) else "wrong"
