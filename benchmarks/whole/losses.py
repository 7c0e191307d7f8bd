"""Losses of fifty steps with each attention, beside those of eager attention in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.environment import Environment
from benchmarks.whole.training import Case, Training, why_not

CASES = (
    Case(model="gpt2-tiny", batch=4, seqlen=128, dtype="fp32"),
    Case(model="gpt2-tiny", batch=4, seqlen=128, dtype="fp32", features=frozenset({"documents"})),
    Case(model="llama-tiny", batch=2, seqlen=300, dtype="fp32", features=frozenset({"window"})),
    Case(model="bert-tiny", batch=4, seqlen=128, dtype="fp32"),
    Case(model="classifier-tiny", batch=4, seqlen=128, dtype="fp32"),
)
"""Small models of each family, without dropout: each attention drops other weights."""
STEPS, SEEDS = 50, 3
MOST_OF_SDPA = 2.0
"""Deviation that is right, of SDPA's at the same dtype."""


@dataclass(frozen=True, kw_only=True)
class LossRow(Environment):
    """Losses of a case with one attention."""

    case: str
    attention: str
    steps: int
    seeds: int
    deviation: float
    """Largest difference from the losses of eager attention in fp32, over all steps and seeds."""
    noise: float
    """Largest difference between two such runs with the same seed."""
    of_sdpa: float
    """The deviation over SDPA's at the same dtype, which counts as a rounding of the loss at
    least."""
    last_loss: float


def compare(
    case: Case,
    attentions: Sequence[str],
    device: str,
    *,
    steps: int = STEPS,
    seeds: int = SEEDS,
) -> Iterator[LossRow]:
    """Yield the distance of each attention's losses from eager attention's in fp32."""
    deviations: dict[str, float] = {}
    noise: dict[str, float] = {}
    last: dict[str, float] = {}
    able = [name for name in attentions if not why_not(name, device)]
    rounding = 0.0
    for seed in range(seeds):
        seeded = replace(case, seed=seed)
        exact = Training(replace(seeded, dtype="fp32"), "eager", device).steps(steps)
        rounding = max(rounding, torch.finfo(torch.float32).eps * max(exact))
        for attention in able:
            training = Training(seeded, attention, device)
            losses = training.steps(steps)
            training.begin()
            again = training.steps(steps)
            deviations[attention] = max(deviations.get(attention, 0.0), _apart(losses, exact))
            noise[attention] = max(noise.get(attention, 0.0), _apart(losses, again))
            last[attention] = losses[-1]
    for attention in able:
        yield LossRow(
            case=case.key,
            attention=attention,
            steps=steps,
            seeds=seeds,
            deviation=deviations[attention],
            noise=noise[attention],
            of_sdpa=deviations[attention] / max(deviations["sdpa"], rounding),
            last_loss=last[attention],
        )


def _apart(first: Sequence[float], second: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(first, second, strict=True))
