"""`tilegen tune`: one problem on this device, or a catalogue on the devices of many machines."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from tilegen import api
from tilegen.cli.options import (
    EXAMPLE,
    DryRun,
    Json,
    KernelsOption,
    console,
    joined,
    positive,
    print_json,
)
from tilegen.devices import device_of
from tilegen.disk import log
from tilegen.errors import TilegenError, Unsupported

if TYPE_CHECKING:
    from tilegen.compiling.workers import Pool
    from tilegen.device import Device
    from tilegen.kernels.config import Kernel
    from tilegen.problem import AttentionProblem
    from tilegen.tuning.campaign import Outcome, Standing
    from tilegen.tuning.jobs import Job
    from tilegen.tuning.machine import Machine

LOCAL = "local"
"""Ray's word for a cluster of its own on this machine."""


class RayAddress(TyperCommand):
    """A command whose option `--ray` may stand without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments, with `local` after a bare `--ray`."""
        given: list[str] = []
        for word, after in zip(args, [*args[1:], "--"][: len(args)], strict=True):
            given += [word, LOCAL] if word == "--ray" and after.startswith("-") else [word]
        return super().parse_args(ctx, given)


def tune(
    problem: Annotated[
        list[str] | None,
        typer.Argument(
            # Older Typers count the words that a callback returns, so None will not do.
            help=f'notation, such as "{EXAMPLE}"',
            callback=lambda words: joined(words) if words else [],
        ),
    ] = None,
    catalog: Annotated[
        list[str] | None,
        typer.Option(help="file of problems, or one notation; repeatable; on all devices here"),
    ] = None,
    kernel: KernelsOption = "all",
    seconds: Annotated[
        float | None,
        typer.Option(
            help="budget of all kernels of a problem; with --catalog of each, all runs together",
            callback=positive,
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="budget per kernel, all runs together", min=1)
    ] = None,
    shard: Annotated[
        str, typer.Option(help="this part of the catalogue: 0/8 to 7/8, or auto in an array job")
    ] = "",
    until: Annotated[str, typer.Option(help="time of day to end, such as 06:00")] = "",
    ray: Annotated[
        str, typer.Option(help="by a Ray cluster, [ADDRESS]; without: by Ray on this machine")
    ] = "",
    gpu: Annotated[
        list[str] | None,
        typer.Option(help="devices to tune for, with --ray, --replay, --dry-run; repeatable"),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="measure by these recordings instead of on a device")
    ] = None,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="time winners of other machines beside the own choice")
    ] = False,
    dry_run: DryRun = False,
    json_: Json = False,
) -> None:
    """Find the best configs on the devices here and record them. Ctrl-C keeps what was found, and
    the same command goes on.

    Example: tilegen tune "b4 hq32 hkv8 q4096 d128 bf16 causal" --seconds 60
    Example: tilegen tune --catalog models.txt --shard auto --until 06:00
    """
    from tilegen.tuning import campaign
    from tilegen.tuning.jobs import Shard, read_problems

    if bool(problem) == bool(catalog):
        raise Unsupported("expected a problem or --catalog FILE, got both or neither")
    others = [catalog, seconds, trials, shard, until, ray, gpu, replay, dry_run]
    if confirm and any(others):
        raise Unsupported("--confirm goes with a problem, --kernel and --json alone")
    part = Shard.parse(shard, os.environ) if shard else None
    end = campaign.until(until) if until else math.inf
    budget = campaign.Budget(trials=trials, seconds=seconds, until=end)
    problems = read_problems(catalog or problem or [])
    named = None if kernel == api.ALL else [api.kernel_named(kernel)]
    if ray:
        from tilegen.tuning.on_ray import Cluster

        with Cluster(ray, replay, problems, named, gpu or [], part) as cluster:
            standings = cluster.standings(budget) if dry_run else []
            outcome = None if dry_run else cluster.tune(budget)
        if outcome:
            _end(outcome, json_)
        else:
            _plan(standings, cluster.devices, json_)
        return
    if problem and not (replay or part or until or dry_run):
        records = api.tune(
            problems[0], kernel=kernel, seconds=seconds, trials=trials, confirm=confirm
        )
        if json_:
            print_json([json.loads(record.to_json()) for record in records])
        return
    devices = _visible(replay is not None)
    if len(devices) > 1 and not dry_run:
        _end(_one_each(devices), json_)
        return
    from tilegen.compiling.workers import Pool
    from tilegen.tuning.measure import DeviceLost

    standings: list[Standing] = []
    try:
        with Pool() as pool:
            machine, jobs = _jobs(problems, named, gpu or [], replay, pool, dry_run)
            jobs = [job for job in jobs if part is None or part.has(job)]
            if dry_run:
                standings = [campaign.Standing.of(one, machine.space(one), budget) for one in jobs]
            outcome = campaign.tune_all([] if dry_run else jobs, machine, budget)
    except DeviceLost as lost:
        log.info("%s; starting again", lost)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    if dry_run:
        _plan(standings, devices, json_)
        return
    _end(outcome, json_)


