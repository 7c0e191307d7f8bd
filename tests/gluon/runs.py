"""The forward for Hopper in the memory model: inputs, expected results, and verdicts of runs."""

from __future__ import annotations

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
from tilegen.launch.binding import BoundKernel
from tilegen.masks.form import Shape
from tilegen.masks.tensors import score_tensors, typical_score
from tilegen.problem import AttentionProblem

KERNEL = "fwd_hopper"
TWINS = {STAY: lambda x: x, TANH: function_of(np.tanh)}
"""Functions that compute the results of inline assembly."""


@dataclass(frozen=True)
class Case:
    """A problem and a config; `programs` replaces the number of persistent programs."""

    text: str
    config: str = "m128n64w8s2t"
    programs: int = 0

    def __str__(self) -> str:
        return f"{self.text} {self.config}" + f" {self.programs} programs" * bool(self.programs)

    @cached_property
    def problem(self) -> AttentionProblem:
        """The problem."""
        return AttentionProblem.parse(self.text)

    @cached_property
    def source(self) -> str:
        """The emitted file."""
        text = render(self.problem, TileConfig.parse(self.config), KERNEL).source
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

    @cached_property
    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Out and lse, by PyTorch in fp64."""
        wide = self.inputs.to(torch.float64)
        score = self.score and self.score.with_tensors(lambda x: x.double())
        scale = self.problem.head_dim_qk**-0.5
        return attention_reference(wide.q, wide.k, wide.v, mask=self.mask, score=score, scale=scale)

    def bind(self, launch: Any) -> Any:
        """Return the launch with the tensors that mask and score read."""
        reads = score_tensors(self.score.captured, self.score.sink_logits, {}) if self.score else {}
        bound = BoundKernel(launch, self.problem.mask, KERNEL, TileConfig.parse(self.config))
        q, k = self.inputs.q, self.inputs.k
        return bound.given(self.mask, Shape.of(q, k), q.device, reads)


@cache
def case_of(text: str, config: str = "m128n64w8s2t", programs: int = 0) -> Case:
    """Return a case, whose inputs and expected results are computed once."""
    return Case(text, config, programs)


def results(case: Case, source: str = "", **options: Any) -> tuple[Any, Report]:
    """Launch a case; return the results and the report."""
    x, scale = case.inputs, case.problem.head_dim_qk**-0.5
    return run(source or case.source, x.q, x.k, x.v, scale, twins=TWINS, bind=case.bind, **options)


def is_right(case: Case, value: Any) -> bool:
    """Return True if out and lse are those of fp64, but for roundings of weights and out."""
    out, lse = case.expected
    unit = 2.0**-8 if case.problem.dtype == "bf16" else 2.0**-11
    actual = value[1][:, :, 0] if case.problem.pair_lse else value[1]
    return bool(
        ((value[0].double() - out).abs() <= 4 * unit * (1 + out.abs())).all()
        and torch.isclose(actual.double(), lse.double(), rtol=1e-5, atol=2e-5).all()
    )


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


SYNCHRONISES = re.compile(
    r"\s+(mbarrier\.(wait|arrive|expect|init)|fence_async_shared|tma\.store_wait|_tma_|_turn\(|"
    r"_pass_turn\(|q\w*\.store|tl\.store)"
)
