"""Write and import the files of emitted kernels.

A kernel's digest covers everything that determines its text, so an existing file is never rendered
again, and a call whose kernels are on disk loads no templates. Only files that no other user can
have written are read; other kernels are rendered in each process.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from pathlib import Path
from types import ModuleType

from tilegen.bounded_cache import BoundedCache
from tilegen.disk import log, own_folder, say_once, write_whole
from tilegen.emit.identity import RenderedKernel, kernel_digest
from tilegen.emit.launch import launch_of
from tilegen.emit.render import render, rendered_as
from tilegen.environment import CACHE_DIR, current
from tilegen.errors import Unsupported
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.private_files import NotPrivate, check_private, read_private
from tilegen.problem import AttentionProblem

MAX_MODULES = 2048
"""Number of emitted modules that stay imported."""


def write(rendered: RenderedKernel) -> Path:
    """Return the emitted file under the cache directory; write it if it is missing.

    The file is written atomically, so processes may race. Raises Unsupported if it cannot be
    written.
    """
    path = _path(rendered.digest, rendered.kernel)
    source = rendered.source.encode("utf-8")
    if not path.is_file() or path.read_bytes() != source:
        write_beside(path, source)
    return path


def write_beside(path: Path, data: bytes) -> None:
    """Write a file atomically into the folder of an emitted kernel. New folders are private to this
    user. Raises Unsupported if the file cannot be written."""
    _make_private(path.parent.parent)
    write_whole(path, data)


def load(rendered: RenderedKernel) -> ModuleType:
    """Return the emitted module, imported once per process; `.launch(...)` runs the kernel."""
    return _modules.get(rendered.digest, lambda: _import_rendered(rendered))


def emitted(
    problem: AttentionProblem, config: TileConfig, kernel: Kernel, *, aligned: bool
) -> RenderedKernel:
    """Return a kernel with the text of its file. It is rendered only if there is no file, or if
    other users could have written the file."""
    path = _path(kernel_digest(problem, config, kernel, aligned), kernel)
    try:
        if (data := read_private(path)) is not None:
            source = data.decode("utf-8")
            compile(source, str(path), "exec")
            launch_of(source)
            return rendered_as(source, problem, config, kernel, aligned=aligned)
    except NotPrivate as doubt:
        say_once(
            f"{doubt}, so emitted kernels in {str(path.parent.parent)!r} are not imported but "
            "rendered in every process; have TILEGEN_CACHE_DIR name a folder that only you can "
            "write to, and share records by TILEGEN_CACHE_PATH"
        )
    except (ValueError, SyntaxError) as error:
        log.warning("emitted kernel %s is damaged (%s); writing it again", path, error)
    rendered = render(problem, config, kernel, aligned=aligned)
    load(rendered)  # writes the file
    return rendered


def _forget(module: ModuleType) -> None:
    sys.modules.pop(module.__name__, None)
    linecache.cache.pop(module.launch.__code__.co_filename, None)


_modules: BoundedCache[str, ModuleType] = BoundedCache(MAX_MODULES, _forget)


def _make_private(folder: Path) -> None:
    """Create a missing folder with access for this user only."""
    with contextlib.suppress(OSError):  # the write below raises the error
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def folder_of(digest: str) -> Path:
    """Return the folder of an emitted kernel and its compile results."""
    return current().cache_dir / "kernels" / digest


def _path(digest: str, kernel: Kernel) -> Path:
    return folder_of(digest) / f"{kernel}.py"


def _import_rendered(rendered: RenderedKernel) -> ModuleType:
    """Import a rendered text as a module. Its file name is where it would have been imported
    from."""
    path = _path(rendered.digest, rendered.kernel)
    try:
        check_private(path)
        path = write(rendered)
    except NotPrivate:
        path = _in_memory(rendered)
    except Unsupported as error:  # a call never fails because of a disk
        path = _written_elsewhere(rendered, error)
    return _import(rendered.source.encode("utf-8"), str(path), rendered.digest)


def _in_memory(rendered: RenderedKernel) -> Path:
    """Return a name for tracebacks instead of a file."""
    return Path(f"{rendered.function}_{rendered.digest}.py")


def _written_elsewhere(rendered: RenderedKernel, error: Unsupported) -> Path:
    """Write an emitted kernel into the temporary folder of this process, or nowhere if that cannot
    be written either."""
    reason = getattr(error.__cause__, "strerror", None) or error
    failure = f"the cache {str(current().cache_dir)!r} cannot be written ({reason})"
    remedy = f"set {CACHE_DIR} to a folder you can write to"
    if folder := own_folder():
        path = folder / rendered.digest / f"{rendered.kernel}.py"
        with contextlib.suppress(Unsupported):
            write_whole(path, rendered.source.encode("utf-8"))
            say_once(f"{failure}; kernels go to {str(folder)!r} until this process ends; {remedy}")
            return path
    say_once(f"{failure}, nor can a temporary folder; kernels stay in memory; {remedy}")
    return _in_memory(rendered)


def _import(source: bytes, file: str, digest: str) -> ModuleType:
    """Import a text as a module. Byte code is never read: another user may have written it.

    The lines of the source are given to `linecache`, where Triton looks for them.
    """
    module = ModuleType(f"tilegen_kernels_{digest}_{Path(file).stem}")
    module.__file__ = file
    # Triton takes names in UTF-8 only, and the name of a folder may be in any encoding.
    name = os.fsencode(file).decode("utf-8", "replace")
    code = compile(source, name, "exec")
    text = source.decode("utf-8")
    # Lines without a modification time stay valid, even if the file changes.
    linecache.cache[name] = len(source), None, text.splitlines(keepends=True), name
    sys.modules[module.__name__] = module  # Triton looks up a kernel's module by name
    exec(code, module.__dict__)
    vars(module)["SOURCE"] = text
    if not hasattr(module, "launch"):
        raise ImportError(f"expected a function `launch` in {file}")
    return module
