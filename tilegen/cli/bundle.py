"""The commands of bundles: `tilegen generate` and `tilegen bundle`."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegen import api
from tilegen.cli.options import Json, console, print_json, say_unless
from tilegen.errors import Unsupported
from tilegen.units import memory_text, seconds_text

if TYPE_CHECKING:
    from tilegen.bundles.building import BuiltKernel
    from tilegen.bundles.served import Bundle


def generate(
    problem: Annotated[list[str] | None, typer.Argument(help="notation; repeatable")] = None,
    catalog: Annotated[Path | None, typer.Option(help="file of problems: text or .yaml")] = None,
    arch: Annotated[
        list[str] | None, typer.Option(help="sm_90, gfx942, x86-64-v3; one or several")
    ] = None,
    gpu: Annotated[list[str] | None, typer.Option(help="catalogue name; repeatable")] = None,
    forward_only: Annotated[bool, typer.Option(help="no backward, for serving")] = False,
    out: Annotated[Path, typer.Option(help="folder to write")] = Path("dist"),
    json_: Json = False,
) -> None:
    """Write a bundle: kernels, binaries and a manifest, for GPUs and CPUs that need not be here. A
    stopped run goes on when started again.

    Example: tilegen generate --catalog models.yaml --arch sm_80 sm_90 sm_100 --out dist
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tilegen.bundles.manifest import MANIFEST
    from tilegen.bundles.served import Bundle

    # `--arch sm_80 sm_90`: all but the first arrive among the problems, of which none is one word.
    given = problem or []
    more = [word for word in given if arch and len(word.split()) == 1]
    archs, notations = [*(arch or []), *more], [word for word in given if word not in more]
    problems = api.problems_of(notations, catalog)
    if bool(archs) == bool(gpu):
        raise Unsupported("expected --arch or --gpu, got both or neither; such as --arch sm_90")
    devices = api.devices_of(gpu or None, archs)
    say = say_unless(json_)
    started = time.perf_counter()
    columns = (
        TextColumn("problems, once a device"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    quiet = json_ or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task("", total=len({parsed.normal() for parsed in problems}) * len(devices))

        def on_kernel(made: BuiltKernel) -> None:
            bar.update(task, completed=made.problems_done)
            say(_line(made))

        api.generate(problems, devices, out=out, forward_only=forward_only, on_kernel=on_kernel)
    written = Bundle(out)
    seconds = time.perf_counter() - started
    if json_:
        print_json(
            {**_summary(written), "manifest": str(out / MANIFEST), "seconds": round(seconds, 3)}
        )
    else:
        say(f"{_in_words(written)}, {seconds_text(seconds)}")
        say(f"manifest: {out / MANIFEST}")


def bundle(
    path: Annotated[Path, typer.Argument(help="folder with a manifest.json")],
    json_: Json = False,
) -> None:
    """Say what a bundle holds and check every file; exit code 1 if one is not what it should be, or
    if another tilegen made them.

    Example: tilegen bundle dist
    """
    from tilegen.bundles.served import Bundle

    served = Bundle(path)
    damaged = served.damaged()
    why = "" if damaged else served.why_not_ours()
    if json_:
        print_json({**_summary(served), "damaged": damaged, "not_served": why})
    else:
        for entry in served.manifest.problems:
            kernels = [kernel for built in entry.passes.values() for kernel in built.binaries]
            console.print(f"{entry.arch:12}'{entry.problem}'  {', '.join(kernels)}")
        for name in damaged:
            console.print(f"missing or not what the manifest says: {name}")
        if why:
            console.print(f"cannot be served: {why}; generate the bundle again")
        console.print(_in_words(served))
    if damaged or why:
        raise typer.Exit(1)


def _line(made: BuiltKernel) -> str:
    binary, used = made.binary, made.binary.resources
    head = f"{binary.arch:12}{binary.kernel:15}{binary.config.key:17}"
    if binary.on_cpu is not None:
        scratch = memory_text(binary.on_cpu.scratch_bytes)
        return f"{head}{scratch:>8} of scratch a thread  '{made.problem}'"
    spills = f", {used.spill_bytes} bytes spilled" if used.spill_bytes else ""
    return (
        f"{head}{used.registers:4} registers "
        f"{memory_text(used.shared_bytes):>8} shared{spills}  '{made.problem}'"
    )


def _summary(served: Bundle) -> dict[str, Any]:
    manifest = served.manifest
    return {
        "versions": dict(manifest.versions),
        "problems": len(manifest.notations),
        "binaries": dict(Counter(binary.arch for binary in manifest.binaries)),
        "bytes": sum(path.stat().st_size for path in served.path.rglob("*") if path.is_file()),
    }


def _in_words(served: Bundle) -> str:
    values = _summary(served)
    binaries = ", ".join(f"{count} for {arch}" for arch, count in values["binaries"].items())
    number, size = values["problems"], f"{values['bytes'] / 1e6:.1f} MB"
    return f"{number} problem{'s' * (number != 1)}; binaries: {binaries}; {size}"
