"""Lay out bundles as repositories for Hugging Face's package `kernels`.

The result needs only torch and triton: emitted kernels, a table of the problems that they compute,
and a small module that reads the table (shipped.py). The compiler is not included: the package
allows kernels few dependencies, and SymPy is not among them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tilegen.bundles.manifest import Binary, Manifest, Served
from tilegen.bundles.served import Bundle
from tilegen.cpu.processors import PROCESSORS
from tilegen.disk import write_whole
from tilegen.errors import InvalidProblem, Unsupported
from tilegen.kernels.config import Kernel
from tilegen.kernels.q_stationary import Q_STATIONARY
from tilegen.kernels.two_pass import TWO_PASS
from tilegen.masks.score import softcap
from tilegen.problem import AttentionProblem

HubBackend = Literal["cuda", "rocm", "cpu"]
NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")
_TENSORS = re.compile(r"(t\d+|c\d+|dc\d+|sinks|tiles|dropout)_ptr")
"""Arguments that need tilegen at run time: tensors of masks and scores, lists of tiles, seeds."""


def lay_out(
    bundle: str | Path,
    out: str | Path,
    *,
    name: str = "tilegen-attention",
    version: int = 1,
    license: str = "unknown",
    backends: Sequence[HubBackend] | None = None,
) -> Path:
    """Write a bundle's kernels as a repository for `kernels.get_kernel` and `get_local_kernel`.

    Returns the repository's folder. Its module has `attention`, `flash_attn_func` and `problems`.
    `backends` defaults to those of the bundle's architectures; "cpu" is for Triton's interpreter.
    Raises InvalidProblem and Unsupported. Problems whose masks or scores read tensors, or whose
    tiles are listed, need tilegen at run time and are not supported.
    """
    if not NAME.fullmatch(name):
        raise InvalidProblem(f"name must be lower-case words joined by dashes, got {name!r}")
    opened = Bundle(Path(bundle))
    if damaged := opened.damaged():
        raise Unsupported(f"{bundle} is not whole: {damaged[0]} is not what the manifest says")
    manifest = opened.manifest
    # The repository holds emitted kernels, which Triton compiles for GPUs alone.
    entries = [served for served in manifest.problems if served.arch not in PROCESSORS]
    if not entries:
        raise Unsupported(f"{bundle} has no binaries for GPUs: generate with --arch sm_90")
    rows = [_row(served, manifest) for served in entries]
    sources = sorted({manifest.by_file[file].source for row in rows for file in row.pop("files")})
    table = json.dumps(rows, indent=1) + "\n"
    files = {
        "__init__.py": Path(__file__).with_name("shipped.py").read_bytes(),
        "table.json": table.encode(),
        "emitted/__init__.py": b"",
        **{f"emitted/{Path(file).name}": (opened.path / file).read_bytes() for file in sources},
    }
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:12]
    archs = [served.arch for served in entries]
    backends = backends or tuple(
        dict.fromkeys("rocm" if arch.startswith("gfx") else "cuda" for arch in archs)
    )
    for backend in backends:
        folder = Path(out) / "build" / f"torch-{backend}"
        for file, data in files.items():
            write_whole(folder / file, data)
        metadata = {
            # Python modules are named by the id, so each build needs its own.
            "id": f"_{name.replace('-', '_')}_{backend}_{digest}",
            "name": name,
            "version": version,
            "license": license,
            "python-depends": [],
            "backend": {"type": backend},
        }
        write_whole(folder / "metadata.json", json.dumps(metadata, indent=1).encode())
    return Path(out)


def _row(served: Served, manifest: Manifest) -> dict[str, Any]:
    """Return the row of a problem in the table."""
    problem = AttentionProblem.parse(served.serves)
    files = [file for kernels in served.passes.values() for file in kernels.binaries.values()]
    binaries = [manifest.by_file[file] for file in files]
    named = (name for binary in binaries for name, _ in binary.arguments)
    reads = [name for name in named if _TENSORS.fullmatch(name)]
    forward = _names(served, "forward", Q_STATIONARY.names, manifest.by_file)
    if reads or forward is None:
        raise Unsupported(
            f"expected problems without dropout whose masks and scores read no tensors, with the "
            f"forward in one kernel, got '{served.problem}'; leave it out of the catalogue"
        )
    return {
        "arch": served.arch,
        "serves": served.serves,
        "kind": [
            *(problem.head_dim_qk, problem.head_dim_v, problem.dtype, problem.group_size),
            _softcap(problem),
        ],
        "mask": problem.mask.notation,
        "sizes": served.sizes,
        "aligned": served.aligned,
        "forward": forward[0],
        "backward": _names(served, "backward", TWO_PASS.names, manifest.by_file),
        "files": files,
    }


def _names(
    served: Served, direction: Any, kernels: tuple[Kernel, ...], by_file: Any
) -> list[str] | None:
    """Return the modules of a pass in launch order; None if the bundle does not have the pass.
    Raises Unsupported for other kernels."""
    pass_ = served.passes.get(direction)
    if pass_ is None:
        return None
    if set(pass_.binaries) != set(kernels):
        raise Unsupported(
            f"expected the {direction} of '{served.problem}' as {', '.join(kernels)}, got "
            f"{', '.join(pass_.binaries)}; leave it out of the catalogue"
        )
    binaries: list[Binary] = [by_file[pass_.binaries[kernel]] for kernel in kernels]
    return [Path(binary.source).stem for binary in binaries]


def _softcap(problem: AttentionProblem) -> float:
    """Return the soft cap of a problem's score, 0 for none. Raises Unsupported for other scores."""
    if problem.score is None:
        return 0.0
    factors = (float(part.value) for part in problem.score.expression().args if part.is_const)
    cap = next(factors, 1.0)
    if cap <= 0 or problem.score.sinks or softcap(cap).form != problem.score:
        raise Unsupported(
            f"expected no score, or a soft cap, got {problem.score.notation}; leave it out of the "
            "catalogue"
        )
    return cap
