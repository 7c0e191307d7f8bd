"""`tilegen cache`: look into stores of records, and move records between them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegen.api import kernel_named, kernels_in_use
from tilegen.cli.options import (
    EXAMPLE,
    DryRun,
    Gpu,
    Json,
    KernelsOption,
    Problem,
    console,
    in_stores,
    print_json,
    print_wrapped,
    titled,
)
from tilegen.cli.places import PLACE, answering, check_file, location, shared, source, sources
from tilegen.devices import device_of
from tilegen.errors import NoRecord, Unsupported
from tilegen.problem import AttentionProblem
from tilegen.units import us_text

if TYPE_CHECKING:
    from tilegen.store.lookup import Found
    from tilegen.store.record import TuningRecord
    from tilegen.store.transfer import Selection, Transferred

cache_app = typer.Typer(no_args_is_help=True, callback=in_stores)

Places = Annotated[list[str] | None, typer.Argument(help=f"{PLACE}; default: all")]
OwnPlaces = Annotated[list[str] | None, typer.Argument(help=f"{PLACE}; default: own")]
OfGpu = Annotated[str | None, typer.Option("--gpu", help="only records of this GPU")]
OfKernel = Annotated[str | None, typer.Option("--kernel", help="only records of this kernel")]


@cache_app.command("list")
def cache_list(where: Places = None, json_: Json = False) -> None:
    """List all records: own, shared, shipped.

    Example: tilegen cache list
    """
    from tilegen.store import list_records

    listed = list(list_records(answering(where)))
    if json_:
        print_json(
            [
                {
                    "file": entry.file,
                    "origin": entry.origin,
                    "trouble": entry.reason,
                    "record": _values(entry.record) if entry.record else None,
                }
                for entry in listed
            ]
        )
        return
    for entry in listed:
        if record := entry.record:
            what = f"{record.gpu:10}{_line(record)}  '{record.problem}'"
            console.print(f"{entry.origin:8}{what}" + (f"  {entry.reason}" if entry.reason else ""))
        else:
            console.print(f"{entry.origin:8}{entry.file}: {entry.reason}")
    if not listed:
        console.print(f'no records yet; to make one: tilegen tune "{EXAMPLE}"')


@cache_app.command("show")
def cache_show(
    problem: Problem, gpu: Gpu = None, kernel: KernelsOption = "all", json_: Json = False
) -> None:
    """Print the record a call would use, and what others found and why it stands before them.

    Example: tilegen cache show "b4 hq32 hkv8 q4096 d128 bf16 causal" --gpu h200 --kernel fwd
    """
    from tilegen.store import locations
    from tilegen.store.election import verdict
    from tilegen.store.places import read_trials
    from tilegen.store.trials import join_trials, trials_path

    parsed, spec = AttentionProblem.parse(problem[0]), device_of(gpu)
    shown: list[dict[str, Any]] = []
    for name in kernels_in_use(kernel, parsed, spec):
        if (used := _found(parsed, spec, name)) is None:
            continue
        path = trials_path(used.record.gpu, name, used.record.problem)
        joined = join_trials((read_trials(where, path) for where in locations()), name)
        trials = len(joined.splitlines())
        shown.append(
            {
                "gpu": spec.name,
                "file": used.file,
                "origin": used.origin,
                "borrowed": used.borrowed,
                "differences": _differences(used),
                "record": _values(used.record),
                "others": [_values(other) for other in used.others],
                "trials": trials,
            }
        )
        if json_:
            continue
        if len(shown) == 1:
            console.print(f"{parsed}, on {titled(spec)}")
        console.print(f"{used} ({used.origin}), {trials} trials")
        console.print(f"  measured {used.record.measurement.surroundings}")
        for other in used.others:
            reason = verdict(used.record, other)
            console.print(f"  stands before {_line(other)}  {other.date}: {reason}")
        console.print(used.record.to_json(), end="")
    if not shown:
        raise NoRecord(f"no record for '{parsed.bucket}' on {spec.name}; see tilegen cache why")
    if json_:
        print_json(shown)


@cache_app.command("why")
def cache_why(
    problem: Problem,
    gpu: Gpu = None,
    kernel: KernelsOption = "all",
    all_: Annotated[bool, typer.Option("--all", help="the nearest other records, too")] = False,
    json_: Json = False,
) -> None:
    """Say for each kernel whether a call uses a record or the model; with --all, how the nearest
    other records differ from what is asked.

    Example: tilegen cache why "b4 hq32 hkv8 q4096 d128 bf16 causal" --gpu h200
    """
    from tilegen.choose.families import families_used
    from tilegen.choose.records import Records
    from tilegen.emit.identity import template_digest
    from tilegen.store import answer, record_path, why, why_lines
    from tilegen.store.versions import versions_for
    from tilegen.task import KernelTask

    parsed, spec = AttentionProblem.parse(problem[0]), device_of(gpu)
    answers: list[dict[str, Any]] = []
    lines, others = [f"{parsed}, on {titled(spec)}"], list[str]()
    for name in kernels_in_use(kernel, parsed, spec):
        task, digest = KernelTask.of(name, parsed, spec), template_digest(name)
        nearest = why(task, versions=versions_for(spec), template_digest=digest)
        used = _found(parsed, spec, name)
        (family,) = families_used(Records(parsed, spec), task.direction)
        instead = f"library: {family.library}" if family.library else ""
        answers.append(
            {
                "gpu": spec.name,
                "kernel": name,
                "used": None if used is None else str(used),
                "library": instead,
                "nearest": [
                    {"file": other.file, "origin": other.origin, "differences": _differences(other)}
                    for other in nearest
                ],
            }
        )
        faster = f"calls go to {instead}, measured to be faster than " if instead else ""
        lines.append(f"{name:15} {faster}{answer(used)}")
        others += why_lines(task, used, nearest)
    if json_:
        print_json(answers)
        return
    bucket = parsed.normal().bucket
    path = record_path(spec.name, "fwd", bucket, spec.policy)
    lines.append(f"records of this problem: {spec.name}/KERNEL/{path.name}")
    if not any(entry["used"] for entry in answers):
        lines.append(f"to make one: tilegen tune '{bucket}'")
    print_wrapped([*lines, *(others if all_ else ["other records: --all"])])


@cache_app.command("export")
def cache_export(
    file: Annotated[Path, typer.Argument(help="file to write")],
    where: OwnPlaces = None,
    gpu: OfGpu = None,
    kernel: OfKernel = None,
    dry_run: DryRun = False,
    json_: Json = False,
) -> None:
    """Write records and trials, by default the own ones, into one file to carry elsewhere.

    Example: tilegen cache export winners.jsonl --gpu h200
    """
    from tilegen.store.transfer import export

    check_file(file)
    stores = sources(where or ["own"])
    _report(export(stores, file, wanted=_wanted(gpu, kernel), dry_run=dry_run), json_, gpu)


@cache_app.command("import")
def cache_import(
    file: Annotated[Path, typer.Argument(help="what tilegen cache export wrote")],
    into: Annotated[str, typer.Option(help=PLACE)] = "own",
    dry_run: DryRun = False,
    json_: Json = False,
) -> None:
    """Join what an export holds with the own records.

    Example: tilegen cache import winners.jsonl --dry-run
    """
    from tilegen.store.transfer import import_

    _report(import_(file, location(into), dry_run=dry_run), json_)


@cache_app.command("merge")
def cache_merge(
    stores: Annotated[list[str], typer.Argument(help=f"any number, each {PLACE}")],
    into: Annotated[str, typer.Option(help=PLACE)] = "own",
    gpu: OfGpu = None,
    kernel: OfKernel = None,
    dry_run: DryRun = False,
    json_: Json = False,
) -> None:
    """Join stores, in any order to the same result, and explain every clash.

    What nobody has measured is left out. Of one machine the later finding counts. Findings with
    the newest versions and template stand before others, and of those the ones measured in quiet.
    Then the fastest wins, and among equal measurements the config that most machines chose, then
    the first in order.

    Example: tilegen cache merge /mnt/a/tilegen /mnt/b/tilegen --into /mnt/all/tilegen
    """
    from tilegen.store.transfer import merge

    target = location(into)
    # The target is merged too, so that its own files get the form of the result.
    everything = [*map(source, stores), target]
    moved = merge(everything, target, wanted=_wanted(gpu, kernel), dry_run=dry_run)
    _report(moved, json_, gpu)


@cache_app.command("verify")
def cache_verify(where: Places = None, json_: Json = False) -> None:
    """Check every record and trial; exit with 1 if one is not in order. Changes nothing.

    Example: tilegen cache verify own
    """
    from tilegen.store.listing import check

    checked = list(check(sources(where)))
    bad = [entry for entry in checked if entry.reason]
    if json_:
        print_json([{"file": entry.file, "trouble": entry.reason} for entry in checked])
    else:
        for entry in bad:
            console.print(f"{entry.file}: {entry.reason}")
        console.print(f"{len(checked)} files, {len(bad)} of them not in order")
    if bad:
        raise typer.Exit(1)


@cache_app.command("push")
def cache_push(
    to: Annotated[str, typer.Argument(help="folder or URL; default: the first shared one")] = "",
    gpu: OfGpu = None,
    kernel: OfKernel = None,
    dry_run: DryRun = False,
    json_: Json = False,
) -> None:
    """Join own records and trials with those of a shared location.

    Example: tilegen cache push s3://team/tilegen
    """
    from tilegen.store.transfer import merge

    target = location(to) if to else shared()[0]
    if target.folder is None:
        source(to)  # raises if it does not answer, even with nothing to push
    moved = merge([location("own")], target, wanted=_wanted(gpu, kernel), dry_run=dry_run)
    _report(moved, json_, gpu)


@cache_app.command("pull")
def cache_pull(
    where: Annotated[str, typer.Argument(help="folder or URL; default: all shared ones")] = "",
    gpu: OfGpu = None,
    kernel: OfKernel = None,
    dry_run: DryRun = False,
    json_: Json = False,
) -> None:
    """Merge shared records and trials into the local cache, for work without a network.

    Example: tilegen cache pull s3://team/tilegen --gpu h200
    """
    from tilegen.store.transfer import merge

    stores = [source(where)] if where else shared()
    moved = merge(stores, location("own"), wanted=_wanted(gpu, kernel), dry_run=dry_run)
    _report(moved, json_, gpu)


@cache_app.command("promote")
def cache_promote(
    where: OwnPlaces = None,
    into: Annotated[str, typer.Option(help=PLACE)] = "shipped",
    gpu: OfGpu = None,
    kernel: OfKernel = None,
    dry_run: DryRun = False,
    json_: Json = False,
) -> None:
    """Put measured winners, by default the own ones, into the cache that ships with the package.

    Example: tilegen cache promote --gpu h200 --dry-run
    """
    from tilegen.store.transfer import promote

    stores = sources(where or ["own"])
    moved = promote(stores, location(into), wanted=_wanted(gpu, kernel), dry_run=dry_run)
    _report(moved, json_, gpu)


@cache_app.command("prune")
def cache_prune(
    where: Annotated[str, typer.Argument(help="folder, or own")] = "own",
    older_than: Annotated[float | None, typer.Option(help="days; records of older ones")] = None,
    unmeasured: Annotated[bool, typer.Option("--unmeasured", help="the model's choices")] = False,
    dry_run: DryRun = False,
    json_: Json = False,
) -> None:
    """Delete temporary, broken and superseded files from a folder.

    Example: tilegen cache prune --older-than 365 --dry-run
    """
    from tilegen.store.listing import prune

    pruned = prune(
        source(where), older_than_days=older_than, unmeasured=unmeasured, dry_run=dry_run
    )
    if json_:
        print_json([asdict(removed) for removed in pruned])
        return
    for removed in pruned:
        console.print(f"{removed.file}: {removed.reason}")
    console.print(f"{len(pruned)} files {'would be ' if dry_run else ''}removed")


def _report(moved: Iterable[Transferred], as_json: bool, gpu: str | None = None) -> None:
    """Print the files moved. Raises Unsupported if there are none and the GPU's name is unknown."""
    from tilegen.store.transfer import summary

    def printed() -> Iterator[Transferred]:
        for file in moved:
            if not as_json and file.action != "same":
                console.print(str(file))
            yield file

    done = list(printed())
    if gpu is not None and not done:
        device_of(gpu)
    if as_json:
        print_json([asdict(file) for file in done])
    else:
        console.print(summary(done))


def _wanted(gpu: str | None, kernel: str | None) -> Selection:
    from tilegen.store.transfer import Selection

    with contextlib.suppress(Unsupported):  # records may be of GPUs missing in the catalogue
        gpu = gpu if gpu is None else device_of(gpu).name
    return Selection(gpu=gpu, kernel=None if kernel is None else kernel_named(kernel))


def _found(problem: AttentionProblem, spec: Any, kernel: Any) -> Found | None:
    from tilegen.emit.identity import template_digest
    from tilegen.store import look_up
    from tilegen.store.versions import versions_for
    from tilegen.task import KernelTask

    task = KernelTask.of(kernel, problem, spec)
    return look_up(task, versions=versions_for(spec), template_digest=template_digest(kernel))


def _differences(entry: Any) -> list[dict[str, Any]]:
    return [asdict(difference) for difference in entry.differences]


def _line(record: TuningRecord) -> str:
    median = record.measurement.median_us
    time = f"{us_text(median):>10}" if median else "unmeasured"
    return f"{record.kernel:15}{record.config.key:17} {time}"


def _values(record: TuningRecord) -> Any:
    return json.loads(record.to_json())
