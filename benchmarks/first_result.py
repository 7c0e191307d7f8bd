"""Time to a first result on a GPU: from a bundle, and by compiling.

    python -m benchmarks.first_result

Every provider starts in a process of its own with all caches empty. The clock starts once PyTorch
is imported, the GPU is awake and the inputs are there; it stops when the result is. So it counts
what a provider imports, chooses, compiles and loads. The baseline is the bundle.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.environment import ROOT, Environment, gpu_at_hand, gpu_folder
from benchmarks.rows import keep
from benchmarks.workloads import CATALOGUE
from tilegen.check.reference import TORCH_DTYPES
from tilegen.masks import causal
from tilegen.problem import AttentionProblem
from tilegen.tuning.measure import one_line

REPEATS = 3
SIZES = (
    *("batch", "num_heads_q", "num_heads_kv"),
    *("seqlen_q", "seqlen_kv", "head_dim_qk", "head_dim_v"),
)
TIME_LIMIT = 120.0  # seconds for one process
PREPARE = """
import json, sys, time
from types import SimpleNamespace
import torch
sizes, dtype, bundle, backward = json.loads(sys.argv[1])
p, dtype = SimpleNamespace(**sizes), getattr(torch, dtype)
def made(heads, rows, dim):
    shape = p.batch, heads, rows, dim
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=backward)
q = made(p.num_heads_q, p.seqlen_q, p.head_dim_qk)
k = made(p.num_heads_kv, p.seqlen_kv, p.head_dim_qk)
v = made(p.num_heads_kv, p.seqlen_kv, p.head_dim_v)
(q[0, 0] @ k[0, 0].mT).sum().item()
torch.cuda.synchronize()
start = time.perf_counter()
"""
FINISH = """
if backward:
    out.sum().backward()
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""
PROVIDERS = {
    "bundle": """
import tilegen
tilegen.load_bundle(bundle)
out = tilegen.attention(q, k, v, mask=tilegen.causal())
""",
    "tilegen, compiling": """
import tilegen
out = tilegen.attention(q, k, v, mask=tilegen.causal())
""",
    "flex, compiling": """
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
block_mask = create_block_mask(
    lambda b, h, i, j: i >= j, None, None, p.seqlen_q, p.seqlen_kv, device="cuda"
)
out = torch.compile(flex_attention)(q, k, v, block_mask=block_mask, enable_gqa=True)
""",
    "sdpa": """
out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
""",
}
TRITON = """
import importlib.util
spec = importlib.util.spec_from_file_location("emitted", source)
module = sys.modules["emitted"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
out, _ = module.launch(q, k, v, p.head_dim_qk**-0.5)
"""
"""Program of an emitted forward alone, without tilegen: its time is that of Triton itself."""


@dataclass(frozen=True, kw_only=True)
class FirstResultRow(Environment):
    """One provider's first result of one problem."""

    problem: str
    direction: str
    provider: str
    seconds: float | None
    """Median over processes [seconds]; None if one of them failed."""
    slowest: float | None
    """Time of the slowest process [seconds]."""
    ratio: float | None
    """Time over that of the bundle, where both are known."""
    detail: str
    """Reason why there is no time."""


