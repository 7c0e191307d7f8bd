"""Predict the time of a kernel on one core of a processor: a few physical terms with weights.

A term is the time that its work would take at the processor's rates. Weights, in cpu_weights.toml,
say how far compiled kernels are from these rates. They were fitted to sweeps on one processor; the
rates of cpus.toml carry them over to others.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from operator import mul
from typing import Any

import numpy as np

from tilegen.cpu.choice import MOST_OF_THIN
from tilegen.cpus.spec import CpuSpec
from tilegen.kernels.loops import Step
from tilegen.model.columns import Number, floats, in_columns
from tilegen.model.formulas import computed
from tilegen.model.launches import launches
from tilegen.model.terms import PROCESSOR
from tilegen.model.traffic import Traffic, traffic
from tilegen.task import Tiled

TERMS = {name: words for name, (_, words) in PROCESSOR.items()}
"""The terms of a prediction, in words."""
FORMULAS = {name: formula for name, (formula, _) in PROCESSOR.items()}
"""The terms of a prediction, as formulas."""
UNFITTED = "inputs"
"""The term whose weight is 1: no sweep of tiles tells it apart, since it is the same for all."""
COLUMNS = 64
"""Columns of a microkernel at full rate, for vectors of 16 elements."""
EDGE = 8
"""Columns that a product on a mask's edge computes beyond it, in the mean: about half a vector of
panels and half a block of rows."""
LAUNCH_SECONDS = 20e-6
"""Time of a launch from Python [s]."""
THREADS = (1, 2, 4, 8, 16)
"""Numbers of threads that a choice must suit. A machine of n threads counts as 1/n: a guess, by
which 8 programs cost 3 % of the time, 4 cost 16 %, and 2 cost 55 %."""
HALF = 0.5
"""Part of a cache that what streams past may fill, to be there for the next program."""


@dataclass(frozen=True)
class Level:
    """A level of memory behind a faster one."""

    name: str
    fast_bytes: int
    """Size of the next faster level [bytes]."""
    bandwidth: float
    """Rate at which a core reads from the level [bytes/s]."""


def levels_of(spec: CpuSpec) -> tuple[Level, Level, Level]:
    """Return the levels behind a core's L1, the fastest first."""
    return (
        Level("L2", spec.l1_bytes, spec.l2_bandwidth),
        Level("L3", spec.l2_bytes, spec.l3_bandwidth),
        Level("memory", spec.l3_bytes, spec.dram_bandwidth),
    )


def stream_bytes(tiled: Tiled) -> Number:
    """Return the bytes that a head streams. A kernel that passes over its rows once streams all of
    a launch."""
    streams = tiled.task.lengths[1] * tiled.spec.streamed_bytes(tiled.problem)
    return streams or bytes_of(traffic(tiled))


def source_of(tiled: Tiled, spec: CpuSpec) -> Number:
    """Return the place in `levels_of` that streams come from: the smallest cache that holds the
    streams of a head."""
    return place_of(stream_bytes(tiled), spec)


def place_of(streams: Number, spec: CpuSpec) -> Number:
    """Return the place in `levels_of` of the smallest cache that holds some streams [bytes]."""
    return 1 * (streams > HALF * spec.l2_bytes) + 1 * (streams > HALF * spec.l3_bytes)


def _bandwidth(place: Number, spec: CpuSpec) -> Number:
    rates = np.array([level.bandwidth for level in levels_of(spec)])
    return rates[np.asarray(place, dtype=np.int64)]


def traffic_seconds(tiled: Tiled, spec: CpuSpec) -> Number:
    """Return the time to move a launch's bytes, at the rate of the level that streams come from."""
    return floats(bytes_of(traffic(tiled))) / _bandwidth(source_of(tiled, spec), spec)


def first_seconds(tiled: Tiled, spec: CpuSpec) -> Number:
    """Return the time that the first reading of a launch's streams takes beyond `traffic_seconds`:
    the streams of all heads may lie in a slower level than those of a head."""
    task = tiled.task
    heads = task.heads_q // task.heads_of_group
    streams: Any = floats(np.minimum(heads * stream_bytes(tiled), bytes_of(traffic(tiled))))
    first, later = place_of(streams, spec), source_of(tiled, spec)
    return np.maximum(0.0, streams / _bandwidth(first, spec) - streams / _bandwidth(later, spec))


def bytes_of(moved: Traffic) -> Number:
    """Return the bytes of a launch in both directions."""
    return moved.read_bytes + moved.write_bytes


def state_bytes(step: Step, tiled: Tiled, word: int) -> Number:
    """Return the bytes that a step works on: operands that stay, results, scores and panels, whose
    words have `word` bytes."""
    packed = step.columns * sum(step.streamed) * _packings(step)
    panels = word * (step.kept + packed)
    if tiled.spec.shares:  # dQ in memory
        panels += 4 * step.columns * tiled.problem.head_dim_qk
    return panels + 4 * (step.result_words + (step.score_tiles + 1) * step.scores)


