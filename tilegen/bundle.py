"""Ahead of time: emitted kernels and binaries for a list of problems, with one manifest. No GPU
needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilegen.build import CompiledKernel, compile_many, first_that_fits
from tilegen.config import Kernel, TileConfig
from tilegen.device import catalogue
from tilegen.disk import write_whole
from tilegen.emitted import RenderedKernel, representative, rows_are_aligned, template_digest
from tilegen.errors import InvalidProblem, TilegenError, Unsupported
from tilegen.families import kernels_of
from tilegen.problem import AttentionProblem
from tilegen.propose import propose
from tilegen.render import render
from tilegen.store import look_up

if TYPE_CHECKING:
    from tilegen.device import GpuSpec

MANIFEST = "manifest.json"
SCHEMA = 1

# The GPU whose tiles an architecture gets where nobody names one.
_TYPICAL = {
    "sm_70": "v100",
    "sm_75": "t4",
    "sm_80": "a100",
    "sm_86": "rtx3090",
    "sm_89": "rtx4090",
    "sm_90": "h200",
    "sm_100": "b200",
    "sm_120": "rtx5090",
    "gfx942": "mi300x",
}
TRIED = 5
"""Proposals compiled at once for a kernel without a record; the best that fits is taken."""


def gpu_for(arch: str) -> GpuSpec:
    """Return the GPU that stands for an architecture. Raises Unsupported."""
    for spec in catalogue():
        if spec.name == _TYPICAL.get(arch):
            return spec
    raise Unsupported(f"arch must be one of {', '.join(_TYPICAL)}, got {arch!r}")


def read_catalogue(path: Path) -> list[AttentionProblem]:
    """Return the problems of a file: one notation per line, `#` starts a comment.

    Raises InvalidProblem naming the line, or Unsupported where the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Unsupported(
            f"expected a text file of problems, cannot read {path}: {error}"
        ) from None
    problems: list[AttentionProblem] = []
    for number, line in enumerate(lines, 1):
        if text := line.split("#")[0].strip():
            try:
                problems.append(AttentionProblem.parse(text))
            except TilegenError as error:
                raise InvalidProblem(f"{path}, line {number}: {error}") from None
    if not problems:
        raise InvalidProblem(f"expected at least one problem in {path}, found none")
    return problems


def generate(
    problems: Sequence[AttentionProblem],
    gpus: Sequence[GpuSpec],
    out: Path,
    *,
    kernels: Sequence[Kernel] | None = None,
    on_kernel: Callable[[dict[str, Any]], None] = lambda entry: None,
) -> Path:
    """Write kernels, binaries and manifest under `out` and return the manifest's path.

    `kernels` default to those that compute each problem. The config of each kernel is that of its
    record, else the model's best that compiles without spilling. The same inputs and versions give
    the same bytes. Raises BuildFailed.
    """
    entries: list[dict[str, Any]] = []
    for spec in gpus:
        for problem in problems:
            for kernel in kernels or kernels_of(problem, spec):
                compiled, origin = compile_best(problem, spec, kernel)
                entry = _write(compiled, problem, spec, origin, out)
                entries.append(entry)
                on_kernel(entry)
    manifest = {"schema": SCHEMA, "versions": _versions(), "kernels": entries}
    path = out / MANIFEST
    write_whole(path, (json.dumps(manifest, indent=2) + "\n").encode())
    return path


def compile_best(
    problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel
) -> tuple[CompiledKernel, str]:
    """Return the binary of the config to use and where the config comes from. Raises
    BuildFailed."""
    found = look_up(problem, gpu, kernel, template_digest=template_digest(kernel))
    if found:
        configs, origin = [found.record.config], "record"
    else:
        configs = [c.config for c in propose(problem, gpu, kernel=kernel, top=TRIED)]
        origin = "model"
    built = dict(compile_many([render(problem, config, kernel) for config in configs], gpu.arch))
    outcome = {rendered.config: result for rendered, result in built.items()}
    return first_that_fits([outcome[config] for config in configs], gpu), origin


def _write(
    compiled: CompiledKernel, problem: AttentionProblem, gpu: GpuSpec, origin: str, out: Path
) -> dict[str, Any]:
    rendered = compiled.rendered
    stem = f"{rendered.function}_{problem.dtype}_g{problem.group_size}_{rendered.digest[:8]}"
    source, binary = f"kernels/{stem}.py", f"{compiled.arch}/{stem}.{compiled.extension}"
    write_whole(out / source, rendered.source.encode())
    write_whole(out / binary, compiled.binary)
    return {
        "kernel": rendered.kernel,
        "problem": problem.key,
        "serves": representative(problem).key,
        "gpu": gpu.name,
        "arch": compiled.arch,
        "config": asdict(rendered.config),
        "config_from": origin,
        "function": rendered.function,
        "source": source,
        "binary": binary,
        "aligned": rows_are_aligned(problem),
        "arguments": [{"name": name, "type": type_} for name, type_ in rendered.signature],
        "grid": _grid(rendered, rendered.config),
        "threads": 32 * rendered.config.num_warps,
        "shared_bytes": compiled.shared_bytes,
        "registers": compiled.registers,
        "spill_bytes": compiled.spill_bytes,
        "digest": rendered.digest,
        "template_digest": template_digest(rendered.kernel),
    }


def _grid(rendered: RenderedKernel, config: TileConfig) -> str:
    """Return the grid of one launch; for small-cache kernels, of one panel."""
    problem = rendered.problem
    rows, columns = f"ceil(num_rows / {config.block_m})", f"ceil(seqlen_kv / {config.block_n})"
    match rendered.kernel:
        case "bwd_dkdv":
            return f"{columns} * num_heads_kv * batch"
        case "fwd_scores" | "bwd_scores":
            return f"{rows} * {columns} * num_heads"
        case "fwd_values":
            return f"{rows} * {-(-problem.head_dim_v // config.block_d)} * num_heads"
        case "bwd_rows":
            return f"{rows} * {-(-problem.head_dim_qk // config.block_d)} * num_heads"
        case "bwd_columns":
            heads = f"ceil(num_heads / {problem.group_size})"
            return f"ceil(head_dim / {config.block_d}) * {columns} * {heads}"
        case _:
            return f"ceil(seqlen_q / {config.block_m}) * num_heads_q * batch"


def _versions() -> dict[str, str]:
    import triton

    import tilegen

    return {"tilegen": tilegen.__version__, "triton": triton.__version__}
