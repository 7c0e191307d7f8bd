"""Made-up recordings, for as long as there are few real ones: the model's times with known errors.

They exercise the search and show how far it depends on the model; they say nothing about any GPU.
Every recording names its error in `source`, which starts with `synthetic`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.recordings import Recording, new_session
from benchmarks.workloads import head
from tilegen.choose.ranker import estimate, search_space
from tilegen.gpus.spec import GpuSpec, gpu
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.model.footprint import footprint
from tilegen.problem import AttentionProblem
from tilegen.store.trials import Trial
from tilegen.task import KernelTask, Tiled
from tilegen.tuning.measure import Measurement

SPREAD = 0.005
"""Distance of p20 and p80 from the median, relative to the median."""
FAILING_LAUNCHES = 0.02
"""Share of the configs that fail although they fit."""

Logs = NDArray[np.float64]
Error = Callable[[Logs, Logs, np.random.Generator], Logs]
"""`error(knobs, predicted, rng)`: the logarithms of the times. `predicted` holds those of the
model; `knobs` one row per config: block_m, block_n, warps, stages, each from -1 to 1."""


def good(knobs: Logs, predicted: Logs, rng: np.random.Generator) -> Logs:
    """The model, 15 % off in a smooth way, and 6 % from config to config."""
    return predicted + 0.15 * _smooth(knobs, rng) + 0.06 * rng.standard_normal(len(knobs))


def biased(knobs: Logs, predicted: Logs, rng: np.random.Generator) -> Logs:
    """The good model, blind to what makes large tiles and deep pipelines up to 7 times slower."""
    slope = 0.6 * (1 + knobs[:, 0]) + 0.3 * (1 + knobs[:, 1]) + 0.1 * (1 + knobs[:, 3])
    return good(knobs, predicted, rng) + slope


def useless(knobs: Logs, predicted: Logs, rng: np.random.Generator) -> Logs:
    """A smooth landscape that the model knows nothing about, as wide as the predicted one."""
    smooth = _smooth(knobs, rng)
    scale = predicted.std() / max(float(smooth.std()), 1e-9)
    return predicted.mean() + scale * smooth + 0.04 * rng.standard_normal(len(knobs))


ERRORS: dict[str, Error] = {
    "synthetic: good model": good,
    "synthetic: biased model": biased,
    "synthetic: useless model": useless,
}
JOBS: tuple[tuple[str, Kernel], ...] = (("h200", "fwd"), ("h200", "bwd_dkdv"), ("a100", "fwd"))


def recordings(problems: Sequence[AttentionProblem] = ()) -> Iterator[Recording]:
    """Yield the set, the same on every machine; `problems` default to the catalogue's head."""
    for source in ERRORS:
        for name, kernel in JOBS:
            for problem in problems or [workload.problem for workload in head()]:
                yield make(source, problem.bucket, gpu(name), kernel)


def make(source: str, problem: AttentionProblem, spec: GpuSpec, kernel: Kernel) -> Recording:
    """Return one made-up recording; `source` is a key of ERRORS."""
    digest = hashlib.sha256(f"{source} {problem.key} {spec.name} {kernel}".encode()).digest()
    rng = np.random.default_rng(list(digest))
    space = search_space(KernelTask.of(kernel, problem, spec))
    knobs = np.array([_knobs(config) for config in space])
    seconds = [estimate(Tiled.of(kernel, problem, spec, config)).seconds for config in space]
    times = 1e6 * np.exp(ERRORS[source](knobs, np.log(seconds), rng))
    lucky = rng.random(len(space)) >= FAILING_LAUNCHES
    trials: dict[TileConfig, Trial] = {}
    for config, us, runs in zip(space, times, lucky, strict=True):
        needs = footprint(Tiled.of(kernel, problem, spec, config))
        if not needs.fits(spec) or needs.surely_spills:
            measurement = Measurement(status="out_of_resources", message="made up")
        elif not runs:
            measurement = Measurement(status="launch_failed", message="made up")
        else:
            low, median, high = (round(float(us) * f, 3) for f in (1 - SPREAD, 1, 1 + SPREAD))
            measurement = Measurement(
                status="ok", median_us=median, p20_us=low, p80_us=high, repeats=20
            )
        trials[config] = Trial(config=config, measurement=measurement)
    session = new_session(spec, kernel, problem, len(space))
    return Recording(session=replace(session, source=source), trials=trials)


def _knobs(config: TileConfig) -> tuple[float, ...]:
    return (
        (math.log2(config.block_m) - 6) / 2,  # 16..256
        (math.log2(config.block_n) - 6) / 2,
        2 * math.log2(config.num_warps) - 5,  # 4, 8
        (config.num_stages - 2.5) / 1.5,  # 1..4
    )


def _smooth(knobs: Logs, rng: np.random.Generator) -> Logs:
    """Return a random smooth function of the knobs: all products of up to two, of size one."""
    squares = [knobs[:, i] * knobs[:, j] for i in range(4) for j in range(i + 1)]
    features = np.stack([*knobs.T, *squares], axis=1)
    values = features @ rng.standard_normal(features.shape[1])
    return (values - values.mean()) / max(float(values.std()), 1e-9)
