"""The identity of an emitted kernel: a digest of everything that determines its text."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tilegen import resources
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

VECTOR_BYTES = 16
"""Widest load of one thread; in an aligned kernel, addresses and strides are multiples of it."""

LAUNCH_TEMPLATE = "_launch.jinja"
"""The template of the Python side, which `render` appends to each kernel."""
ENVIRONMENT = "trim_blocks lstrip_blocks keep_trailing_newline StrictUndefined WholeLines"
"""Options of the Jinja environment (`render.environment`); part of every digest."""


@dataclass(frozen=True, kw_only=True)
class RenderedKernel:
    """An emitted kernel, before anything is compiled."""

    kernel: Kernel
    """Name of the kernel: fwd, bwd_dq, ..."""
    problem: AttentionProblem
    """The problem that the kernel was rendered for."""
    config: TileConfig
    """The tiles and launch options written into the text."""
    aligned: bool
    """True if addresses and strides must be multiples of 16 bytes."""
    digest: str
    """Hex digest of everything that determines the text."""
    function: str
    """Name of the `@triton.jit` function, which profilers show."""
    source: str
    """The whole module: imports torch and triton only; `launch(...)` is its entry point."""
    signature: tuple[tuple[str, str], ...]
    """(argument, Triton type) of the function, for compiling without a GPU."""

    @property
    def specialised(self) -> bool:
        """True if warpgroups have roles. The text says so where its family is not registered, as in
        processes that compile."""
        return "\n@gluon.jit" in self.source


def representative(problem: AttentionProblem) -> AttentionProblem:
    """Return the problem that stands for all problems with the same emitted kernels: any batch,
    heads and lengths."""
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
    """Return the digest of a kernel for all problems with this representative's notation."""
    request = [kind, config.key, kernel, aligned, generator_digest()]
    if KERNELS[kernel].folder:  # its templates are not in tilegen's folder
        request.append(template_digest(kernel))
    return hashlib.sha256(json.dumps(request).encode()).hexdigest()[:16]


def template_folders(kernel: Kernel) -> list[Path]:
    """Return the folders of a kernel's template and of the templates that it imports."""
    own = KERNELS[kernel].folder
    return [*([own] if own else []), resources.data_dir("templates")]


@lru_cache(maxsize=16)
def template_digest(kernel: Kernel) -> str:
    """Return the hex digest of a kernel's template, all templates it reaches, and the environment's
    options."""
    folders = template_folders(kernel)
    names, reached = [KERNELS[kernel].template, LAUNCH_TEMPLATE], dict[str, str]()
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
    """Return the arguments of a function in an emitted text, which is their only list; None if
    there is no such function."""
    match = re.search(rf"^def {function}\((.*?)\):", source, re.DOTALL | re.MULTILINE)
    return re.findall(r"\w+", re.sub(r"#.*", "", match[1])) if match else None


def rows_are_aligned(problem: AttentionProblem) -> bool:
    """Return True if dense rows of q, k, v and out are multiples of 16 bytes."""
    unit = stride_unit(problem, True)
    return problem.head_dim_qk % unit == 0 and problem.head_dim_v % unit == 0


def stride_unit(problem: AttentionProblem, aligned: bool) -> int:
    """Return the number of elements in which a kernel's strides are counted."""
    return VECTOR_BYTES // problem.element_bytes if aligned else 1


def is_aligned(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's address, strides (batch, head, row) and rows are multiples of 16
    bytes."""
    unit = VECTOR_BYTES // tensor.element_size()
    shape, (batch, head, row, _) = tensor.shape, tensor.stride()
    if tensor.data_ptr() % VECTOR_BYTES or shape[3] % unit:
        return False
    if not (batch | head | row) % unit:
        return True
    # Strides of dimensions of size 1 are never used.
    return all(n == 1 or s % unit == 0 for n, s in zip(shape[:3], (batch, head, row), strict=True))


@lru_cache(maxsize=1)
def generator_digest() -> str:
    """Hash the templates and the modules that fill them in."""
    package = Path(__file__).parents[1]
    sources = list(resources.data_dir("templates").rglob("*.jinja"))
    for folder in ("emit", "kernels", "masks"):
        sources += (package / folder).rglob("*.py")
    digest = hashlib.sha256()
    for path in sorted(sources, key=lambda path: path.parts[-3:]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
