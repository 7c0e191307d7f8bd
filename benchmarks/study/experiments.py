"""Cases of the experiments on a GPU, and what the model says that they should find.

A case is one process under the profiler; several cases together may decide one thing. E2 is the
study without a GPU, E7 to E12 are not here. tilegen emits no fused kernel, and E1's problems split
no keys, so E1 does without both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest

from benchmarks.study.tiles import FAMILIES
from tilegen.choose.ranker import propose
from tilegen.errors import Unsupported
from tilegen.gpus.spec import GpuSpec, with_fast_memory
from tilegen.gpus.spec import gpu as gpu_named
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.panels import SCORE_WIDTH, rows_for
from tilegen.kernels.registry import BACKWARD, FORWARD
from tilegen.kernels.spec import Direction
from tilegen.model.dram import levels
from tilegen.model.traffic import Traffic, traffic_of
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled

EXPERIMENTS = {
    "E1": "wire bytes of every kernel equal the formula within 3 % (N of 4096 and more)",
    "E3": "the forward family that should move fewest wire bytes does",
    "E4": "the backward family that should move fewest wire bytes does; exponentials as predicted",
    "E5": "the same with shared memory capped at 48, 64, 99 and 163 KB",
    "E6": "DRAM bytes equal the model of L2 within 10 %",
}
WIRE_TOLERANCE, DRAM_TOLERANCE, EXP_TOLERANCE = 0.03, 0.10, 0.20
EXACT_FROM = 4096
PEERS = ("sdpa-flash", "sdpa-cudnn", "flex")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One process that the profiler watches."""

    experiment: str
    group: str
    """Name that cases which are compared with each other have in common."""
    problem: str
    provider: str
    """Name of who computes: tilegen, or one of PEERS."""
    family: str = ""
    configs: Mapping[str, str] | None = None
    """Keys of configs by kernel; libraries have none."""
    panel_rows: int = 1

    @property
    def name(self) -> str:
        """The case in one line."""
        return " ".join(filter(None, (self.experiment, self.group, self.provider, self.family)))

    def to_json(self) -> str:
        """Return the text that `from_json` reads: an argument of the process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Return the case that `to_json` wrote."""
        return cls(**json.loads(text))

    @property
    def tiles(self) -> dict[Kernel, TileConfig]:
        """The configs of a case of tilegen."""
        texts: Mapping[str, str] = self.configs or {}
        return {kernel: TileConfig.parse(key) for kernel, key in texts.items()}  # pyright: ignore[reportReturnType]


def predicted(case: Case) -> dict[Kernel, Traffic]:
    """Return the bytes between L2 and SMs that each kernel of a case should move."""
    problem, tiles = AttentionProblem.parse(case.problem), case.tiles
    width = tiles["fwd_scores"].block_n if "fwd_scores" in tiles else SCORE_WIDTH
    return {
        kernel: traffic_of(
            Tiled.of(kernel, problem, gpu_named("h200"), config),
            panel_rows=case.panel_rows,
            score_width=width,
        )
        for kernel, config in tiles.items()
    }


def predicted_dram(case: Case, gpu: GpuSpec) -> dict[Kernel, int]:
    """Return the bytes between DRAM and L2 that each kernel of a case should move."""
    problem = AttentionProblem.parse(case.problem)
    return {
        kernel: levels(Tiled.of(kernel, problem, gpu, config)).dram_bytes
        for kernel, config in case.tiles.items()
    }


# --------------------------------------------------------------------------------------------------
# Cases


def cases(gpu: GpuSpec, only: Sequence[str] = ()) -> list[Case]:
    """Return every case, of each experiment in turn, so that a time limit costs all of them."""
    makers = {"E1": _e1, "E3": _e3, "E4": _e4, "E5": _e5, "E6": _e6}
    chosen = [list(make(gpu)) for name, make in makers.items() if not only or name in only]
    return [case for case in chain(*zip_longest(*chosen)) if case is not None]


def _e1(gpu: GpuSpec) -> Iterator[Case]:
    for seqlen, head_dim in ((8192, 128), (4096, 64), (4096, 256), (1024, 128), (32768, 128)):
        problem = _dense(seqlen, head_dim)
        for kernels, side in ((FORWARD["q_stationary"].names, 0), (BACKWARD["two_pass"].names, 1)):
            for rank, configs in enumerate(_different(problem, gpu, kernels)):
                group = f"N={seqlen} d={head_dim} {'bwd' if side else 'fwd'} {rank}"
                yield _ours("E1", group, problem, configs, "", gpu)
        if (seqlen, head_dim) == (8192, 128):
            for peer in PEERS:
                yield _peer("E1", f"N={seqlen} d={head_dim}", problem, peer)