def _jobs(
    problems: Sequence[AttentionProblem],
    kernels: Sequence[Kernel] | None,
    names: Sequence[str],
    replay: Path | None,
    pool: Pool,
    dry_run: bool,
) -> tuple[Machine, list[Job]]:
    """Return the machine that measures, and the jobs of problems on it."""
    from tilegen.tuning.here import planned_device, tuned_device
    from tilegen.tuning.jobs import jobs_of
    from tilegen.tuning.machine import RealMachine, ReplayMachine

    if replay is not None:
        machine = ReplayMachine(replay)
        jobs = [job for name in names or machine.gpus[:1] for job in machine.jobs(problems, name)]
        return machine, [job for job in jobs if kernels is None or job.kernel in kernels]
    if names and not dry_run:
        raise Unsupported(f"--gpu goes with --ray, --replay or --dry-run, got {names[0]!r} alone")
    here: list[Device] = [device_of(name) for name in names]
    here = here or [planned_device() if dry_run else tuned_device()]
    return RealMachine(pool), [job for one in here for job in jobs_of(problems, one, kernels)]


def _plan(standings: Sequence[Standing], devices: Sequence[str], as_json: bool) -> None:
    """Print what would be tuned, and how long it takes."""
    minutes = sum(one.seconds_left for one in standings) / max(1, len(devices)) / 60
    plans = [
        {
            "gpu": one.job.gpu.name,
            "kernel": one.job.kernel,
            "problem": one.job.problem.key,
            "configs": one.total,
            "measured": min(one.total, len(one.trials)),
        }
        for one in standings
    ]
    if as_json:
        print_json({"devices": len(devices), "minutes": round(minutes, 1), "kernels": plans})
        return
    for plan in plans:
        console.print(
            "would tune {kernel:15}{configs:4} configs, {measured} of them measured already  "
            "{gpu}  '{problem}'".format(**plan)
        )
    count = "1 device" if len(devices) == 1 else f"{len(devices)} devices"
    kernels = "1 kernel" if len(plans) == 1 else f"{len(plans)} kernels"
    console.print(f"{count}, {kernels}, about {minutes:.1f} minutes")


def _end(outcome: Outcome, as_json: bool) -> None:
    """Print the outcome of a run, and exit with 1 if jobs cannot be done here."""
    if as_json:
        print_json(outcome.values)
    else:
        console.print(str(outcome))
    if outcome.missing:
        raise typer.Exit(1)


def _visible(replay: bool) -> list[str]:
    """Return the devices here, by their names in CUDA_VISIBLE_DEVICES; a replay has as many as that
    names. A machine without a GPU has its processor."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if replay:
        return visible or ["0"]
    import torch

    count = torch.cuda.device_count()
    return visible[:count] if visible and count else [str(index) for index in range(max(1, count))]


def _one_each(devices: Sequence[str]) -> Outcome:
    """Run this command once per device and return what all did. Raises TilegenError for a process
    that failed; Ctrl-C and SIGTERM end all of them."""
    from tilegen.tuning.campaign import Outcome

    command = [sys.executable, *sys.orig_argv[1:], *(["--json"] * ("--json" not in sys.orig_argv))]
    cores = sorted(os.sched_getaffinity(0))
    processes: list[subprocess.Popen[bytes]] = []

    def stop(number: int, _frame: object) -> None:
        for process in processes:
            process.send_signal(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    for index, device in enumerate(devices):
        processes.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": device},
            )
        )
        if len(cores) >= len(devices):  # separate cores for each to compile on
            os.sched_setaffinity(processes[-1].pid, cores[index :: len(devices)])
    outcome, failed = Outcome(), list[str]()
    try:
        for device, process in zip(devices, processes, strict=True):
            said, _ = process.communicate()
            if process.returncode:
                failed.append(f"that of device {device} with code {process.returncode}")
            else:
                outcome.add(json.loads(said))
    except KeyboardInterrupt:  # of a terminal the processes got it, too
        for process in processes:
            process.wait()
        raise
    if failed:
        raise TilegenError(
            f"{len(failed)} of {len(devices)} processes failed, {failed[0]}; what is measured is "
            "kept: the same command goes on"
        )
    return outcome
