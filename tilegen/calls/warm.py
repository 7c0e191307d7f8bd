"""Compile the kernels of calls ahead of time, in this process and into the local cache."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from tilegen import api
from tilegen.check import in_child
from tilegen.check.reference import make_inputs
from tilegen.cpu import runs_compiled
from tilegen.emit.identity import rows_are_aligned
from tilegen.environment import current, settings
from tilegen.errors import InvalidProblem
from tilegen.gpus.spec import detect
from tilegen.kernels.registry import FAMILIES
from tilegen.kernels.spec import Direction
from tilegen.launch.autograd import computes_by_torch
from tilegen.launch.changes import Changes, Wanted
from tilegen.launch.kernels import Kernels
from tilegen.problem import AttentionProblem
from tilegen.runtime import dispatch
from tilegen.task import KernelTask

MAX_LENGTHS = 2**17
"""Lengths of one call of `warm`: each takes some microseconds."""
ROWS = 16
"""Queries and keys of the tensors with which a GPU's kernels are compiled."""


def warm(
    problem: AttentionProblem | str | Sequence[AttentionProblem | str] = (),
    lengths: Iterable[int] | str | None = None,
    *,
    catalog: Path | str | None = None,
    backward: bool = False,
    device: torch.device | str | None = None,
) -> list[AttentionProblem]:
    """Compile the kernels of calls ahead of time; later calls of these problems compile nothing.

    Calls share kernels within a bucket: batch and lengths are rounded up to powers of two. With
    `lengths`, such as `range(1, 8193)` or `"1..8192"`, every bucket of these lengths is compiled.
    A length is that of keys, and of queries too unless the problem has another number of queries,
    as `q1 kv4096` of decoding has. `problem` is a single problem or several; a `catalog` file may
    replace it. `backward` compiles the kernels of training too.

    Nothing is tuned, even with TILEGEN_TUNE=1. Lengths and tables of pages are int32, tensors dense
    and aligned; calls with others may compile. On a GPU problems with tensors of a mask or score
    are compiled for the choice, and loaded by Triton at their first call.

    Returns the buckets; none where PyTorch computes. Raises InvalidProblem and Unsupported.
    """
    named = device or ("cuda" if torch.cuda.is_available() else "cpu")
    place = torch.empty(0, device=named).device  # with the index of a GPU, as tensors of calls have
    problems = api.problems_of(problem, catalog)
    buckets = dict.fromkeys(one.bucket for one in _of_lengths(problems, lengths))
    if computes_by_torch(place):
        return []
    directions: tuple[Direction, ...] = ("forward", "backward") if backward else ("forward",)
    for bucket in buckets:
        integers = (torch.int32,) * 3 if bucket.page else ()
        key = bucket, place, rows_are_aligned(bucket), rows_are_aligned(bucket), integers
        with settings(tune=False):
            if place.type == "cuda" and current().hopper:
                _check(bucket, place, directions)
            kernels = dispatch.kernels_of(*key)
            for direction in directions[: 1 if bucket.page else 2]:
                kernels.load(direction)
        if not runs_compiled(place) and _is_plain(bucket):
            _launch(kernels, bucket, backward)
    return [*buckets]


def _check(
    problem: AttentionProblem, device: torch.device, directions: Iterable[Direction]
) -> None:
    """Check the model's first config of each kernel whose warpgroups have roles, in a child."""
    from tilegen.choose.ranker import best_of  # loads SymPy

    gpu = detect(device.index)
    families = [one for way in directions for one in FAMILIES[way].values()]
    for family in families if gpu else ():
        if gpu and family.by_record and not family.why_not(problem, gpu.arch):
            for kernel in (one.name for one in family.kernels if one.specialised):
                task = KernelTask.of(kernel, problem, gpu)
                in_child.check(task.tiled(best_of(task).config))


def lengths_of(given: Iterable[int] | str) -> list[int]:
    """Return the lengths of an argument: integers, or a text such as `1..8192,16384`. Raises
    InvalidProblem."""
    if isinstance(given, str):
        ranges: list[int] = []
        for part in given.split(","):
            match = re.fullmatch(r"\s*(\d{1,9})(?:\.\.(\d{1,9}))?\s*", part)
            if match is None:
                raise InvalidProblem(f"lengths must be such as 1..8192 or 512,4096; got {given!r}")
            ranges += range(int(match[1]), int(match[2] or match[1]) + 1)[: MAX_LENGTHS + 1]
        given = ranges
    lengths = list(given)
    if wrong := [n for n in lengths if not isinstance(cast("Any", n), int) or n < 1]:
        raise InvalidProblem(f"lengths must be integers from 1, got {wrong[0]!r}")
    if not 1 <= len(lengths) <= MAX_LENGTHS:
        raise InvalidProblem(f"expected 1 to {MAX_LENGTHS} lengths, got {len(lengths)}")
    return lengths


def _of_lengths(
    problems: Sequence[AttentionProblem], lengths: Iterable[int] | str | None
) -> Iterator[AttentionProblem]:
    """Yield the problems with each length, as calls under the current settings have them."""
    given = None if lengths is None else lengths_of(lengths)
    for problem in problems:
        problem = replace(problem, invariant=problem.invariant or current().batch_invariant)
        for length in [problem.seqlen_kv] if given is None else given:
            yield with_length(problem, length)


def with_length(problem: AttentionProblem, length: int) -> AttentionProblem:
    """Return a problem with another number of keys, and of queries unless it has its own."""
    rows = length if problem.seqlen_q == problem.seqlen_kv else problem.seqlen_q
    return replace(problem, seqlen_q=rows, seqlen_kv=length)


def _is_plain(problem: AttentionProblem) -> bool:
    """Check whether a call of a problem has no tensors besides q, k and v."""
    return not (problem.mask.tables or problem.score or problem.dropout or problem.page)


def _launch(kernels: Kernels, problem: AttentionProblem, backward: bool) -> None:
    """Launch kernels on a few rows, since Triton compiles at a launch, for any length."""
    few = replace(problem, batch=1, seqlen_q=ROWS, seqlen_kv=ROWS)
    x, changes = make_inputs(few, device=kernels.device), Changes(problem.mask)
    out, lse = kernels.forward(x.q, x.k, x.v, 1.0, changes)
    if backward:
        given = x.q, x.k, x.v, out, lse
        kernels.backward(given, x.dout, None, 1.0, changes, Wanted(True, True))
