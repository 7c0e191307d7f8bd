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

from tilegen.cpu.thin import MOST_ROWS as THIN_ROWS
from tilegen.cpus.spec import CpuSpec
from tilegen.kernels.loops import Step
from tilegen.model.launches import launches
from tilegen.model.traffic import Traffic, traffic
from tilegen.task import Tiled

TERMS = {
    "products": "matrix products, in whole tiles",
    "narrow": "products of less than a microkernel's columns",
    "packing": "packing operands into panels",
    "scores": "exponentials and sums of scores",
    "masks": "mask code of tiles on an edge",
    "sums": "rescaling and adding up results",
    "moved": "reading what streams past",
    "l1": "what a step works on beyond L1",
    "l2": "what a step works on beyond L2",
    "program": "beginning and end of programs",
    "inputs": "reading inputs where they lie",
}
"""The terms of a prediction, in words."""
UNFITTED = "inputs"
"""The term whose weight is 1: no sweep of tiles tells it apart, since it is the same for all."""
COLUMNS = 64
"""Columns of a microkernel at full rate, for vectors of 16 elements."""
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


def stream_bytes(tiled: Tiled) -> int:
    """Return the bytes that a head streams. A kernel that passes over its rows once streams all of
    a launch."""
    streams = tiled.task.lengths[1] * tiled.spec.streamed_bytes(tiled.problem)
    return streams or bytes_of(traffic(tiled))


def source_of(tiled: Tiled, spec: CpuSpec) -> int:
    """Return the place in `levels_of` that streams come from: the smallest cache that holds the
    streams of a head."""
    return place_of(stream_bytes(tiled), spec)


def place_of(streams: int, spec: CpuSpec) -> int:
    """Return the place in `levels_of` of the smallest cache that holds some streams [bytes]."""
    return (streams > HALF * spec.l2_bytes) + (streams > HALF * spec.l3_bytes)


def traffic_seconds(tiled: Tiled, spec: CpuSpec) -> float:
    """Return the time to move a launch's bytes, at the rate of the level that streams come from."""
    return bytes_of(traffic(tiled)) / levels_of(spec)[source_of(tiled, spec)].bandwidth


def first_seconds(tiled: Tiled, spec: CpuSpec) -> float:
    """Return the time that the first reading of a launch's streams takes beyond `traffic_seconds`:
    the streams of all heads may lie in a slower level than those of a head."""
    task = tiled.task
    heads = task.heads_q // task.heads_of_group
    streams = min(heads * stream_bytes(tiled), bytes_of(traffic(tiled)))
    levels = levels_of(spec)
    first, later = levels[place_of(streams, spec)], levels[source_of(tiled, spec)]
    return max(0.0, streams / first.bandwidth - streams / later.bandwidth)


def bytes_of(moved: Traffic) -> int:
    """Return the bytes of a launch in both directions."""
    return moved.read_bytes + moved.write_bytes


def state_bytes(step: Step, tiled: Tiled, word: int) -> float:
    """Return the bytes that a step works on: operands that stay, results, scores and panels, whose
    words have `word` bytes."""
    packed = step.columns * sum(step.streamed) * _packings(step)
    panels = word * (step.kept + packed)
    if tiled.spec.shares:  # dQ in memory
        panels += 4 * step.columns * tiled.problem.head_dim_qk
    return panels + 4 * (step.result_words + (step.score_tiles + 1) * step.scores)


def step_bytes(tiled: Tiled) -> float:
    """Return the bytes that a step works on, in words of the products."""
    problem = tiled.problem
    paired = _cpu(tiled).pairs and problem.dtype == "bf16"
    return state_bytes(tiled.step, tiled, problem.element_bytes if paired else 4)


def terms_of(tiled: Tiled) -> dict[str, float]:
    """Return the time of each of TERMS with a weight of 1 [s], on one core."""
    spec, problem, step, run = _cpu(tiled), tiled.problem, tiled.step, launches(tiled)
    steps, partial = float(run.steps), float(run.partial)
    rate = spec.product_flops(problem.dtype)
    elements = spec.product_flops_32 / 2
    flops = 2.0 * step.multiply_adds * steps
    to_scores = sum(2.0 * one.multiply_adds for one in step.products if one.scores)
    columns = COLUMNS * spec.lanes / 16
    narrow = max(0.0, columns / max(step.columns, 1) - 1) * to_scores
    added = step.result_words if step.rescales else 0
    if tiled.spec.shares:
        added = step.columns * problem.head_dim_qk
    state = step_bytes(tiled)
    moved, inputs = traffic_seconds(tiled, spec), first_seconds(tiled, spec)
    packing = step.columns * sum(step.streamed) * _packings(step) * steps / elements
    if is_thin(tiled):
        # Nothing is packed, and products wait for memory.
        moved, inputs, packing, narrow = 0.0, moved + inputs, 0.0, 0.0
    return {
        "products": flops / rate,
        "narrow": narrow * steps / rate,
        "packing": packing,
        "scores": step.scores * steps / spec.exp2_rate,
        "masks": step.scores * partial / elements,
        "sums": added * steps / elements,
        "moved": moved,
        "l1": max(0.0, state - spec.l1_bytes) * steps / spec.l2_bandwidth,
        "l2": max(0.0, state - spec.l2_bytes) * steps / spec.l3_bandwidth,
        "program": run.programs * step.result_words / elements,
        "inputs": inputs,
    }


def is_thin(tiled: Tiled) -> bool:
    """Check whether a forward has so few queries that nothing is packed.

    Tiles of few rows of many queries read keys from a cache again and again, which takes about as
    long as packing them."""
    rows = tiled.step.rows
    is_forward = tiled.task.direction == "forward" and tiled.step.scores > 0
    return is_forward and rows <= THIN_ROWS and tiled.task.lengths[0] <= rows


def weighted(tiled: Tiled) -> tuple[tuple[str, float], ...]:
    """Return the predicted time of each term [s]."""

    def compute() -> tuple[tuple[str, float], ...]:
        weights, terms = weights_of(tiled), terms_of(tiled)
        return tuple((name, weights[name] * terms[name]) for name in TERMS)

    return tiled.by_tile(f"cpu terms {_cpu(tiled).name}", compute)


def seconds_of(tiled: Tiled) -> float:
    """Predict the time of a launch on one thread [s]."""
    return LAUNCH_SECONDS + sum(seconds for _, seconds in weighted(tiled))


def idle_factor(programs: int) -> float:
    """Return the makespan over the work, averaged over THREADS with weights 1/threads. A choice
    must not depend on the threads of this machine."""
    weights = [1 / threads for threads in THREADS]
    idle = [rounds_over_work(programs, threads) for threads in THREADS]
    return sum(map(mul, weights, idle)) / sum(weights)


def rounds_over_work(programs: int, threads: int) -> float:
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
