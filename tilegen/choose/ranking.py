"""From problem and GPU to ranked configs, with the reason for each. Needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from tilegen.choose.fastest import REGISTER_DOUBT, SMEM_DOUBT, KernelModel
from tilegen.choose.reason import reason_of
from tilegen.disk import say_once
from tilegen.errors import Unsupported
from tilegen.gpus.nearest import on_tensor_cores
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS, family_with
from tilegen.kernels.split_kv import FWD_SPLIT
from tilegen.model.as_compiled import clocks_as_compiled
from tilegen.model.estimate import Candidate, CostEstimate
from tilegen.model.footprint import footprint
from tilegen.model.time import Time
from tilegen.problem import AttentionProblem
from tilegen.sympy_lock import one_at_a_time

if TYPE_CHECKING:
    from tilegen.model.resources import Resources


@one_at_a_time
def propose(
    problem: AttentionProblem,
    gpu: GpuSpec,
    *,
    kernel: Kernel = "fwd",
    top: int = 10,
    describable: bool = True,
) -> list[Candidate]:
    """Return up to `top` candidates for a problem's normal form, best first, all predicted to fit.
    Raises Unsupported.

    A dtype that the tensor cores of the GPU do not take is ranked by its multiply-adds, which is
    said once. A config ranks by its time and the traffic of what it is predicted to spill; configs
    that surely spill more than a usable kernel come where there is nothing else. Tensor descriptors
    are proposed for tiles that would spill without, and not where tensors are not `describable`.
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise Unsupported(f"top must be an int of at least 1, got {top!r}")
    return _best(_model(problem.normal(), gpu, kernel, describable), top, spilling=True)


@lru_cache(maxsize=1024)
def best_of(problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel) -> Candidate:
    """Return the first candidate of `propose`. Raises Unsupported."""
    return propose(problem, gpu, kernel=kernel, top=1)[0]


@one_at_a_time
def invariant_config(problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel) -> TileConfig:
    """Return the config by which a kernel computes all batch-invariant problems that differ in
    batch, lengths and pages only: kernels for whole and for paged keys add up alike. Raises
    Unsupported."""
    alike = FWD_SPLIT.name if KERNELS[kernel].splits else kernel
    one = replace(problem.rounded, page=0)
    return propose(one, gpu, kernel=alike, top=1, describable=False)[0].config


@one_at_a_time
def hopefuls(
    problem: AttentionProblem,
    gpu: GpuSpec,
    *,
    kernel: Kernel,
    top: int,
    describable: bool = True,
) -> list[Candidate]:
    """Return up to `top` candidates as `propose` does, but in the order of their times without
    spilling, which are their estimates: a compiler that is asked about one after the other has
    found the best as soon as what it found is no slower than the next can be."""
    return _best(_model(problem.normal(), gpu, kernel, describable), top, spilling=False)


def _best(model: KernelModel, top: int, *, spilling: bool) -> list[Candidate]:
    problem, gpu = model.problem, model.gpu
    if problem.dtype == "bf16" and not on_tensor_cores("bf16", gpu.arch):
        say_once(
            f"{gpu.title} ({gpu.arch}) has no tensor cores for bf16: products run as fp32 "
            f"multiply-adds, at {gpu.vector_flops_32 / gpu.tensor_flops_16:.0%} of the speed of "
            "fp16; use fp16, or a GPU from sm_80 on"
        )
    best = model.fastest(top, spilling=spilling) or model.last_resort(top)
    if not best:
        raise Unsupported(_nothing_fits(model))
    return [_candidate(problem, gpu, model.cost(*one)) for one in best]


@one_at_a_time
def time_as_compiled(
    problem: AttentionProblem,
    gpu: GpuSpec,
    config: TileConfig,
    kernel: Kernel,
    built: Resources,
    *,
    stages: int | None = None,
) -> Time:
    """Return the predicted time of a config with what the compiler says that it uses, and with what
    its machine code issues in a step, where that could be told.

    What was compiled may have another number of stages, `stages`: then shared memory, which alone
    hangs on it, is as predicted.
    """
    model = _model(problem.normal(), gpu, kernel)
    needs = model.needs(config)
    used = needs.as_compiled(built)
    if stages not in (None, config.num_stages):
        used = replace(used, smem_bytes=needs.smem_bytes)
    code = built.step_code
    return model.time(config, used, clocks_as_compiled(code, gpu) if code else None)


