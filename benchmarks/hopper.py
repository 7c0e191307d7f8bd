"""Half an hour of an H100 or H200 for the kernels whose warpgroups have roles.

    python -m benchmarks.hopper --out DIR --minutes 9

Runs the most important first: other attention on the same card, checks of the forward, of dK and
dV, and of dQ on small problems against fp64, their times at 8k and 16k tokens, 200 runs that must
give the same bits, then variants and other forms. Each job is a child process with a time limit,
and a kernel that failed is not tried again. Results are in DIR/results.jsonl, a line each, on disk
before the next job begins; another call with the same DIR goes on after what is there.

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
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from benchmarks.arithmetic import flops, kept_pairs
from tilegen.check import in_child
from tilegen.compiling.compiler import compile_for
from tilegen.emit.render import render
from tilegen.errors import BuildFailed, WrongResult
from tilegen.gpus.spec import detect, gpu
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask
from tilegen.tuning.measure import Measurement

ARCH = "sm_90"
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
FORWARD, DKDV, DQ = "fwd_hopper", "bwd_dkdv_hopper", "bwd_dq_hopper"
USUAL = {FORWARD: "m128n128w8s2t", DKDV: "m64n128w8s2t", DQ: "m128n128w8s2t"}
OTHERS = {(FORWARD, "8k d256"): "m128n64w8s2t", (DQ, "8k softcap"): "m128n64w8s3t"}
"""Configs of a kernel that are not the usual one."""
VARIANTS = {
    FORWARD: (
        *("m128n128w8s2tu", "m128n128w8s2tp132", "m128n128w8s2tp132u", "m128n64w8s4t"),
        *("m192n64w12s3t", "m192n64w12s3tp132"),
    ),
    DKDV: ("m64n128w8s3t",),
    DQ: ("m128n64w8s3t", "m192n64w12s2t"),
}
"""Other configs, judged on 8k causal tokens."""
PLAIN = {"fwd": "m128n128w8s2", "bwd_dkdv": "m64n128w8s2", "bwd_dq": "m128n128w8s2"}
"""Kernels of the plain families, and configs of theirs."""


@dataclass(frozen=True)
class Job:
    """A job: what to do with a problem, and the kernel and its config."""

    do: Literal["baseline", "plain", "check", "time", "race"]
    name: str
    kernel: str = ""
    config: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """The problem, kernel and config."""
        return self.name, self.kernel, self.config

    @property
    def problem(self) -> AttentionProblem:
        """The problem."""
        return AttentionProblem.parse(PROBLEMS[self.name])

    @property
    def task(self) -> KernelTask:
        """The task of the kernel on the GPU at hand, or on an H200."""
        return KernelTask.of(self.kernel, self.problem, detect() or gpu("h200"))


FIELDS = tuple(one.name for one in fields(Job))


def jobs() -> Iterator[Job]:
    """Yield the jobs, the most important first."""
    head = ("8k", "16k", "8k full")
    for name in ("8k", "16k"):
        yield Job("baseline", name)
    for kernel, config in USUAL.items():
        yield Job("check", "8k", kernel, config)
    for name in head:
        for kernel, config in PLAIN.items():
            yield Job("plain", name, kernel, config)
        for kernel, config in USUAL.items():
            if name != "8k":
                yield Job("check", name, kernel, config)
            yield Job("time", name, kernel, config)
    for kernel, config in USUAL.items():
        yield Job("race", "8k", kernel, config)
    for kernel, configs in VARIANTS.items():
        for config in configs:
            for do in ("check", "time"):
                yield Job(do, "8k", kernel, config)
    for name in (name for name in PROBLEMS if name not in head):
        problem = AttentionProblem.parse(PROBLEMS[name])
        for kernel in (one for one in USUAL if not KERNELS[one].why_not(problem)):
            for do in ("check", "time", "race"):
                yield Job(do, name, kernel, OTHERS.get((kernel, name), USUAL[kernel]))


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
    for name, kernel, config in dict.fromkeys(job.key for job in jobs() if job.do == "check"):
        problem = AttentionProblem.parse(PROBLEMS[name])
        told = f"{name:12} {kernel:16} {config:20}"
        try:
            used = compile_for(render(problem, TileConfig.parse(config), kernel), ARCH).resources
        except BuildFailed as error:
            yield f"{told} {error}"
            continue
        code = used.step_code
        step = f"{code.exposed / 4:.0f} clk exposed" if code else "no step found"
        yield (f"{told} {used.spill_bytes:3} B spilled, {used.shared_bytes / 1024:.0f} KiB, {step}")


def run_all(out: Path, deadline: float) -> None:
    """Run the jobs that are not among the results, until a time of `time.monotonic`."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    known = {Job(*(row[one] for one in FIELDS)): row["status"] == "ok" for row in rows}
    bad = {job.key for job, good in known.items() if not good}
    for job in jobs():
        if job in known or job.key in bad:
            continue
        if time.monotonic() + SECONDS > deadline:
            print(f"no time left for {' '.join((job.do, *job.key)).strip()}")
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
            bad.add(job.key)
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
        dims = sum(job.problem.head_dims[one] for one in KERNELS[job.kernel].products)
        pairs = job.problem.batch * job.problem.num_heads_q * kept_pairs(job.problem)
        return _rate(2 * pairs * dims, measured) or {}
    rendered, (arguments,) = render(job.problem, config, job.kernel), timed.launches
    launch = launch_of(rendered, timed.mask, timed.reads, *arguments[:2])

    def results() -> list[torch.Tensor]:
        returned = launch(*arguments)
        return [*returned] if isinstance(returned, tuple) else [returned]

    first = [x.clone() for x in results()]
    for i in range(RUNS):
        if not all(torch.equal(x, y) for x, y in zip(results(), first, strict=True)):
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
    repeated = (one.repeat_interleave(problem.group_size, 1) for one in (x.k, x.v))
    leaves = [one.requires_grad_() for one in (x.q, *repeated)]
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = measure(lambda: square @ square, seconds=1.0).median_us
    results: dict[str, Any] = {"gemm": 2 * 8192**3 / product / 1e6 if product else None}
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
        with sdpa_kernel(getattr(SDPBackend, name)):

            def forward() -> torch.Tensor:
                return torch.nn.functional.scaled_dot_product_attention(
                    *leaves, is_causal=not problem.mask.is_full
                )

            with torch.no_grad():
                results[f"{name} forward"] = _rate(flops(problem, "forward"), measure(forward))
            try:
                out = forward()
            except RuntimeError:  # which this back end does not compute; so says the forward
                continue
            backward = partial(torch.autograd.grad, out, leaves, x.dout, retain_graph=True)
            results[f"{name} backward"] = _rate(flops(problem, "backward"), measure(backward))
    return results


def _rate(work: int, measured: Measurement) -> dict[str, Any] | None:
    """Return times, and TFLOP/s for so many flops; None for a failure."""
    if (us := measured.median_us) is None:
        return None
    return {"us": us, "p80_us": measured.p80_us, "tflops": work / us / 1e6}


if __name__ == "__main__":
    typer.run(main)