def _e3(gpu: GpuSpec) -> Iterator[Case]:
    for head_dim in (512, 256, 1024, 128):
        yield from _families("E3", _dense(4096, head_dim), "forward", gpu)
        if head_dim <= 256:
            for peer in PEERS:
                yield _peer("E3", f"d={head_dim}", _dense(4096, head_dim), peer)


def _e4(gpu: GpuSpec) -> Iterator[Case]:
    for head_dim in (512, 256, 128):
        yield from _families("E4", _dense(4096, head_dim), "backward", gpu)


def _e5(gpu: GpuSpec) -> Iterator[Case]:
    for head_dim in (256, 512, 128):
        for kilobytes in (48, 99, 64, 163):
            if kilobytes * 1024 > gpu.smem_per_block:
                continue
            capped = with_fast_memory(gpu, kilobytes * 1024)
            problem = _dense(2048, head_dim)
            yield from _families("E5", problem, "forward", capped, note=f" {kilobytes} KB")


def _e6(gpu: GpuSpec) -> Iterator[Case]:
    for seqlen_kv in (8192, 65536, 2048, 131072, 32768, 262144):
        problem = AttentionProblem.parse(f"b1 hq8 hkv8 q4096 kv{seqlen_kv} d128 bf16 full")
        for rank, configs in enumerate(
            _different(problem, gpu, FORWARD["q_stationary"].names, most=2)
        ):
            yield _ours("E6", f"N_kv={seqlen_kv} {rank}", problem, configs, "", gpu)


def _dense(seqlen: int, head_dim: int) -> AttentionProblem:
    return AttentionProblem.parse(f"b1 hq2 hkv2 q{seqlen} kv{seqlen} d{head_dim} bf16 full")


def _families(
    experiment: str,
    problem: AttentionProblem,
    direction: Direction,
    gpu: GpuSpec,
    note: str = "",
) -> Iterator[Case]:
    """Yield a case for each family that fits, with the tiles that move least."""
    for family, spec in FAMILIES[direction].items():
        if spec.why_not(problem, gpu.arch):
            continue
        try:
            configs: dict[Kernel, TileConfig] = {
                kernel: _thriftiest(problem, gpu, kernel) for kernel in spec.names
            }
        except Unsupported:
            continue
        group = f"d={problem.head_dim_qk}{note}"
        yield _ours(experiment, group, problem, configs, family, gpu)


def _thriftiest(problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel) -> TileConfig:
    """Return the tiles that move the fewest bytes, of those that should fit and not spill."""
    candidates = propose(KernelTask.of(kernel, problem, gpu), top=200)
    return min(
        candidates,
        key=lambda one: (one.estimate.read_bytes + one.estimate.write_bytes, one.estimate.seconds),
    ).config


def _different(
    problem: AttentionProblem, gpu: GpuSpec, kernels: Sequence[Kernel], most: int = 3
) -> Iterator[dict[Kernel, TileConfig]]:
    """Yield up to `most` sets of configs; each kernel's differ in the side that stays."""
    choices: dict[Kernel, list[TileConfig]] = {}
    for kernel in kernels:
        by_side: dict[int, TileConfig] = {}
        for candidate in propose(KernelTask.of(kernel, problem, gpu), top=200):
            side = candidate.config.block_n if kernel == "bwd_dkdv" else candidate.config.block_m
            by_side.setdefault(side, candidate.config)
        choices[kernel] = list(by_side.values())
    for rank in range(min(most, max(map(len, choices.values())))):
        yield {kernel: of[min(rank, len(of) - 1)] for kernel, of in choices.items()}


def _ours(
    experiment: str, group: str, problem: AttentionProblem,
    configs: Mapping[Kernel, TileConfig], family: str, gpu: GpuSpec,
) -> Case:  # fmt: skip
    way: Direction = "forward" if next(iter(configs)).startswith("fwd") else "backward"
    keys = {kernel: config.key for kernel, config in configs.items()}
    rows = rows_for(problem, gpu, way)
    return Case(
        experiment=experiment, group=group, problem=problem.key, provider="tilegen",
        family=family, configs=keys, panel_rows=rows,
    )  # fmt: skip


def _peer(experiment: str, group: str, problem: AttentionProblem, peer: str) -> Case:
    return Case(experiment=experiment, group=group, problem=problem.key, provider=peer)
