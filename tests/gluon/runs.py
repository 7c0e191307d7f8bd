"""Kernels for Hopper in the memory model: inputs, expected results, and verdicts of runs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch

from tests.gluon.memory_model import Fault, Report, run
from tests.gluon.memory_model.language import function_of
from tilegen.check.reference import Inputs, attention_reference, make_inputs
from tilegen.emit.render import STAY, TANH, render
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.launch.binding import BoundKernel
from tilegen.masks.form import Shape
from tilegen.masks.tensors import score_tensors, typical_score
from tilegen.problem import AttentionProblem

FORWARD, DQ, DKDV = "fwd_hopper", "bwd_dq_hopper", "bwd_dkdv_hopper"
KERNEL = FORWARD
TWINS = {STAY: lambda x: x, TANH: function_of(np.tanh)}
"""Functions that compute the results of inline assembly, besides that of `STAY` in a file."""


@dataclass(frozen=True)
class Case:
    """A problem, a config and a kernel; `programs` replaces the number of persistent programs."""

    text: str
    config: str = "m128n64w8s2t"
    programs: int = 0
    kernel: str = KERNEL

    def __str__(self) -> str:
        return f"{self.text} {self.config}" + f" {self.programs} programs" * bool(self.programs)

    @property
    def is_forward(self) -> bool:
        """True for a case of the forward."""
        return self.kernel == FORWARD

    @cached_property
    def problem(self) -> AttentionProblem:
        """The problem."""
        return AttentionProblem.parse(self.text)

    @cached_property
    def source(self) -> str:
        """The emitted file."""
        text = render(self.problem, TileConfig.parse(self.config), self.kernel).source
        most = TileConfig.parse(self.config).persistent
        return text.replace(f", {most})", f", {self.programs})") if self.programs else text

    @cached_property
    def inputs(self) -> Inputs:
        """Random tensors."""
        return make_inputs(self.problem, device=torch.device("cpu"), seed=5)

    @cached_property
    def score(self) -> Any:
        """The score with typical tensors; None without a score."""
        return typical_score(self.problem.score, self.problem.shape, torch.device("cpu"), seed=5)

    @cached_property
    def mask(self) -> Any:
        """The mask with typical tensors."""
        return self.problem.mask.realized(self.problem.shape, torch.device("cpu"))

    @property
    def scale(self) -> float:
        """The softmax scale."""
        return self.problem.head_dim_qk**-0.5

    @cached_property
    def in_fp64(self) -> dict[str, torch.Tensor]:
        """Out, lse and gradients, by PyTorch in fp64."""
        wide = self.inputs.to(torch.float64)
        score = self.score and self.score.with_tensors(lambda x: x.double())
        q, k, v = leaves = [x.requires_grad_() for x in (wide.q, wide.k, wide.v)]
        out, lse = attention_reference(q, k, v, mask=self.mask, score=score, scale=self.scale)
        gradients = torch.autograd.grad(out, leaves, wide.dout)
        names = "out", "lse", "dq", "dk", "dv"
        return dict(zip(names, (out.detach(), lse.detach(), *gradients), strict=True))

    @property
    def expected(self) -> tuple[torch.Tensor, ...]:
        """The results of the kernel in fp64."""
        return tuple(self.in_fp64[name] for name in KERNELS[self.kernel].allocated)

    @cached_property
    def given(self) -> tuple[Any, ...]:
        """The arguments of the launch."""
        x = self.inputs
        if self.is_forward:
            return x.q, x.k, x.v, self.scale
        wide = self.in_fp64["lse"]
        lse = wide.float()
        if self.problem.pair_lse:
            rest = torch.where(lse.isfinite(), (wide - lse) * math.log2(math.e), 0.0).float()
            lse = torch.stack([lse, rest], 2)
        delta = (self.in_fp64["out"] * x.dout.double()).sum(-1).float()
        return x.q, x.k, x.v, x.dout, lse, delta, self.scale

    def bind(self, launch: Any) -> Any:
        """Return the launch with the tensors that mask and score read."""
        sinks = self.score.sink_logits if self.score and self.is_forward else None
        reads = score_tensors(self.score.captured, sinks, {}) if self.score else {}
        bound = BoundKernel(launch, self.problem.mask, self.kernel, TileConfig.parse(self.config))
        q, k = self.inputs.q, self.inputs.k
        return bound.given(self.mask, Shape.of(q, k), q.device, reads)


@cache
def case_of(
    text: str, config: str = "m128n64w8s2t", programs: int = 0, kernel: str = KERNEL
) -> Case:
    """Return a case, whose inputs and expected results are computed once."""
    return Case(text, config, programs, kernel)


def twins_of(source: str) -> dict[str, Any]:
    """Return TWINS, and that of the assembly which a file keeps in place."""
    match = re.search(r"^STAY = tl\.constexpr\((.*?)^\)", source, re.DOTALL | re.MULTILINE)
    return TWINS | ({eval(f"({match[1]})"): lambda x: x} if match else {})


def results(case: Case, source: str = "", **options: Any) -> tuple[Any, Report]:
    """Launch a case; return the results and the report."""
    source, given = source or case.source, options.pop("given", case.given)
    return run(source, *given, twins=twins_of(source), bind=case.bind, **options)


def is_right(case: Case, value: Any) -> bool:
    """Return True if results are those of fp64, but for roundings of weights and results."""
    unit = 2.0**-8 if case.problem.dtype == "bf16" else 2.0**-11
    if not case.is_forward:
        pairs = zip(value if isinstance(value, tuple) else (value,), case.expected, strict=True)
        return all(_is_near(actual.double(), wanted, unit) for actual, wanted in pairs)
    out, lse = case.expected
    actual = value[1][:, :, 0] if case.problem.pair_lse else value[1]
    return bool(
        ((value[0].double() - out).abs() <= 4 * unit * (1 + out.abs())).all()
        and torch.isclose(actual.double(), lse.double(), rtol=1e-5, atol=2e-5).all()
    )


def _is_near(actual: torch.Tensor, wanted: torch.Tensor, unit: float) -> bool:
    """Return True for a gradient that differs by roundings: in all, and in its rows."""
    error = actual - wanted
    by_row = error.norm(dim=-1) <= 8 * unit * wanted.norm(dim=-1) + unit * wanted.abs().max()
    return bool(error.norm() <= 1.5 * unit * wanted.norm() and by_row.all())


def verdict(case: Case, source: str, seed: int) -> str:
    """Return the verdict of a run: `right`, `wrong`, or the fault."""
    try:
        checks, _ = results(case, source, seed=seed)
    except Fault as fault:
        return str(fault)
    return "right" if is_right(case, checks) else "wrong"


def statements(source: str) -> list[tuple[int, str]]:
    """Return the lines of a file that synchronise or move data, with their places."""
    lines = enumerate(source.splitlines())
    return [(at, line) for at, line in lines if SYNCHRONISES.match(line)]


def left_out(case: Case) -> tuple[int, dict[str, int]]:
    """Leave out each of these lines in turn, under four schedules; return how many there are, and
    those without which a run was right."""
    lines, spared = case.source.splitlines(), dict[str, int]()
    every = statements(case.source)
    for at, line in every:
        indent = line[: len(line) - len(line.lstrip())]
        changed = "\n".join([*lines[:at], f"{indent}pass", *lines[at + 1 :]])
        if "right" in {verdict(case, changed, seed) for seed in range(4)}:
            spared[line.strip()] = spared.get(line.strip(), 0) + 1
    return len(every), spared


SYNCHRONISES = re.compile(
    r"\s+(mbarrier\.(wait|arrive|expect|init)|fence_async_shared|tma\.store_wait|_tma_|_turn\(|"
    r"_pass_turn\(|q\w*\.store|[kv]_place\.reshape|tl\.store)"
)
