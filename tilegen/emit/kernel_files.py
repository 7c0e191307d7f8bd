"""Emitted kernels as files: what identifies one, where it lies, how it is imported.

A kernel's digest covers everything that determines its text, so a file that is there need not be
rendered again: a call whose kernels are on disk loads neither the templates nor SymPy. Only files
that nobody else can have written are imported; elsewhere kernels are rendered in each process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import linecache
import re
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from tilegen import resources
from tilegen.bounded_cache import BoundedCache
from tilegen.disk import log, say_once, write_whole
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.private_files import NotPrivate, check_private, read_private
from tilegen.problem import AttentionProblem
from tilegen.settings import settings

if TYPE_CHECKING:
    import torch

VECTOR_BYTES = 16
"""Widest load of one thread; an aligned kernel gets addresses and strides in multiples of it."""

ENVIRONMENT = "trim_blocks lstrip_blocks keep_trailing_newline StrictUndefined"
"""Options of the Jinja environment (`render.environment`); part of every digest."""

MAX_MODULES = 2048
"""Emitted modules that stay imported."""


@dataclass(frozen=True, kw_only=True)
class RenderedKernel:
    """An emitted kernel, before anything is compiled."""

    kernel: Kernel
    """Name of the kernel: fwd, bwd_dq, ..."""
    problem: AttentionProblem
    """The problem that the kernel was asked for."""
    config: TileConfig
    """The tiles and launch options written into the text."""
    aligned: bool
    """True: addresses and strides must be multiples of 16 bytes."""
    digest: str
    """Hex digest of everything that determines the text."""
    function: str
    """Name of the `@triton.jit` function, which profilers show."""
    source: str
    """The whole module: imports torch and triton only; `launch(...)` is its entry point."""
    signature: tuple[tuple[str, str], ...]
    """(argument, Triton type) of the function, for compiling without a GPU."""


def representative(problem: AttentionProblem) -> AttentionProblem:
    """Return the problem that stands for all with the same emitted kernels: any batch, heads and
    lengths."""
    return replace(
        problem,
        batch=1,
        num_heads_q=problem.group_size,
        num_heads_kv=1,
        seqlen_q=1024,
        seqlen_kv=1024,
        mask=problem.mask.general,
    )


def kernel_digest(
    problem: AttentionProblem, config: TileConfig, kernel: Kernel, aligned: bool
) -> str:
    """Return the hex digest of everything that determines an emitted kernel's text."""
    return digest_of_kind(representative(problem).key, config, kernel, aligned)


def digest_of_kind(kind: str, config: TileConfig, kernel: Kernel, aligned: bool) -> str:
    """Return the digest of a kernel for all problems that a notation is the representative of."""
    request = [kind, config.key, kernel, aligned, _generator_digest()]
    if KERNELS[kernel].folder:  # with templates that are not among those of tilegen
        request.append(template_digest(kernel))
    return hashlib.sha256(json.dumps(request).encode()).hexdigest()[:16]


def template_folders(kernel: Kernel) -> list[Path]:
    """Return where a kernel's template is looked for, and those that it imports."""
    own = KERNELS[kernel].folder
    return [*([own] if own else []), resources.data_dir("templates")]


@lru_cache(maxsize=16)
def template_digest(kernel: Kernel) -> str:
    """Return the hex digest of a kernel's template, all templates it reaches, and the environment's
    options."""
    folders = template_folders(kernel)
    names, reached = [KERNELS[kernel].template], dict[str, str]()
    while names:
        name = names.pop()
        if name not in reached:
            file = next(one / name for one in folders if (one / name).is_file())
            reached[name] = file.read_text(encoding="utf-8")
            names += re.findall(
                r'{%-?\s*(?:import|from|include|extends)\s+"([^"]+)"', reached[name]
            )
    return hashlib.sha256(json.dumps([sorted(reached.items()), ENVIRONMENT]).encode()).hexdigest()[
        :12
    ]


def argument_names(source: str, function: str) -> list[str] | None:
    """Return the arguments of a function in an emitted text, which alone lists them; None where
    there is no such function."""
    match = re.search(rf"^def {function}\((.*?)\):", source, re.DOTALL | re.MULTILINE)
    return re.findall(r"\w+", re.sub(r"#.*", "", match[1])) if match else None


def write(rendered: RenderedKernel) -> Path:
    """Return the emitted file under the cache directory, writing it unless it is there.

    Processes may race: the file is written whole. Raises Unsupported where it cannot be.
    """
    path = _path(rendered.digest, rendered.kernel)
    source = rendered.source.encode("utf-8")
    if not path.is_file() or path.read_bytes() != source:
        write_beside(path, source)
    return path


