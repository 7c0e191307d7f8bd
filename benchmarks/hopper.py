"""Half an hour of an H100 or H200 for the forward whose warpgroups have roles.

    python -m benchmarks.hopper --out DIR --minutes 9

Runs the most important first: other attention on the same card, checks of each form on small
problems against fp64, times at 8k and 16k tokens, 200 runs that must give the same bits, and
variants. Each job is a child process with a time limit, and a kernel that failed is not tried
again. Results are in DIR/results.jsonl, a line each, on disk before the next job begins; another
call with the same DIR goes on after what is there.

Without a GPU it compiles the kernels of all jobs for sm_90, says what ptxas made of each, and stops
there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from benchmarks.arithmetic import flops
from tilegen.check import in_child
from tilegen.compiling.compiler import compile_for
from tilegen.emit.render import render
from tilegen.errors import BuildFailed, WrongResult
from tilegen.gpus.spec import detect, gpu
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask

KERNEL, ARCH = "fwd_hopper", "sm_90"
CHILD = "from benchmarks.hopper import child; child()"
SECONDS = 90.0
"""Most time of a job; checks have as much for each of their problems."""
RUNS = 200
"""Runs that must give the same bits."""
LLAMA = "b1 hq32 hkv8 q{n} d128 bf16 {mask}"
PROBLEMS = {
    "8k": LLAMA.format(n=8192, mask="causal"),
    "16k": LLAMA.format(n=16384, mask="causal"),
    "8k full": LLAMA.format(n=8192, mask="full"),
    "8k window": LLAMA.format(n=8192, mask="window(1023,0)"),
    "8k lists": LLAMA.format(n=8192, mask="dilated(2)&window(1023,0)"),
    "8k softcap": LLAMA.format(n=8192, mask="causal score(50*tanh(s/50))"),
    "8k d64": "b1 hq32 hkv8 q8192 d64 bf16 causal",
    "4k d192/128": "b1 hq128 hkv128 q4096 d192/128 bf16 causal",
    "8k d256": "b1 hq16 hkv8 q8192 d256 bf16 causal",
}
USUAL = {"8k d256": "m128n64w8s2t"}
"""Configs that are no m128n128w8s2t."""
VARIANTS = ("tu", "tp132", "tp132u", "n64w8s4t", "m192n64w12s3t", "m192n64w12s3tp132")
"""Changes of m128n128w8s2t, judged on 8k causal tokens."""
PLAIN = "m128n128w8s2t"


@dataclass(frozen=True)
class Job:
    """A job: what to do with a problem, and the kernel's config."""

    do: Literal["baseline", "plain", "check", "time", "race"]
    name: str
    config: str = ""

    @property
    def problem(self) -> AttentionProblem:
        """The problem."""
        return AttentionProblem.parse(PROBLEMS[self.name])

    @property
    def task(self) -> KernelTask:
        """The task of the kernel on the GPU at hand, or on an H200."""
        kernel = "fwd" if self.do == "plain" else KERNEL
        return KernelTask.of(kernel, self.problem, detect() or gpu("h200"))


def variant(change: str) -> str:
    """Return the config of an entry of VARIANTS."""
    if change.startswith("m"):
        return change
    return f"m128{change}" if change.startswith("n") else f"m128n128w8s2{change}"


def jobs() -> Iterator[Job]:
    """Yield the jobs, the most important first."""
    head = ("8k", "16k", "8k full")
    for name in ("8k", "16k"):
        yield Job("baseline", name)
    for name in head:
        yield Job("plain", name, "m128n128w8s2")
        for do in ("check", "time"):
            yield Job(do, name, PLAIN)
    yield Job("race", "8k", PLAIN)
    for change in VARIANTS:
        for do in ("check", "time"):
            yield Job(do, "8k", variant(change))
    for name in (name for name in PROBLEMS if name not in head):
        for do in ("check", "time", "race"):
            yield Job(do, name, USUAL.get(name, PLAIN))


def main(
    out: Annotated[Path, typer.Option(help="folder of results.jsonl")],
    minutes: Annotated[float, typer.Option(help="time for all jobs")] = 9.0,
) -> None:
    """Run the jobs, the most important first.

    Example: python -m benchmarks.hopper --out results --minutes 9
    """
    here = detect()
    if here is None or here.arch != ARCH:
        for line in compiled():
            print(line, flush=True)
        print("no GPU of sm_90 that PyTorch can use: nothing is measured")
        return
    run_all(out, time.monotonic() + 60 * minutes)


