"""Check kernels that may wait for ever in a child process with a time limit, and remember results.

Kernels whose warpgroups have roles wait at barriers. A wrong one stops the GPU for its process, so
none is launched here before it was right in a child. A result holds for one text of a kernel, GPU
model, driver and version of Triton; it lies beside the emitted kernel.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilegen.choose.search_space import legal_configs
from tilegen.compiling.workers import environment, python
from tilegen.disk import log
from tilegen.emit.identity import kernel_digest, rows_are_aligned
from tilegen.emit.kernel_files import folder_of, write_beside
from tilegen.environment import CACHE_DIR, current
from tilegen.errors import InvalidRecord, TilegenError, Unsupported, WrongResult
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import partners, smallest_config
from tilegen.problem import AttentionProblem
from tilegen.store.fields import parse_json
from tilegen.store.files import read_bytes, text_of
from tilegen.store.versions import versions_for
from tilegen.task import KernelTask, Tiled

SECONDS, PROBE_SECONDS = 90.0, 60.0
"""Most time of a check, with its compilations, and of the question whether the GPU still works."""
SIZES = (190, 300), (65, 63), (600, 200), (190, 1000)
"""Queries and keys of the problems of a check: ragged, less than a tile, more queries than keys."""
MAX_BYTES, MAX_MESSAGE = 4096, 500
CHILD = "from tilegen.check.child import main; main()"
"""The child of a check; for an empty job it says whether the GPU works."""


class DeviceHung(TilegenError):
    """A kernel that did not end, after which the GPU does not answer."""


def passed(task: KernelTask) -> list[TileConfig]:
    """Return the configs of a kernel that were right on this GPU model. Checks nothing."""
    return [config for config in legal_configs(task) if outcome(task.tiled(config)) == ""]


def outcome(tiled: Tiled) -> str | None:
    """Return the recorded result of a config's check: empty if it was right, otherwise the reason.
    None if there is no result for this text, GPU model, driver and Triton."""
    try:
        if (data := read_bytes(path_of(tiled), MAX_BYTES)) is None:
            return None
        fields = parse_json(text_of(data))
        if any(fields.text(name) != value for name, value in circumstances(tiled).items()):
            return None
        return fields.text("failed", longest=MAX_MESSAGE)
    except InvalidRecord as error:
        log.debug("check of %s is damaged (%s); repeated", tiled.config.key, error)
        return None


def check(tiled: Tiled) -> str:
    """Return the result of a config's check, as `outcome` does; runs the check if there is none.
    Raises DeviceHung."""
    if (known := outcome(tiled)) is not None:
        return known
    problem, spec, failed = tiled.problem, tiled.spec, ""
    others = {name: smallest_config(name) for name in partners(spec.name, problem)}
    sizes = SIZES[:1] if problem.mask.is_tied else SIZES
    for rows, keys in sizes:
        small = replace(
            problem,
            batch=1,
            num_heads_q=problem.group_size,
            num_heads_kv=1,
            seqlen_q=problem.seqlen_q if problem.mask.is_tied else rows,
            seqlen_kv=problem.seqlen_kv if problem.mask.is_tied else keys,
        )
        try:
            checks = run(small, {**others, spec.name: tiled.config})
        except WrongResult as error:
            failed = str(error)
        else:
            own = (one for one in checks if one["tensor"] in spec.checked_by)
            failed = next((one["text"] for one in own if not one["ok"]), "")
        if failed:
            break
    values = {**circumstances(tiled), "failed": failed[:MAX_MESSAGE]}
    with contextlib.suppress(Unsupported):  # the folder may be read-only
        write_beside(path_of(tiled), f"{json.dumps(values)}\n".encode())
    return failed


def run(
    problem: AttentionProblem, configs: Mapping[Kernel, TileConfig], *, seed: int = 0
) -> list[dict[str, Any]]:
    """Run `verify` in a child; return the fields of each check, and its `text`.

    Raises WrongResult if the child fails or takes longer than SECONDS, and DeviceHung if the GPU
    does not answer after that.
    """
    job = {
        "problem": problem.key,
        "configs": {kernel: config.key for kernel, config in configs.items()},
        "seed": seed,
    }
    try:
        return answer(CHILD, job, SECONDS)
    except subprocess.TimeoutExpired:
        reason = f"{', '.join(configs)} did not end within {SECONDS:.0f} s for '{problem.key}'"
    try:
        answer(CHILD, {}, PROBE_SECONDS)
    except (subprocess.TimeoutExpired, WrongResult) as error:
        raise DeviceHung(f"{reason}, and the GPU does not answer: {error}") from None
    raise WrongResult(reason)


def answer(code: str, job: Mapping[str, Any], seconds: float) -> Any:
    """Return the JSON that a child prints, which runs `code` and reads a job from standard input.
    Raises TimeoutExpired, after the child's process group has ended, and WrongResult."""
    process = subprocess.Popen(
        python(code),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**{CACHE_DIR: str(current().cache_dir)}),
        start_new_session=True,  # its compilers end with it
    )
    try:
        out, err = process.communicate(json.dumps(job), timeout=seconds)
    except BaseException:  # also Ctrl-C
        os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process in the driver stays
            process.communicate(timeout=10)
        raise
    if process.returncode:
        lines = [line for line in err.splitlines() if line.strip()] or ["no message"]
        raise WrongResult(f"the check ended with {process.returncode}: {lines[-1][:300]}")
    return json.loads(out)


def path_of(tiled: Tiled) -> Path:
    """Return the file of a config's result."""
    kernel, problem = tiled.spec.name, tiled.problem
    digest = kernel_digest(problem, tiled.config, kernel, rows_are_aligned(problem))
    return folder_of(digest) / f"{kernel}.{tiled.device.name}.check.json"


def circumstances(tiled: Tiled) -> dict[str, str]:
    """Return the versions for which a result holds."""
    versions = versions_for(tiled.device)
    return {"triton": versions.triton, "driver": versions.driver}
