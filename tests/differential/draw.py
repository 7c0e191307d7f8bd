"""Problem number i of a seed."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.differential import trial
from tests.differential.language import Writer
from tests.differential.problems import DENSE, Call, Layout, Problem, reads
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import FAMILIES
from tilegen.kernels.spec import KernelSpec

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
    calls: list[Call] = ["attention", "flex", "varlen", "paged", "packed pages"]
    (call,) = random.choices(calls, [65, 13, 11, 5, 6])
    flex, paged = call == "flex", call in ("paged", "packed pages")
    writer = Writer(random)
    mask, score = _texts(random, writer, flex)
    square = "neighborhood" in mask or "cu_seqlens" in mask
    columns = rows if square or head_dim > 72 or random.random() < 0.5 else _length(random)
    requests: tuple[tuple[int, int], ...] = ()
    if call in ("varlen", "paged", "packed pages"):
        if square:
            mask = "full()"
        requests = _requests(random, call, rows, columns)
        rows, columns = (max(1, *each) for each in zip(*requests, strict=True))
        batch = len(requests)
    tables, kv_lengths = writer.tables, ""
    if call == "attention" and random.random() < 0.12:
        kv_lengths, dtype = "lengths", random.choice(["int32", "int64"])
        seed = random.randrange(1000)
        tables[kv_lengths] = f'ints({seed}, 0, columns, batch, dtype="{dtype}")'
    backward = not paged and random.random() < 0.75
    dropout = 0.0
    if not flex and not paged and random.random() < 0.12:
        dropout = random.choice([0.1, 0.1, 0.5, 0.9, 1.0])
    latent = not flex and head_dim_v <= head_dim and random.random() < (0.2 if paged else 0.04)
    in_score = [name for name, text in reads(score, tables).items() if _trains(text)]
    in_mask = reads(mask, tables)
    trained = [name for name in in_score if name not in in_mask and random.random() < 0.6]
    tensors = [text for text in tables.values() if "(" in text]
    configs = {} if flex or random.random() < 0.15 else _configs(random, group, paged, dropout > 0)
    return Problem(
        batch=batch,
        heads=heads_kv * group,
        heads_kv=heads_kv,
        rows=rows,
        columns=columns,
        requests=requests,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=random.choice(["fp32", "fp32", "fp16", "bf16"]),
        mask=mask,
        kv_lengths=kv_lengths,
        score=score,
        tables=tables,
        trained=tuple(trained) if backward else (),
        layouts=DENSE if requests or random.random() < 0.5 else tuple(random.choices(LAYOUTS, k=4)),
        configs=configs,
        invariant=not (flex or configs or dropout) and random.random() < 0.5,
        call=call,
        latent=latent,
        page=random.choice([1, 4, 16, 16, 32, 64]) if paged else 0,
        page_layout=random.choice(["NHD", "HND"]) if paged else "NHD",
        compiled=call in ("attention", "varlen") and random.random() < 0.05,
        dropout=dropout,
        scale=random.choice([None] * 8 + [0.5, 0.05, -0.3, 0.0]),
        backward=backward,
        trains_lse=backward and random.random() < 0.3,
        changed=bool(tensors) and not (flex and in_mask) and random.random() < 0.3,
        seed=random.randrange(1000),
    )


def _trains(text: str) -> bool:
    return text.startswith(("floats", "positive"))


def _requests(random: Random, call: Call, rows: int, columns: int) -> tuple[tuple[int, int], ...]:
    """Return the queries and keys of some requests; at times of none, but not of all."""
    count = random.choice([1, 2, 2, 3, 4])
    same = call == "varlen" and random.random() < 0.5  # one length for queries and for keys
    results: list[tuple[int, int]] = []
    for _ in range(count):
        queries = rows if call == "paged" else random.choice([1, rows, random.randint(0, rows)])
        keys = queries if same else random.randint(0, columns)
        results.append((queries, keys))
    if not all(map(sum, zip(*results, strict=True))):
        results[0] = (rows, rows if same else columns)
    return tuple(results)


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


def _configs(random: Random, group: int, paged: bool, drops: bool) -> dict[str, str]:
    """Return kernels of one forward and one backward, each with tiles of its own."""
    kernels: list[KernelSpec] = []
    for families in FAMILIES.values():
        able = [
            one.kernels
            for one in families.values()
            if not any(kernel.specialised for kernel in one.kernels)  # which no processor runs
            and (not drops or "dropout" in one.supports)
            and (one.direction == "backward" or paged == ("pages" in one.supports))
        ]
        kernels += random.choice(able)
    return {one.name: _tiles(random, one, group) for one in kernels}


def _tiles(random: Random, spec: KernelSpec, group: int) -> str:
    sizes = (spec.knobs.block_m, spec.knobs.block_n, spec.knobs.block_d)
    m, n, d = (random.choice([s for s in each if s <= 64] or each[:1]) for each in sizes)
    config = TileConfig(
        block_m=m,
        block_n=n,
        block_d=d,
        descriptors=bool(spec.described) and m < n,  # of all tiles, as good as at random
        split_kv=(m if spec.split_name == "split_q" else n) * random.choice((1, 2, 4))
        if spec.parts
        else 0,
    )
    heads = 1 << (group - 1).bit_length()
    if spec.packs and 1 < heads <= m and random.random() < 0.5:
        config = replace(config, block_m=m // heads, heads=heads)
    return config.key