def rows(workload: str, *, repeats: int) -> Iterator[FirstResultRow]:
    """Yield a row per direction and provider, the bundle first. Only causal workloads whose values
    are a tensor of their own: the mask of the peers is written out, and so are inputs."""
    problems = {one.name: one.problem for one in CATALOGUE}
    known = {k: p for k, p in problems.items() if p.mask == causal() and not p.latent}
    if workload not in known:
        raise typer.BadParameter(f"workload must be one of {', '.join(known)}; got {workload!r}")
    problem = known[workload]
    with tempfile.TemporaryDirectory() as name:
        bundle = make_bundle(problem, Path(name) / "bundle")
        for direction in ("forward", "forward and backward"):
            backward, programs = direction != "forward", dict(PROVIDERS)
            if not backward:
                programs["triton, compiling"] = f"source = {str(source_of(bundle))!r}{TRITON}"
            given = arguments(problem, bundle, backward=backward)
            of_bundle = None
            for provider, program in programs.items():
                times, detail = list[float](), ""
                try:
                    code = PREPARE + program + FINISH
                    times += [first_result(code, given) for _ in range(repeats)]
                except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                    detail = _reason(error)  # which costs no other provider its row
                seconds = statistics.median(times) if times else None
                of_bundle = seconds if provider == "bundle" else of_bundle
                yield FirstResultRow(
                    problem=problem.key,
                    direction=direction,
                    provider=provider,
                    seconds=seconds and round(seconds, 4),
                    slowest=round(max(times), 4) if times else None,
                    ratio=round(seconds / of_bundle, 3) if seconds and of_bundle else None,
                    detail=detail,
                )


def arguments(problem: AttentionProblem, bundle: Path, *, backward: bool) -> str:
    """Return the arguments of a process as plain numbers: reading a problem would import tilegen
    before the clock starts."""
    sizes = {name: getattr(problem, name) for name in SIZES}
    dtype = str(TORCH_DTYPES[problem.dtype]).removeprefix("torch.")
    return json.dumps([sizes, dtype, str(bundle), backward])


def make_bundle(problem: AttentionProblem, out: Path) -> Path:
    """Generate for the GPU here, and return the folder."""
    from tilegen.bundles.building import generate
    from tilegen.gpus.spec import detect

    spec = detect()
    assert spec
    return generate([problem], [spec], out).parent


def source_of(bundle: Path) -> Path:
    """Return the emitted forward of a bundle."""
    from tilegen.bundles.served import Bundle

    (forward,) = (one for one in Bundle(bundle).manifest.binaries if one.kernel == "fwd")
    return bundle / forward.source


def first_result(code: str, given: str) -> float:
    """Return the seconds that a fresh process with empty caches takes. Raises
    CalledProcessError and TimeoutExpired."""
    with tempfile.TemporaryDirectory() as caches:
        names = ("TILEGEN_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        return float(
            subprocess.run(
                [sys.executable, "-c", code, given],
                cwd=ROOT,
                env=os.environ | {name: f"{caches}/{name.lower()}" for name in names},
                capture_output=True,
                timeout=TIME_LIMIT,
                check=True,
            ).stdout.splitlines()[-1]
        )


def line(row: FirstResultRow) -> str:
    """Return a row as a terminal shows it."""
    ratio = "" if row.ratio is None else f"  {row.ratio:.2f}"
    time = row.detail if row.seconds is None else f"{row.seconds:8.3f} s{ratio}"
    return f"{row.direction:22}{row.provider:22}{time}"


def _reason(error: subprocess.CalledProcessError | subprocess.TimeoutExpired) -> str:
    """Return the reason why a process gave no time: its last line, if it ended by itself."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no result in {error.timeout:.0f} s"
    words = error.stderr.decode(errors="replace")
    print(words, file=sys.stderr, flush=True)
    lines = [line for line in words.splitlines() if line.strip()]
    return one_line(lines[-1]) if lines else f"exit status {error.returncode}"


def main(
    workload: Annotated[str, typer.Option(help="A causal one of the catalogue.")] = "llama3-8b-2k",
    repeats: Annotated[int, typer.Option(help="Processes per number.")] = REPEATS,
    csv: Annotated[
        Path | None,
        typer.Option(help="Result file. Default: benchmarks/results/<gpu>/first_result.csv."),
    ] = None,
) -> None:
    """Time first results on this machine's GPU.

    Example: python -m benchmarks.first_result
    """
    gpu_at_hand("nothing to time")
    path = csv or gpu_folder() / "first_result.csv"
    keep(path, rows(workload, repeats=repeats), line)
    print(f"written to {path}")


if __name__ == "__main__":
    typer.run(main)
