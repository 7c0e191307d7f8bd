"""`tilegen worker` and `tilegen fleet`: tuning by many machines."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegen.api import kernel_named
from tilegen.cli.options import (
    DryRun,
    Json,
    KernelsOption,
    console,
    positive,
    print_json,
)
from tilegen.cli.plans import plan_of, print_plans
from tilegen.devices import gpu_of
from tilegen.environment import place
from tilegen.errors import Unsupported
from tilegen.tuning.measure import DeviceLost
from tilegen.units import us_text

if TYPE_CHECKING:
    from tilegen.kernels.config import Kernel
    from tilegen.store import Location

fleet_app = typer.Typer(no_args_is_help=True, help="Tuning by many machines.")

Storage = Annotated[
    str, typer.Option(help="postgresql://..., journal:FILE, grpc://host:port, sqlite:///FILE")
]
Catalogue = Annotated[
    list[str] | None, typer.Option(help="file of problems, or one notation; repeatable")
]
ReplayFrom = Annotated[
    Path | None, typer.Option(help="measure by these recordings instead of on a GPU")
]
Trials = Annotated[
    int | None, typer.Option(help="per problem and kernel, in the model's order", min=1)
]
MOST_WORKERS = 64
"""Most workers that one command starts."""


def worker(
    storage: Storage,
    catalog: Catalogue = None,
    kernel: KernelsOption = "all",
    trials: Trials = None,
    replay: ReplayFrom = None,
    gpu: Annotated[
        str | None, typer.Option(help="with --replay or --dry-run: GPU model to stand for")
    ] = None,
    gpus: Annotated[
        str, typer.Option(help="all, or 0 or 0,2: one worker for each; or how many")
    ] = "",
    store: Annotated[str, typer.Option(help="location for winners; default: first shared")] = "",
    stale_after: Annotated[
        float,
        typer.Option(help="seconds after which a silent worker is dead", min=1, callback=positive),
    ] = 60.0,
    dry_run: DryRun = False,
    json_: Json = False,
) -> None:
    """Tune what is unfinished of a catalogue, together with all other workers of a storage.

    Workers may come, go and die at any time. Example:
    tilegen worker --storage postgresql://tuner@db/tilegen --catalog models.txt --gpus all
    """
    if not catalog:
        raise Unsupported("expected --catalog FILE or a problem's notation")
    if gpus and not dry_run:
        raise typer.Exit(_one_each(_devices(gpus, replay is not None)))
    from tilegen.compiling.workers import Pool
    from tilegen.fleet.bench import RealMachine, ReplayMachine
    from tilegen.fleet.jobs import jobs_of, read_problems
    from tilegen.fleet.storage import open_storage
    from tilegen.fleet.worker import Worker

    problems = read_problems(catalog)
    chosen: list[Kernel] | None = None if kernel == "all" else [kernel_named(kernel)]
    with Pool() as pool:
        if replay is not None:
            machine = ReplayMachine(replay)
            jobs = [
                job
                for job in machine.jobs(problems, gpu or machine.gpus[0])
                if chosen is None or job.kernel in chosen
            ]
        else:
            machine = RealMachine(pool)
            jobs = jobs_of(problems, _planned(gpu) if dry_run else _detected(), chosen)
        if dry_run:
            print_plans([plan_of(job, machine.space(job)) for job in jobs], json_)
            return
        tuner = Worker(
            open_storage(storage),
            machine,
            trials=trials,
            store=_store(store),
            stale_seconds=stale_after,
        )
        try:
            published = tuner.run(jobs)
        except DeviceLost as lost:
            pool.close()
            console.print(f"{lost}; starting again")
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    if json_:
        print_json([json.loads(record.to_json()) for record in published.values() if record])
    else:
        count = sum(record is not None for record in published.values())
        winners = "1 winner" if count == 1 else f"{count} winners"
        console.print(f"{tuner.measured} configs measured, {winners} published here")
    tuner.require_saved()


@fleet_app.command("status")
def fleet_status(
    storage: Storage,
    catalog: Catalogue = None,
    gpu: Annotated[
        list[str] | None, typer.Option(help="with --catalog: GPU models it is for; repeatable")
    ] = None,
    json_: Json = False,
) -> None:
    """Print the progress of all studies in a storage, and problems of a catalogue without a study.

    Example: tilegen fleet status --storage journal:/mnt/team/tilegen.journal
    """
    from tilegen.fleet.jobs import Job, jobs_of, read_problems
    from tilegen.fleet.status import progress
    from tilegen.fleet.storage import open_storage

    opened = open_storage(storage, make=False)
    studies = progress(opened)
    if catalog:
        problems = read_problems(catalog)
        jobs: list[Job] = []
        for name in gpu or sorted({study.gpu for study in studies}):
            jobs += jobs_of(problems, gpu_of(name))
        studies = progress(opened, jobs)
    if json_:
        print_json([{**asdict(x), "configs": x.configs, "state": x.state} for x in studies])
        return
    for study in studies:
        best = "" if study.best_us is None else f"{us_text(study.best_us):>12}"
        abandoned = f", {study.abandoned} put back" if study.abandoned else ""
        console.print(
            f"{study.state:10}{study.finished:5}/{study.configs:<5}{study.running:4} "
            f"running{abandoned}  "
            f"{study.gpu:8}{study.kernel:15}{best:12}  {study.winner:14}'{study.problem}'"
        )
    states = Counter(study.state for study in studies)
    finished, configs = (sum(getattr(x, n) for x in studies) for n in ("finished", "configs"))
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    number = "1 study" if len(studies) == 1 else f"{len(studies)} studies"
    console.print(f"{number}: {counts or 'none'}; {finished} of {configs} configs")


@fleet_app.command("proxy")
def fleet_proxy(
    storage: Storage,
    host: Annotated[str, typer.Option(help="address to listen on")] = "localhost",
    port: Annotated[int, typer.Option(help="port to listen on", min=1, max=65535)] = 13000,
    threads: Annotated[
        int, typer.Option(help="requests served at the same time", min=1, max=1000)
    ] = 10,
    json_: Json = False,
) -> None:
    """Serve a database to very many workers, which then name grpc://host:port as their storage.

    Anybody who reaches the port can read and write the studies.
    Example: tilegen fleet proxy --storage postgresql://tuner@db/tilegen --host 10.0.0.5
    """
    from concurrent.futures import ThreadPoolExecutor

    import optuna

    from tilegen.fleet.storage import open_storage

    if storage.startswith(("journal:", "grpc:")):
        raise Unsupported("a proxy serves a database: expected --storage postgresql://...")
    opened = open_storage(storage)
    if json_:
        print_json({"storage": f"grpc://{host}:{port}"})
    else:
        console.print(f"serving grpc://{host}:{port}")
    sys.stdout.flush()
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    optuna.storages.run_grpc_proxy_server(
        opened, host=host, port=port, thread_pool=ThreadPoolExecutor(threads)
    )


def _planned(gpu: str | None) -> Any:
    from tilegen.tuning.here import planned_device

    return planned_device() if gpu is None else gpu_of(gpu)


def _detected() -> Any:
    from tilegen.tuning.here import tuned_device

    return tuned_device()


def _store(text: str) -> Location | None:
    """Return the location for winners; None means the own directory."""
    from tilegen.store import Location, locations

    if text and text != "own":
        return Location(place(text), "shared")
    shared = [location for location in locations() if location.origin == "shared"]
    return shared[0] if shared and not text else None


def _devices(text: str, replay: bool) -> list[str]:
    """Return the devices to start a worker for: `all`, a list of names, or a number of devices.

    Raises Unsupported for missing GPUs. With `replay` nothing is measured, so none is needed.
    """
    here = [] if replay else _visible()
    named = [part.strip() for part in text.split(",")]
    if re.fullmatch(r"[1-9]\d?", text) and int(text) <= MOST_WORKERS:
        devices = [str(index) for index in range(int(text))] if replay else here[: int(text)]
        exist = len(devices) == int(text)
    elif text == "all" and not replay:
        devices, exist = here, bool(here)
    elif (len(named) > 1 or text == "0") and all(named) and len(set(named)) == len(named):
        # Only the driver can check names such as GPU-8932f937.
        devices, exist = named, replay or all(part in here for part in named if part.isdecimal())
    else:
        raise Unsupported(
            f"--gpus must be all, a number up to {MOST_WORKERS}, or a list such as 0,2; "
            f"got {text!r}"
        )
    if not exist:
        raise Unsupported(
            f"expected --gpus among the {len(here)} that PyTorch can use "
            f"({', '.join(here) or 'none'}), got {text!r}"
        )
    return devices


def _visible() -> list[str]:
    """Return the GPUs that PyTorch can use, by their names in CUDA_VISIBLE_DEVICES."""
    import torch

    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:count] if visible else [str(index) for index in range(count)]


def _one_each(devices: Sequence[str]) -> int:
    """Run this command once per device and return the worst exit code; Ctrl-C ends all of them."""
    command = [sys.executable, *_without_gpus(sys.orig_argv[1:])]
    cores = sorted(os.sched_getaffinity(0))
    processes: list[subprocess.Popen[bytes]] = []

    def stop(signal_number: int, _frame: object) -> None:
        for process in processes:
            process.send_signal(signal_number)

    signal.signal(signal.SIGTERM, stop)
    for index, device in enumerate(devices):
        process = subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": device})
        processes.append(process)
        if len(cores) >= len(devices):  # separate cores for each to compile on
            os.sched_setaffinity(process.pid, cores[index :: len(devices)])
    codes: list[int] = []
    for process in processes:
        try:
            codes.append(process.wait())
        except KeyboardInterrupt:  # the processes got it too
            codes.append(process.wait())
    return max(abs(code) for code in codes)


def _without_gpus(arguments: Sequence[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == "--gpus":
            skip = True
        elif not argument.startswith("--gpus="):
            kept.append(argument)
    return kept
