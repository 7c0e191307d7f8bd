"""Verdicts of the compiler, kept beside the kernels: a later process that has to choose compiles
nothing again."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from subprocess import SubprocessError
from typing import TYPE_CHECKING, Any

from tilegen.disk import log
from tilegen.emit.identity import kernel_digest
from tilegen.emit.kernel_files import folder_of, write_beside
from tilegen.errors import BuildFailed, InvalidRecord, Unsupported
from tilegen.model.resources import NUMBERS, Resources, StepCode
from tilegen.store.fields import Fields, parse_json
from tilegen.store.files import read_bytes, text_of
from tilegen.store.versions import installed

if TYPE_CHECKING:
    from tilegen.emit.identity import RenderedKernel
    from tilegen.kernels.config import Kernel
    from tilegen.task import Tiled

MAX_BYTES = 4096
"""Bytes of a file, at most: about 450 are usual, and messages of failures have at most 500."""
MAX_MESSAGE = 500


def verdict(tiled: Tiled, *, aligned: bool) -> Resources | BuildFailed:
    """Compile a kernel in this process, or return the cached result for this version of Triton.
    Raises Unsupported where nothing can be compiled."""
    if (known := remembered(tiled, aligned=aligned)) is not None:
        return known
    from tilegen.emit.render import render  # loads Jinja and SymPy

    rendered = render(tiled.problem, tiled.config, tiled.spec.name, aligned=aligned)
    found, lasts = _compiled(rendered, tiled.device.arch)
    if lasts:
        failed = str(found)[:MAX_MESSAGE] if isinstance(found, BuildFailed) else ""
        used = {} if isinstance(found, BuildFailed) else asdict(found)
        values = {"triton": installed("triton"), "failed": failed, **used}
        path = _path(tiled, aligned)
        with contextlib.suppress(Unsupported):  # the folder may be for reading only
            write_beside(path, f"{json.dumps(values)}\n".encode())
    return found


def remembered(tiled: Tiled, *, aligned: bool) -> Resources | BuildFailed | None:
    """Return the cached result of compiling a kernel with the version of Triton that is installed;
    None where there is none. Compiles nothing."""
    return _read(_path(tiled, aligned), installed("triton"), tiled.spec.fitted_as)


def _path(tiled: Tiled, aligned: bool) -> Path:
    kernel = tiled.spec.name
    digest = kernel_digest(tiled.problem, tiled.config, kernel, aligned)
    return folder_of(digest) / f"{kernel}.{tiled.device.arch}.json"


def _compiled(rendered: RenderedKernel, arch: str) -> tuple[Resources | BuildFailed, bool]:
    """Compile a kernel; the second result says whether compiling again would give the same."""
    from tilegen.compiling.compiler import compile_for

    try:
        built = compile_for(rendered, arch)
    except BuildFailed as error:
        passing = isinstance(error.__cause__, OSError | MemoryError | SubprocessError)
        return BuildFailed(str(error)), not passing
    return built.resources, True


def _read(path: Path, triton: str, kernel: Kernel) -> Resources | BuildFailed | None:
    """Read a verdict from its file; None if there is none, or if it is damaged or of another
    Triton."""
    try:
        if (data := read_bytes(path, MAX_BYTES)) is None:
            return None
        fields = parse_json(text_of(data))
        if fields.text("triton", longest=80) != triton:
            return None
        if failed := fields.text("failed", longest=MAX_MESSAGE):
            return BuildFailed(failed)
        sizes: dict[str, Any] = {
            name: fields.integer(name, 0, 2**31)
            for name in ("shared_bytes", "registers", "spill_bytes")
        }
        return Resources(**sizes, step_code=_step_code(fields, kernel))
    except InvalidRecord as error:
        log.debug("verdict %s is damaged (%s); asked again", path, error)
        return None


def _step_code(fields: Fields, kernel: Kernel) -> StepCode | None:
    if fields.is_null("step_code"):
        return None
    one = fields.group("step_code")
    numbers = {name: one.integer(name, 0, 2**31) for name in (*NUMBERS, "rows")}
    flags = {name: one.flag(name) for name in ("asynchronous", "serialized")}
    return StepCode(**numbers, **flags, kernel=kernel)
