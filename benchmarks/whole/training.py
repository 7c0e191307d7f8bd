"""Training of a model with one implementation of attention, step by step."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.whole.models import MODELS, Feature
from benchmarks.whole.share import watched
from tilegen.comparing import memory

LEARNING_RATE = 3e-4


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case of training, without the attention that computes it."""

    model: str
    batch: int
    seqlen: int
    dtype: str
    """fp32, or bf16 by autocast."""
    features: frozenset[Feature] = frozenset()
    seed: int = 0
    """Seed of weights and batches."""

    @property
    def key(self) -> str:
        """The case in a line."""
        return " ".join([self.model, f"b{self.batch} q{self.seqlen}", self.dtype, self.described])

    @property
    def described(self) -> str:
        """The names of its features, `plain` without any."""
        return "+".join(sorted(self.features)) or "plain"


class Training:
    """A model, its optimizer, and the losses so far."""

    def __init__(
        self, case: Case, attention: str, device: str, *, deterministic: bool = False
    ) -> None:
        # cuBLAS reads this when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(deterministic)
        load(attention, device)
        self.case, self.attention, self.device = case, attention, device
        memory.start_over(device)
        self._start = memory.in_use(device)
        self.begin()

    def begin(self) -> None:
        """Make the model anew: the same weights, and the first batch is next."""
        case = self.case
        model = MODELS[case.model].make(self.attention, case.seqlen, case.features, case.seed)
        self.model = model.to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.run: Any = torch.compile(self.model) if "compile" in case.features else self.model
        self.losses: list[float] = []
        torch.manual_seed(1)  # of dropout

    def step(self) -> tuple[float, float]:
        """Train on the next batch; return its time and that of all cores [s]."""
        given = self.batch(len(self.losses))
        self._wait()
        start, busy = time.perf_counter(), time.process_time()
        self.optimizer.zero_grad()
        loss = self.loss(given)
        loss.backward()
        self.optimizer.step()
        self._wait()
        took, busy = time.perf_counter() - start, time.process_time() - busy
        self.losses.append(loss.item())
        return took, busy

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """Return the inputs of a step."""
        case, kind = self.case, MODELS[self.case.model]
        # Steps of one seed have the numbers of no other.
        number = step + 1_000_000 * case.seed
        return kind.batch(number, case.batch, case.seqlen, case.features, self.device)

    def loss(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch, with what its backward needs."""
        with contextlib.ExitStack() as stack:
            if self.case.dtype == "bf16":
                stack.enter_context(torch.autocast(self.device, torch.bfloat16))
            return self.run(**given).loss

    def steps(self, number: int) -> list[float]:
        """Return the losses of `number` steps."""
        for _ in range(number):
            self.step()
        return self.losses[-number:]

    def seen(self) -> list[float]:
        """Return the losses so far."""
        return self.losses

    def share(self) -> float | None:
        """Return the share of a step that attention takes, forward and backward; None for a
        compiled model, whose attention is not a call of its own. Trains on one more batch."""
        if "compile" in self.case.features:
            return None
        with watched(self.attention, self.device) as watch:
            took, _ = self.step()
        return watch.seconds() / took

    def peak(self) -> int:
        """Return the most memory that training has had so far, beyond what it began with."""
        return memory.peak(self.device) - self._start

    def start_over(self) -> None:
        """Begin a new peak: compiling and first calls need memory that training does not."""
        memory.start_over(self.device)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients of the first batch, by parameter."""
        self.optimizer.zero_grad()
        self.loss(self.batch(0)).backward()
        named = self.model.named_parameters()
        return {name: x.grad.detach().clone() for name, x in named if x.grad is not None}

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def load(attention: str, device: str) -> None:
    """Import the modules of an attention implementation, so that loading counts as its start."""
    if attention == "tilegen":
        import tilegen.integrations.transformers  # registers it

        q = torch.ones(1, 1, 16, 16, device=device, requires_grad=True)
        tilegen.attention(q, q, q).sum().backward()  # loads the compiler


def why_not(attention: str, device: str) -> str:
    """Return the reason why an attention implementation cannot train on a device; empty if it
    can."""
    if attention == "flex_attention" and device != "cuda":
        return "FlexAttention has no backward on a CPU"
    return ""