def step_bytes(tiled: Tiled) -> Number:
    """Return the bytes that a step works on, in words of the products."""
    problem = tiled.problem
    paired = _cpu(tiled).pairs and problem.dtype == "bf16"
    return state_bytes(tiled.step, tiled, problem.element_bytes if paired else 4)


@in_columns
def terms_of(tiled: Tiled) -> dict[str, Number]:
    """Return the time of each of TERMS with a weight of 1 [s], on one core."""
    spec, problem, step, run = _cpu(tiled), tiled.problem, tiled.step, launches(tiled)
    added = step.result_words if step.rescales else 0
    if tiled.spec.shares:
        added = step.columns * problem.head_dim_qk
    facts = {
        "rate": spec.product_flops(problem.dtype),
        "elements": spec.product_flops_32 / 2,
        "exp2_rate": spec.exp2_rate,
        "l1_bytes": spec.l1_bytes,
        "l2_bytes": spec.l2_bytes,
        "l2_bandwidth": spec.l2_bandwidth,
        "l3_bandwidth": spec.l3_bandwidth,
        "microkernel": COLUMNS * spec.lanes / 16,
        "steps": floats(run.steps),
        "partial": floats(run.partial),
        "programs": floats(run.programs),
        "stopped": stopped(tiled),
        "multiply_adds": step.multiply_adds,
        "to_scores": 2.0 * sum(one.times * one.multiply_adds * one.scores for one in step.products),
        "columns": step.columns,
        "width": sum(step.streamed),
        "packings": _packings(step),
        "tile_scores": step.scores,
        "result_words": step.result_words,
        "added": added,
        "packed": 1 - is_thin(tiled),
        "state": step_bytes(tiled),
        "moving": traffic_seconds(tiled, spec),
        "first": first_seconds(tiled, spec),
    }
    terms = computed(FORMULAS, facts)
    return {name: terms[name] + 0 * facts["steps"] for name in FORMULAS}


def stopped(tiled: Tiled) -> Number:
    """Return the part of a partial tile's products that are left out. The edge of a causal mask or
    a window halves the square of the longer side that tiles on it make up."""
    if tiled.problem.mask.window is None:
        return 0.0
    longer = np.maximum(tiled.step.rows, np.maximum(tiled.step.columns, 1))
    return (1 - is_thin(tiled)) * np.maximum(0.0, 0.5 - EDGE / longer)


def is_thin(tiled: Tiled) -> Number:
    """Check whether a forward has so few queries that nothing is packed.

    Tiles of few rows of many queries read keys from a cache again and again, which takes about as
    long as packing them."""
    rows, queries = tiled.step.rows, tiled.task.lengths[0]
    if tiled.task.direction != "forward":
        return 0
    return 1 * ((tiled.step.scores > 0) & (rows <= MOST_OF_THIN) & (queries <= rows))


def weighted(tiled: Tiled) -> dict[str, Number]:
    """Return the predicted time of each term [s]."""
    weights, terms = weights_of(tiled), terms_of(tiled)
    return {name: weights[name] * terms[name] for name in TERMS}


def seconds_of(tiled: Tiled) -> Number:
    """Predict the time of a launch on one thread [s]."""
    return LAUNCH_SECONDS + sum(weighted(tiled).values())


def idle_factor(programs: Number) -> Number:
    """Return the makespan over the work, averaged over THREADS with weights 1/threads. A choice
    must not depend on the threads of this machine."""
    weights = [1 / threads for threads in THREADS]
    idle = [rounds_over_work(programs, threads) for threads in THREADS]
    return sum(map(mul, weights, idle)) / sum(weights)


def rounds_over_work(programs: Number, threads: int) -> Number:
    """Return the time of a number of threads over their work, for equally long programs."""
    return threads * -(-programs // threads) / programs


def weights_of(tiled: Tiled) -> Mapping[str, float]:
    """Return the weights of a kernel's terms."""
    spec, problem = _cpu(tiled), tiled.problem
    paired = spec.pairs and problem.dtype == "bf16"
    return _weights()[tiled.task.direction, "pairs" if paired else "fp32"]


def _packings(step: Step) -> float:
    """Return how often a streamed tile is packed: by each product that reads it, but as a left
    operand only once more."""
    return min(2.0, step.reads)


def _cpu(tiled: Tiled) -> CpuSpec:
    assert isinstance(tiled.device, CpuSpec), tiled.device
    return tiled.device


@cache
def _weights() -> dict[tuple[str, str], dict[str, float]]:
    """Load cpu_weights.toml: weights by pass and products."""
    text = (files("tilegen.model") / "cpu_weights.toml").read_text(encoding="utf-8")
    rows = tomllib.loads(text)["weights"]
    return {
        (row["pass"], row["operands"]): {
            name: 1.0 if name == UNFITTED else row.get(name, 0.0) for name in TERMS
        }
        for row in rows
    }
