"""Render text from templates: `render` emits one specialised kernel as a readable Python file.

This module computes and the templates print: every name in a template is a field of the context
built in `_context`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilegen.emit.arguments import Arguments
from tilegen.emit.helpers import Helper
from tilegen.emit.identity import (
    LAUNCH_TEMPLATE,
    RenderedKernel,
    kernel_digest,
    representative,
    rows_are_aligned,
    stride_unit,
    template_digest,
    template_folders,
)
from tilegen.emit.launch import MARK, EmittedLaunch
from tilegen.errors import Unsupported
from tilegen.kernels.arguments import DROPOUT, SINKS
from tilegen.kernels.config import OPTIONS, Kernel, TileConfig, head_dim_chunks, launched_warps
from tilegen.kernels.descriptors import why_not_described
from tilegen.kernels.launch_order import heavy_end, rows_together
from tilegen.kernels.registry import KERNELS, check_config, family_with, grid_of, tile_heads
from tilegen.kernels.spec import KernelSpec
from tilegen.kernels.split_kv import FILLING, usual_tiles
from tilegen.masks.apart import guard_of
from tilegen.masks.grouping import heads_of_tiles
from tilegen.masks.score_source import ScoreSource, score_source
from tilegen.masks.source import columns_source, extras, keep_source, ranges_source
from tilegen.problem import AttentionProblem

if TYPE_CHECKING:
    import jinja2

MAX_NAME = 60
"""Maximum letters that a mask may add to the name of a function."""
STAY = "{ .reg .pred p; setp.lt.f32 p, $1, 0fBF800000; @p nanosleep.u32 1; mov.f32 $0, $1; }"
"""Assembly that returns its operand, which is not below -1. ptxas moves neither the assembly nor
what it needs beyond a wait."""
TANH = "tanh.approx.f32 $0, $1;"
"""Assembly of a hyperbolic tangent, which errs by up to 2**-11 of its result."""
_TRITON_DTYPES = {"fp16": "tl.float16", "bf16": "tl.bfloat16", "fp32": "tl.float32"}


@dataclass(frozen=True)
class Chunk:
    """A power-of-two slice of a head dim, as the templates see it."""

    suffix: str  # "" for a single chunk, else "_0", "_1"
    first: int  # its first column
    start: str  # "" or "64 + "
    width: int
    offs: str  # name of its offsets vector
    exists: str  # name of its bounds vector, where padded
    limit: str  # constant the offsets stay below
    padded: bool


@dataclass(frozen=True)
class Slices:
    """A head dim in slices of BLOCK_D columns, as the templates see it."""

    limit: str  # constant that is the width of the head dim
    padded: bool  # True if the last slice reaches beyond that
    and_exists: str  # "" or " & d_exists[None, :]"
    only_exists: str  # "" or ", mask=d_exists[None, :], other=0.0"


def render(
    problem: AttentionProblem,
    config: TileConfig,
    kernel: Kernel = "fwd",
    *,
    aligned: bool | None = None,
) -> RenderedKernel:
    """Render the kernel for a problem's class: problems of any batch, heads and lengths share one
    text.

    With `aligned=False`, addresses and strides need not be multiples of 16 bytes; by default the
    head dims decide, as for dense tensors. Raises Unsupported for a config of another kind of
    kernel, for descriptors that are not allowed, and for a mask that the compiler cannot solve.
    """
    spec = KERNELS[kernel]
    check_config(config, kernel)
    if spec.packs and config.heads not in (1, *heads_of_tiles(problem)):
        allowed = " or ".join(f"h{heads}" for heads in heads_of_tiles(problem))
        raise Unsupported(
            f"use {allowed} or no h in {config.key}: a tile holds heads of a group of "
            f"{problem.group_size}, where mask and score are the same for them"
        )
    if problem.dropout and "dropout" not in family_with(kernel).supports:
        raise Unsupported(
            f"{kernel} does not support dropout, got '{problem.key}'; leave dropout out"
        )
    if aligned is None:
        aligned = rows_are_aligned(problem)
    reason = why_not_described(spec, problem.dtype, aligned=aligned)
    if config.descriptors and reason:
        raise Unsupported(f"remove t from {config.key}: {reason}")
    templates = environment(*template_folders(kernel))
    context = _context(replace(problem, mask=problem.mask.general), config, spec, aligned)
    texts = (
        templates.get_template(name).render(context) for name in (spec.template, LAUNCH_TEMPLATE)
    )
    source = re.sub(r"\n{4,}", "\n\n\n", "\n\n".join(texts)).strip() + "\n"
    return rendered_as(source, problem, config, kernel, aligned=aligned)


def rendered_as(
    source: str, problem: AttentionProblem, config: TileConfig, kernel: Kernel, *, aligned: bool
) -> RenderedKernel:
    """Return the kernel whose text `render` returned, in this or in another process."""
    spec, general = KERNELS[kernel], replace(problem, mask=problem.mask.general)
    arguments = _arguments(general, config, spec, _change_of_scores(general, spec))
    return RenderedKernel(
        kernel=kernel,
        problem=problem,
        config=config,
        aligned=aligned,
        digest=kernel_digest(problem, config, kernel, aligned),
        function=_function_name(general, config, spec),
        source=source,
        signature=arguments.types(problem.dtype),
    )


@lru_cache(maxsize=8)
def environment(*folders: Path) -> jinja2.Environment:
    """Create the Jinja environment of templates in some folders. A misspelt name raises an error
    when rendered."""
    import jinja2  # not needed where emitted files are read from disk

    from tilegen.emit.whole_lines import WholeLines

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([str(one) for one in folders]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        extensions=[WholeLines],
    )


def _context(
    problem: AttentionProblem, config: TileConfig, spec: KernelSpec, aligned: bool
) -> dict[str, Any]:
    side = spec.stationary
    unit = stride_unit(problem, aligned)
    function = _function_name(problem, config, spec)
    ranges = ranges_source(problem.mask, side, in_part=spec.loop.in_part)
    if "pages" in spec.supports and ranges.form == "lists":
        raise Unsupported(
            f"keys in pages have no lists of tiles, which mask {problem.mask} needs; use the "
            f"problem's normal form, '{problem.normal()}'"
        )
    keep = keep_source(problem.mask, side, softmax="out" in spec.checked_by)
    change = _change_of_scores(problem, spec)
    divided = spec.divides(problem)
    arguments = _arguments(problem, config, spec, change)
    return {
        "header": _header(problem, config, spec, aligned, unit),
        "function": function,
        "problem": problem,
        "config": config,
        "dtype": _TRITON_DTYPES[problem.dtype],
        # Triton's default for fp32 operands is TF32, with 10 bits of mantissa.
        "precision": ', input_precision="ieee"' if problem.dtype == "fp32" else "",
        "log2_e": repr(math.log2(math.e)),
        "ln_2": repr(math.log(2.0)),
        "stride_unit": unit,
        "stride_why": ", so that the compiler sees 16-byte alignment" if aligned else "",
        "aligned": aligned,
        "qk_chunks": _chunks(problem.head_dim_qk, "qk"),
        "v_chunks": _chunks(problem.head_dim_v, "v"),
        "qk_dim": _slices("HEAD_DIM_QK", problem.head_dim_qk, config),
        "v_dim": _slices("HEAD_DIM_V", problem.head_dim_v, config),
        "ranges": ranges,
        "heavy_first": heavy_end(problem.mask, spec),
        "rows_in_l2": rows_together(problem),
        "heads_per_read": "" if side == "columns" else " * GROUP_SIZE",
        "keep": keep,
        "keep_columns": columns_source(problem.mask) if side == "columns" else None,
        "guard": guard_of(problem, spec),
        "per_head": side == "columns" and ranges.per_head,
        "needs_head": keep.per_head,
        "arguments": arguments,
        "mark": MARK,
        "launch": EmittedLaunch(
            spec=spec,
            arguments=arguments,
            config=config,
            grid=grid_of(spec.name, config, problem.group_size),
            unit=unit,
            pairs=problem.pair_lse,
        ),
        "score": change,
        "pairs": problem.pair_lse,
        "sinks": _has_sinks(problem, spec),
        "dropout": spec.draws(problem),
        "needs_log2_e": problem.pair_lse or _has_sinks(problem, spec),
        "tests_tile": spec.panel == "writes",
        "paged": "pages" in spec.supports,
        "divided": divided,
        "usual_tiles": usual_tiles(problem, config) if divided else 0,
        "filling": FILLING,
        "values_in_keys": spec.values_in_keys(problem),
        "tile_heads": tile_heads(config, problem.group_size),
        "stays": side,
        "in_part": spec.loop.in_part,
        "helper": Helper,
        "specialised": spec.specialised,
        "launched_warps": launched_warps(config, specialised=spec.specialised),
        "decorator": "@gluon.jit" if spec.specialised else "@triton.jit",
        "stay": STAY,
        "persists": spec.persists,
        "tanh": TANH,
        "chunked": _chunked,
    }


def _change_of_scores(problem: AttentionProblem, spec: KernelSpec) -> ScoreSource:
    if "scores" not in spec.supports:
        return ScoreSource()
    return score_source(
        problem.score,
        trains="training" in spec.supports,
        precise=problem.dtype == "fp32",
        side=spec.stationary,
        tanh="_tanh" if spec.specialised else "",
    )


def _arguments(
    problem: AttentionProblem, config: TileConfig, spec: KernelSpec, change: ScoreSource
) -> Arguments:
    added = (*extras(problem.mask, spec.stationary), *change.extras) if spec.masked else ()
    added += (SINKS,) if _has_sinks(problem, spec) else ()
    added += (DROPOUT,) if spec.draws(problem) else ()
    in_keys = spec.values_in_keys(problem)
    absent = [one.name for one in spec.tensors.values() if in_keys and one.alias]
    return Arguments.of(spec, config, problem.head_dims, added, bool(change.forward), absent)


def _has_sinks(problem: AttentionProblem, spec: KernelSpec) -> bool:
    return "sinks" in spec.supports and problem.score is not None and problem.score.sinks


def _header(
    problem: AttentionProblem, config: TileConfig, spec: KernelSpec, aligned: bool, unit: int
) -> str:
    strides = f"strides multiples of {unit} elements" if aligned else "any strides"
    usual = representative(problem)
    dims = f"{problem.head_dim_qk}/{problem.head_dim_v}"
    flag = "" if aligned else " --unaligned"
    score = f"{problem.score.notation},\n          " if problem.score else ""
    score += "dropout, " if problem.dropout else ""
    score += "batch-invariant, " if spec.keeps_order(problem) else ""
    score += f"pages of {problem.page} keys, " if "pages" in spec.supports else ""
    score += "values in keys, " if spec.values_in_keys(problem) else ""
    key = usual.key.replace(" score(", "\n          score(")
    tile, options = (
        " ".join(
            (spec.split_name if name == "split_kv" else name)
            + ("" if value is True else f"={value}")
            for name, value in config.values.items()
            if OPTIONS[name].is_tile == is_tile
        )
        for is_tile in (True, False)
    )
    return f'''"""{spec.title}

