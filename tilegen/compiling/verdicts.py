"""Results of compilations, stored beside the emitted kernels, so that later processes choose
without compiling."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from subprocess import SubprocessError
from typing import TYPE_CHECKING

from tilegen.disk import log
from tilegen.emit.identity import kernel_digest
from tilegen.emit.kernel_files import folder_of, write_beside
from tilegen.emit.render import render
from tilegen.errors import BuildFailed, InvalidRecord, Unsupported
from tilegen.model.resources import NUMBERS, Resources, StepCode
from tilegen.store.fields import Fields, Form, parse_json, rule
from tilegen.store.files import read_bytes, text_of
from tilegen.store.versions import installed

if TYPE_CHECKING:
    from tilegen.emit.identity import RenderedKernel
    from tilegen.kernels.config import Kernel
    from tilegen.task import Tiled

MAX_BYTES = 4096
"""Maximum size of a file [bytes]: about 450 are usual, and messages have at most MAX_MESSAGE."""
MAX_MESSAGE = 500


def verdict(tiled: Tiled, *, aligned: bool) -> Resources | BuildFailed:
    """Compile a kernel in this process, or return the stored result for this version of Triton.
    Raises Unsupported if nothing can be compiled."""
    if (known := remembered(tiled, aligned=aligned)) is not None:
        return known

    rendered = render(tiled.problem, tiled.config, tiled.spec.name, aligned=aligned)
    result, is_lasting = _compiled(rendered, tiled.device.arch)
    if is_lasting:
        failed = str(result)[:MAX_MESSAGE] if isinstance(result, BuildFailed) else ""
        used = {} if isinstance(result, BuildFailed) else asdict(result)
        values = {"triton": installed("triton"), "failed": failed, **used}
        path = _path(tiled, aligned)
        with contextlib.suppress(Unsupported):  # the folder may be read-only
            write_beside(path, f"{json.dumps(values)}\n".encode())
    return result


def remembered(tiled: Tiled, *, aligned: bool) -> Resources | BuildFailed | None:
    """Return the stored result of compiling a kernel with the installed Triton; None if there is
    none. Compiles nothing."""
    return _read(_path(tiled, aligned), installed("triton"), tiled.spec.fitted_as)


def _path(tiled: Tiled, aligned: bool) -> Path:
    kernel = tiled.spec.name
    digest = kernel_digest(tiled.problem, tiled.config, kernel, aligned)
    return folder_of(digest) / f"{kernel}.{tiled.device.arch}.json"


def _compiled(rendered: RenderedKernel, arch: str) -> tuple[Resources | BuildFailed, bool]:
    """Compile a kernel; return the result, and True if compiling again would give the same."""
    from tilegen.compiling.compiler import compile_for

    try:
        built = compile_for(rendered, arch)
    except BuildFailed as error:
        is_temporary = isinstance(error.__cause__, OSError | MemoryError | SubprocessError)
        return BuildFailed(str(error)), not is_temporary
    return built.resources, True


def _read(path: Path, triton: str, kernel: Kernel) -> Resources | BuildFailed | None:
    """Read a stored result; None if it is missing, damaged, or of another version of Triton."""
    try:
        if (data := read_bytes(path, MAX_BYTES)) is None:
            return None
        fields = parse_json(text_of(data))
        if fields.text("triton", longest=80) != triton:
            return None
        if failed := fields.text("failed", longest=MAX_MESSAGE):
            return BuildFailed(failed)
        code = None
        if not fields.is_null("step_code"):
            code = _STEP_CODE.read(fields.group("step_code"), kernel=kernel)
        return _RESOURCES.read(fields, step_code=code)
    except InvalidRecord as error:
        log.debug("verdict %s is damaged (%s); asked again", path, error)
        return None


_COUNT, _FLAG = rule(Fields.integer, 0, 2**31), rule(Fields.flag)
_RESOURCES = Form(Resources, shared_bytes=_COUNT, registers=_COUNT, spill_bytes=_COUNT)
_STEP_CODE = Form(
    StepCode,
    **dict.fromkeys((*NUMBERS, "rows"), _COUNT),
    **dict.fromkeys(("asynchronous", "serialized"), _FLAG),
)
