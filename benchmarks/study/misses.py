"""Count the misses of emitted kernels in a simulated cache, beside the words that formulas give.

The fast memory of the theorems is a cache of M bytes here: least recently used, and associative in
full, since the theorems know no sets. cachegrind simulates it as its last level. A first level of
16 lines before it hides almost no access from it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import Environment
from benchmarks.study.tiles import moved_bytes
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.spec import Direction
from tilegen.problem import AttentionProblem

LINE = 64
"""Bytes of a cache line."""
WORD = 4
"""Bytes of an element: all points are fp32, so that every element is one word."""
FLUSHES = 4
"""Bytes written before the first launch, over those of the cache: no input is in it."""
SCHEDULES = {"large": "FlashAttention's", "small": "small-cache"}


@dataclass(frozen=True, kw_only=True)
class Point:
    """The tiles of a schedule, for a problem and a cache."""

    direction: Direction
    mask: str
    seqlen: int
    head_dim: int
    memory_kb: int
    schedule: str
    tiles: str
    """Kernels with their tiles: `fwd_scores 64x64x32, fwd_values 64x16x128`."""

    @property
    def problem(self) -> AttentionProblem:
        """One head in fp32."""
        shape = f"q{self.seqlen} kv{self.seqlen} d{self.head_dim}"
        return AttentionProblem.parse(f"b1 hq1 hkv1 {shape} fp32 {self.mask}")

    @property
    def configs(self) -> dict[Kernel, TileConfig]:
        """The tiles, by kernel."""
        preprocess = {"bwd_preprocess": TileConfig(block_m=64, block_n=16)}
        before = preprocess if self.direction == "backward" else {}
        return {**before, **tiles_of(self.tiles)}


@dataclass(frozen=True, kw_only=True)
class MissRow(Environment):
    """The counted misses of a pass beside formulas, all in bytes."""

    direction: str
    mask: str
    seqlen: int
    head_dim: int
    memory_kb: int
    d2_over_m: float
    """d^2 over M in words."""
    schedule: str
    tiles: str
    state_kb: float
    """State of a program of the largest kernel: tiles, packed operands, and streamed rows."""
    fits: bool
    """True if the state fits the cache."""
    counted_bytes: int
    """Lines that missed, in bytes; lines that are written back do not count again."""
    counted_load_bytes: int
    counted_store_bytes: int
    predicted_bytes: int
    """Bytes that the kernels load and store by the model, which finds nothing in the cache that an
    earlier program loaded."""
    counted_over_predicted: float
    lower_bound_bytes: int
    """The best of the bounds with constants: LB1, LB1G, LB2, inputs and outputs once."""
    theorem_bytes: int
    """The paper's formula, without its constant: Saha and Ye forward, Li et al. backward and
    masked."""
    best_known_bytes: float | None
    """Ideal tiles of this schedule at this M, leading terms; empty for masks."""
    seconds: float
    valgrind: str


def tiles_of(text: str) -> dict[Kernel, TileConfig]:
    """Parse kernels with their tiles, such as `fwd_scores 64x64x32, fwd_values 64x16x128`."""
    configs: dict[Kernel, TileConfig] = {}
    for part in text.split(", "):
        kernel, sides = part.split()
        rows, columns, *depth = map(int, sides.split("x"))
        configs[kernel] = TileConfig(block_m=rows, block_n=columns, block_d=sum(depth))
    return configs


def missing() -> str:
    """Return the reason why nothing can be counted here; empty if points can be counted."""
    from benchmarks.study import replay
    from tilegen import cpu

    if shutil.which("valgrind") is None:
        return "valgrind is not installed; run apt-get install valgrind"
    if program := replay.missing():
        return f"{program} is not installed; run apt-get install gcc binutils"
    return cpu.why_not_compiled()


def valgrind_version() -> str:
    """Return valgrind's version, such as `valgrind-3.19.0`."""
    command = ["valgrind", "--version"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def count(point: Point) -> dict[str, Any]:
    """Count a point; return the columns of MissRow that are measured or predicted."""
    from benchmarks.study import replay
    from tilegen.cpu.target import AVX2  # valgrind knows no AVX-512

    problem, configs = replay.realized(point.problem), point.configs
    recorded = replay.record(problem, configs, AVX2)
    memory = 1024 * point.memory_kb
    with tempfile.TemporaryDirectory() as folder:
        program = replay.build(recorded, Path(folder), FLUSHES * memory)
        ran, loaded = (_misses(program, times, memory) for times in (1, 0))
    counted = [LINE * (launched - without) for launched, without in zip(ran, loaded, strict=True)]
    state = max(
        made.scratch_bytes + WORD * streamed_words(kernel, configs[kernel], point.head_dim)
        for kernel, made in recorded.objects.items()
    )
    predicted = sum(moved_bytes(problem, configs).values())
    return {
        "d2_over_m": WORD * point.head_dim**2 / memory,
        "state_kb": state / 1024,
        "fits": state <= memory,
        "counted_bytes": counted[0],
        "counted_load_bytes": counted[1],
        "counted_store_bytes": counted[2],
        "predicted_bytes": predicted,
        "counted_over_predicted": counted[0] / predicted,
        **_formulas(point, problem),
    }


def streamed_words(kernel: Kernel, config: TileConfig, head_dim: int) -> int:
    """Return the words that pass a program's state in a step of its loop."""
    rows, columns, depth = config.block_m, config.block_n, config.block_d
    match kernel:
        case "fwd" | "bwd_dq":
            return 2 * columns * head_dim
        case "bwd_dkdv":
            return 2 * rows * head_dim
        case "fwd_scores" | "bwd_scores":
            return (rows + columns) * depth
        case "fwd_values" | "bwd_rows":
            return columns * (rows + depth)
        case "bwd_columns":
            return rows * (columns + depth)
        case _:
            return 0


def _formulas(point: Point, problem: AttentionProblem) -> dict[str, Any]:
    from benchmarks.study import closed
    from tilegen.gpus.spec import gpu
    from tilegen.model import bounds
    from tilegen.model.mask_size import size_of
    from tilegen.model.symbols import Z_A, Z_AX, Z_S, Z_X, M, N, P, Z, d
    from tilegen.task import PassTask
    from tilegen.theory.regimes import complexity, worst_case_over_instances

    seqlen, dim, words = point.seqlen, point.head_dim, 256 * point.memory_kb
    # The device gives only M and P, which are replaced.
    task = PassTask(direction=point.direction, problem=problem, device=gpu("h200"))
    values: Mapping[Any, Any] = bounds.bound_values(task) | {M: words, P: 1}
    each = [bound.subs(values) for bound in bounds.bounds_of(point.direction).values()]
    best: float | None = None
    if point.mask == "full":
        theorem = complexity(point.direction).subs({N: seqlen, d: dim, M: words})
        ideal = closed.ideal_large if point.schedule == "large" else closed.ideal_small
        best = WORD * seqlen**2 * ideal(point.direction, words, dim, WORD)
    else:
        entries, inputs = size_of(task).entries, seqlen * dim
        nonzeros = {Z: 2 * inputs, Z_A: inputs, Z_AX: inputs, Z_X: dim**2, Z_S: entries, M: words}
        theorem = worst_case_over_instances(point.direction).subs(nonzeros)
    return {
        "lower_bound_bytes": int(max(map(float, each))),
        "theorem_bytes": int(WORD * float(theorem)),
        "best_known_bytes": best,
    }


def _misses(program: Path, times: int, memory: int) -> list[int]:
    """Return the misses of the last level: all, of loads, of stores."""
    command = [
        *("valgrind", "--tool=cachegrind", "--cache-sim=yes", "--cachegrind-out-file=/dev/null"),
        # Code must not take room of the last level, which holds data alone in the model.
        f"--I1={1 << 18},8,{LINE}",
        f"--D1={16 * LINE},16,{LINE}",
        f"--LL={memory},{memory // LINE},{LINE}",
        *(str(program), str(times)),
    ]
    ran = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, check=False)
    numbers = re.search(r"LLd misses:\s+([\d,]+) +\( *([\d,]+) rd +\+ +([\d,]+) wr", ran.stderr)
    if ran.returncode or numbers is None:
        raise RuntimeError(f"valgrind ended with {ran.returncode}: {ran.stderr[-1500:]}")
    return [int(number.replace(",", "")) for number in numbers.groups()]


def serve() -> None:
    """Count the point that the first argument describes, and print the columns as JSON."""
    print(json.dumps(count(Point(**json.loads(sys.argv[1])))))