Generated by tilegen. Do not edit: change the template or the config and render again.

problem   head_dim {dims}, {problem.dtype}, group size {problem.group_size}, mask {problem.mask},
          {score}{strides}; any batch, heads and lengths
config    {tile} {options}
template  {spec.template} @ {template_digest(spec.name)}
rerender  tilegen show "{key}"
          --kernel {spec.name} --config {config.key}{flag}
"""'''


def _function_name(problem: AttentionProblem, config: TileConfig, spec: KernelSpec) -> str:
    dims = f"d{problem.head_dim_qk}" + (
        "" if problem.head_dim_qk == problem.head_dim_v else f"v{problem.head_dim_v}"
    )
    if not spec.masked:
        only_values = all(one.head_dim != "qk" for one in spec.tensors.values())
        dims = f"d{problem.head_dim_v}" if only_values else dims
        return f"attention_{spec.name}_{dims}_m{config.block_m}"
    notation = problem.mask.notation.replace("-1", "inf").lower()
    mask = re.sub(r"[^a-z0-9]+", "_", notation).strip("_")
    mask = mask[:MAX_NAME].rstrip("_")
    tile = config.key.partition("w")[0] + ("t" if config.descriptors else "")
    return f"attention_{spec.name}_{dims}_{mask}_{tile}"


def _chunks(head_dim: int, kind: str) -> tuple[Chunk, ...]:
    widths = head_dim_chunks(head_dim)
    chunks: list[Chunk] = []
    start = 0
    for i, width in enumerate(widths):
        suffix = f"_{i}" if len(widths) > 1 else ""
        chunks.append(
            Chunk(
                suffix=suffix,
                first=start,
                start=f"{start} + " if start else "",
                width=width,
                offs=f"offs_{kind}{suffix}",
                exists=f"{kind}_exists{suffix}",
                limit=f"HEAD_DIM_{kind.upper()}",
                padded=start + width > head_dim,
            )
        )
        start += width
    return tuple(chunks)


def _chunked(name: str, chunks: Sequence[Chunk]) -> str:
    """Return the variables of a name, one for each chunk."""
    return ", ".join(name + one.suffix for one in chunks)


def _slices(limit: str, head_dim: int, config: TileConfig) -> Slices:
    padded = config.block_d > 0 and head_dim % config.block_d > 0
    return Slices(
        limit=limit,
        padded=padded,
        and_exists=" & d_exists[None, :]" if padded else "",
        only_exists=", mask=d_exists[None, :], other=0.0" if padded else "",
    )