def write_beside(path: Path, data: bytes) -> None:
    """Write a file into the folder of an emitted kernel, whole, and into folders that nobody else
    gets into where they are new. Raises Unsupported where it cannot be written."""
    _make_private(path.parent.parent)
    write_whole(path, data)


def load(rendered: RenderedKernel) -> ModuleType:
    """Return the emitted module, imported once per process; `.launch(...)` runs the kernel."""
    return _modules.get(rendered.digest, lambda: _import_rendered(rendered))


def load_kernel(
    problem: AttentionProblem, config: TileConfig, kernel: Kernel, *, aligned: bool
) -> ModuleType:
    """Return the emitted module for a problem and config; rendered only if it is not on disk, or
    if others could have written what is there."""
    digest = kernel_digest(problem, config, kernel, aligned)

    def imported() -> ModuleType:
        path = _path(digest, kernel)
        try:
            if (source := read_private(path)) is not None:
                return _import(source, str(path), digest)
        except NotPrivate as doubt:
            say_once(
                f"{doubt}, so emitted kernels in {str(path.parent.parent)!r} are not imported but "
                "rendered in every process; have TILEGEN_CACHE_DIR name a folder that only you can "
                "write to, and share records by TILEGEN_CACHE_PATH"
            )
        except Exception as error:  # a damaged file raises anything
            log.warning("emitted kernel %s is damaged (%s); written again", path, error)
        from tilegen.emit.render import render  # loads Jinja and SymPy

        return _import_rendered(render(problem, config, kernel, aligned=aligned))

    return _modules.get(digest, imported)


def _forget(module: ModuleType) -> None:
    sys.modules.pop(module.__name__, None)
    linecache.cache.pop(str(module.__file__), None)


_modules: BoundedCache[str, ModuleType] = BoundedCache(MAX_MODULES, _forget)


def rows_are_aligned(problem: AttentionProblem) -> bool:
    """True where dense rows of q, k, v and out are multiples of 16 bytes."""
    unit = stride_unit(problem, True)
    return problem.head_dim_qk % unit == 0 and problem.head_dim_v % unit == 0


def stride_unit(problem: AttentionProblem, aligned: bool) -> int:
    """Return the elements by which a kernel's strides are counted."""
    return VECTOR_BYTES // problem.element_bytes if aligned else 1


def is_aligned(tensor: torch.Tensor) -> bool:
    """True where a tensor's address, strides (batch, head, row) and rows are multiples of 16
    bytes."""
    unit = VECTOR_BYTES // tensor.element_size()
    strides = zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    return (
        tensor.data_ptr() % VECTOR_BYTES == 0
        and tensor.shape[3] % unit == 0
        and all(n == 1 or s % unit == 0 for n, s in strides)
    )


def _make_private(folder: Path) -> None:
    """Make a folder that is missing, so that nobody else gets into it."""
    with contextlib.suppress(OSError):  # who writes into it says what is wrong
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def folder_of(digest: str) -> Path:
    """Return where an emitted kernel lies, and what is remembered of it."""
    return settings().cache_dir / "kernels" / digest


def _path(digest: str, kernel: Kernel) -> Path:
    return folder_of(digest) / f"{kernel}.py"


def _import_rendered(rendered: RenderedKernel) -> ModuleType:
    """Return the module of a text that is known, which a file shows where it would be imported."""
    path = _path(rendered.digest, rendered.kernel)
    try:
        check_private(path)
        path = write(rendered)
    except NotPrivate:
        path = Path(f"{rendered.function}_{rendered.digest}.py")  # no file: a name for tracebacks
    return _import(rendered.source.encode("utf-8"), str(path), rendered.digest)


def _import(source: bytes, file: str, digest: str) -> ModuleType:
    """Return the module that a text makes. No byte code is read, which others may have put there.

    Its lines are handed to `linecache`, where Triton looks for them.
    """
    module = ModuleType(f"tilegen_kernels_{digest}_{Path(file).stem}")
    module.__file__ = file
    code = compile(source, file, "exec")
    text = source.decode("utf-8")
    # Without a time of change they stay valid, whatever becomes of the file.
    linecache.cache[file] = len(source), None, text.splitlines(keepends=True), file
    sys.modules[module.__name__] = module  # Triton looks a kernel's module up by name
    exec(code, module.__dict__)
    if not hasattr(module, "launch"):
        raise ImportError(f"expected a function `launch` in {file}")
    return module


@lru_cache(maxsize=1)
def _generator_digest() -> str:
    """Digest of the templates and of the modules that fill them in."""
    package = Path(__file__).parents[1]
    sources = list(resources.data_dir("templates").rglob("*.jinja"))
    for folder in ("emit", "kernels", "masks"):
        sources += (package / folder).rglob("*.py")
    digest = hashlib.sha256()
    for path in sorted(sources, key=lambda path: path.parts[-3:]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