def seconds_as_compiled(
    problem: AttentionProblem, gpu: GpuSpec, config: TileConfig, kernel: Kernel, built: Resources
) -> float:
    """Return the seconds of `time_as_compiled`."""
    return time_as_compiled(problem, gpu, config, kernel, built).seconds


def search_space(problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel) -> list[TileConfig]:
    """Return everything a tuner may try: what fits, and what only compiling can tell."""
    return [
        config
        for config, needs in KernelModel(problem.normal(), gpu, kernel).footprints
        if needs.fits(gpu, doubt=SMEM_DOUBT)
        and needs.registers <= REGISTER_DOUBT * needs.max_registers
    ]


def ranked_space(
    problem: AttentionProblem,
    gpu: GpuSpec,
    kernel: Kernel,
    space: Sequence[TileConfig] | None = None,
) -> tuple[list[TileConfig], list[Candidate]]:
    """Return what a tuner tries, in the model's order, and the model's candidates among it.

    `space` defaults to all that fits, and to what the model proposes where nothing fits well.
    """
    candidates = propose(problem, gpu, kernel=kernel, top=2**16)
    if space is None:
        space = search_space(problem, gpu, kernel)
    else:
        legal = set(space)
        candidates = [one for one in candidates if one.config in legal]
    return list(dict.fromkeys([*(one.config for one in candidates), *space])), candidates


def estimate(
    problem: AttentionProblem,
    gpu: GpuSpec,
    config: TileConfig,
    kernel: Kernel = "fwd",
    *,
    joined: TileConfig | None = None,
) -> CostEstimate:
    """Return what the model predicts for one config, legal or not; `joined` is the config of the
    kernel whose splits this one joins, where it is not the model's own."""
    model = _model(problem.normal(), gpu, kernel, joined=joined)
    needs = model.needs(config)
    return model.cost(model.time(config, needs), config, needs)


def candidate_of(
    problem: AttentionProblem, gpu: GpuSpec, config: TileConfig, kernel: Kernel
) -> Candidate:
    """Return a config as `propose` would, wherever it ranks."""
    return _candidate(problem.normal(), gpu, estimate(problem, gpu, config, kernel))


def _model(
    problem: AttentionProblem,
    gpu: GpuSpec,
    kernel: Kernel,
    describable: bool = True,
    *,
    joined: TileConfig | None = None,
) -> KernelModel:
    joined = joined or joined_splits(problem, gpu, kernel)
    return KernelModel(problem, gpu, kernel, joined=joined, describable=describable)


def joined_splits(problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel) -> TileConfig | None:
    """Return the model's config of the kernel whose splits a kernel joins, None for kernels that
    join none. Raises Unsupported."""
    if not KERNELS[kernel].joins:
        return None
    names = family_with(kernel, problem).names
    return best_of(problem, gpu, names[names.index(kernel) - 1]).config


def surely_spills(problem: AttentionProblem, gpu: GpuSpec, candidate: Candidate) -> bool:
    """True for a candidate that surely spills more registers than a usable kernel may."""
    return footprint(problem, candidate.config, candidate.kernel, gpu.arch).surely_spills


def _candidate(problem: AttentionProblem, gpu: GpuSpec, cost: CostEstimate) -> Candidate:
    return Candidate(
        kernel=cost.kernel, config=cost.config, estimate=cost, reason=reason_of(problem, gpu, cost)
    )


def _nothing_fits(model: KernelModel) -> str:
    problem, gpu = model.problem, model.gpu
    smallest = min(needs.smem_bytes for _, needs in model.footprints)
    return (
        f"expected a {model.kernel} tile within {gpu.smem_per_block} bytes of shared memory on "
        f"{gpu.name}, found none for {problem.key}: the smallest needs {smallest}"
    )
