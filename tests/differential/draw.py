"""Problem number i of a seed."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.differential import trial
from tests.differential.language import Writer
from tests.differential.problems import DENSE, Layout, Problem, reads
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS

LAYOUTS: tuple[Layout, ...] = ("dense", "inside", "padded", "sliced", "expanded", "transposed")
HEAD_DIMS = (8, 12, 16, 16, 16, 24, 32, 32, 40, 64, 72)
COUNTS = (
    *[(1, 1, 1)] * 4, *[(2, 1, 1)] * 2, *[(1, 2, 1)] * 2, *[(1, 1, 2)] * 3,
    (3, 1, 1), (1, 3, 1), (1, 1, 3), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 2, 3), (2, 2, 2),
)  # fmt: skip
"""Batch, key/value heads, query heads of each: mostly few, as the interpreter runs them in turn."""
ATTEMPTS = 100


def draw(seed: int, number: int) -> Problem:
    """Return a problem that PyTorch has a clear answer to."""
    reason: Exception | None = None
    for attempt in range(ATTEMPTS):
        random = Random(f"{seed} {number} {attempt}")
        problem = _drawn(random)
        try:
            with trial.alarm(trial.SECONDS):
                question = trial.Question(problem)
        except Exception as error:  # unclear, or what PyTorch does not take, such as `(3).abs()`
            reason = error
            continue
        if question.answers[0].keeps_any or random.random() < 0.2:
            return problem
    raise RuntimeError(f"no clear problem {number} of seed {seed}") from reason


def _drawn(random: Random) -> Problem:
    batch, heads_kv, group = random.choice(COUNTS)
    rows = _length(random)
    head_dim = random.choice(HEAD_DIMS)
    head_dim_v = head_dim if random.random() < 0.6 else random.choice(HEAD_DIMS)
    if random.random() < 0.02:  # of short sequences, since these take long in the interpreter
        head_dim, rows = random.choice([128, 192, 256]), random.randint(1, 20)
    flex = random.random() < 0.15
    writer = Writer(random)
    mask, score = _texts(random, writer, flex)
    square = "neighborhood" in mask or "cu_seqlens" in mask
    tables = writer.tables
    backward = random.random() < 0.75
    in_score = [name for name, text in reads(score, tables).items() if _trains(text)]
    in_mask = reads(mask, tables)
    trained = [name for name in in_score if name not in in_mask and random.random() < 0.6]
    tensors = [text for text in tables.values() if "(" in text]
    return Problem(
        batch=batch,
        heads=heads_kv * group,
        heads_kv=heads_kv,
        rows=rows,
        columns=rows if square or head_dim > 72 or random.random() < 0.5 else _length(random),
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=random.choice(["fp32", "fp32", "fp16", "bf16"]),
        mask=mask,
        score=score,
        tables=tables,
        trained=tuple(trained) if backward else (),
        layouts=DENSE if random.random() < 0.5 else tuple(random.choices(LAYOUTS, k=4)),
        configs={} if flex or random.random() < 0.12 else _configs(random),
        call="flex" if flex else "attention",
        scale=random.choice([None] * 8 + [0.5, 0.05, -0.3, 0.0]),
        backward=backward,
        trains_lse=backward and random.random() < 0.3,
        changed=bool(tensors) and not (flex and in_mask) and random.random() < 0.3,
        seed=random.randrange(1000),
    )


def _trains(text: str) -> bool:
    return text.startswith(("floats", "positive"))


def _length(random: Random) -> int:
    return random.choice([random.randint(1, 8), random.randint(1, 40), random.randint(30, 80)])


def _texts(random: Random, writer: Writer, flex: bool) -> tuple[str, str]:
    """Return source texts of a mask and a score; most problems have one of both."""
    wants_mask, wants_score = random.choice(
        [(True, False)] * 4 + [(False, True)] * 3 + [(True, True)] * 2
    )
    depth = random.choice([1, 2, 2, 3, 3, 4])
    mask, score = "full()", ""
    if wants_mask:
        mask = (
            f"predicate(lambda b, h, q, k: {writer.write('cond', depth)})"
            if flex
            else writer.write("mask", depth)
        )
    if wants_score:
        score = (
            f"score(lambda s, b, h, q, k: {writer.write('score', depth)})"
            if flex
            else writer.write("scores", depth)
        )
    return mask, score


def _configs(random: Random) -> dict[str, str]:
    """Return kernels of one forward and one backward, each with tiles of its own."""

    def tiles(kernel: Kernel) -> str:
        knobs = KERNELS[kernel].knobs
        sizes = (knobs.block_m, knobs.block_n, knobs.block_d)
        m, n, d = (random.choice([s for s in each if s <= 64] or each[:1]) for each in sizes)
        described = bool(KERNELS[kernel].described) and m < n  # of all tiles, as good as at random
        return TileConfig(block_m=m, block_n=n, block_d=d, descriptors=described).key

    forward: Any = random.choice([("fwd",), ("fwd_streamed",), ("fwd_scores", "fwd_values")])
    backward: Any = random.choice(
        [("bwd_dkdv", "bwd_dq")] * 2 + [("bwd_scores", "bwd_columns", "bwd_rows")]
    )
    found = {kernel: tiles(kernel) for kernel in (*forward, *backward)}
    m = random.choice([16, 32, 64])
    return found | {"bwd_preprocess": TileConfig(block_m=m, block_n=16).key}