def compiled() -> Iterator[str]:
    """Yield the resources of each kernel, compiled for sm_90 here."""
    kernels = dict.fromkeys((job.name, job.config) for job in jobs() if job.do == "check")
    for name, config in kernels:
        problem = AttentionProblem.parse(PROBLEMS[name])
        try:
            used = compile_for(render(problem, TileConfig.parse(config), KERNEL), ARCH).resources
        except BuildFailed as error:
            yield f"{name:12} {config:20} {error}"
            continue
        code = used.step_code
        step = f"{code.exposed / 4:.0f} clk exposed" if code else "no step found"
        yield (
            f"{name:12} {config:20} {used.spill_bytes:3} B spilled, "
            f"{used.shared_bytes / 1024:.0f} KiB, {step}"
        )


def run_all(out: Path, deadline: float) -> None:
    """Run the jobs that are not among the results, until a time of `time.monotonic`."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.jsonl"
    known = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in known]
    done = {(row["do"], row["name"], row["config"]) for row in rows}
    bad = {(row["name"], row["config"]) for row in rows if row["status"] != "ok"}
    for job in jobs():
        key = job.name, job.config
        if (job.do, *key) in done or key in bad:
            continue
        if time.monotonic() + SECONDS > deadline:
            print(f"no time left for {job.do} {job.name} {job.config}")
            return
        started = time.monotonic()
        try:
            row = {"status": "ok", **result(job)}
        except in_child.DeviceHung as error:
            note(path, {**asdict(job), "status": "hung", "message": str(error)})
            return
        except (WrongResult, subprocess.TimeoutExpired) as error:
            row = {"status": "failed", "message": str(error)}
        if row["status"] != "ok" and job.do not in ("baseline", "plain"):
            bad.add(key)
        note(path, {**asdict(job), **row, "seconds": round(time.monotonic() - started, 1)})


def note(path: Path, row: dict[str, Any]) -> None:
    """Write a result to the disk, and print it."""
    line = json.dumps(row)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
        file.flush()
        os.fsync(file.fileno())
    print(line[:200], flush=True)


def result(job: Job) -> dict[str, Any]:
    """Return the results of a job. Raises WrongResult, TimeoutExpired and DeviceHung."""
    if job.do != "check":
        return in_child.answer(CHILD, asdict(job), SECONDS)
    if failed := in_child.check(job.task.tiled(TileConfig.parse(job.config))):
        raise WrongResult(failed)
    return {}


# --------------------------------------------------------------------------------------------------
# In the child


def child() -> None:
    """Run the job on standard input."""
    job = Job(**json.load(sys.stdin))
    sys.stdout.write(json.dumps(of_others(job) if job.do == "baseline" else of_kernel(job)))


def of_kernel(job: Job) -> dict[str, Any]:
    """Return times of a kernel, or the number of runs that gave the same bits."""
    import torch

    from tilegen.check.verification import launch_of
    from tilegen.tuning.bench import Timed
    from tilegen.tuning.measure import measure

    timed = Timed.of(job.task, "cuda")
    config = TileConfig.parse(job.config)
    if job.do != "race":
        measured = measure(timed.runs(config), seconds=2.0)
        if measured.median_us is None:
            return {"status": "failed", "message": measured.failure}
        return _rates(job, measured.median_us, measured.p80_us)
    rendered, (arguments,) = render(job.problem, config, KERNEL), timed.launches
    launch = launch_of(rendered, timed.mask, timed.reads, *arguments[:2])
    first = [x.clone() for x in launch(*arguments)]
    for i in range(RUNS):
        if not all(torch.equal(x, y) for x, y in zip(launch(*arguments), first, strict=True)):
            return {"status": "failed", "message": f"run {i} gave other bits"}
    return {"runs": RUNS}


def of_others(job: Job) -> dict[str, Any]:
    """Return times of a matrix product, and of PyTorch's attention on the same problem."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from tilegen.check.reference import make_inputs
    from tilegen.tuning.measure import measure

    problem = job.problem
    x = make_inputs(problem, device=torch.device("cuda"), seed=0)
    k, v = (one.repeat_interleave(problem.group_size, 1) for one in (x.k, x.v))
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = measure(lambda: square @ square, seconds=1.0).median_us
    results: dict[str, Any] = {"gemm": 2 * 8192**3 / product / 1e6 if product else None}
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
        with sdpa_kernel(getattr(SDPBackend, name)):
            measured = measure(
                lambda: torch.nn.functional.scaled_dot_product_attention(
                    x.q, k, v, is_causal=not problem.mask.is_full
                )
            )
        if measured.median_us is not None:
            results[name] = _rates(job, measured.median_us, measured.p80_us)
    return results


def _rates(job: Job, us: float, p80: float | None) -> dict[str, Any]:
    return {"us": us, "p80_us": p80, "tflops": flops(job.problem, "forward") / us / 1e6}


if __name__ == "__main__":
    typer.run(main)
