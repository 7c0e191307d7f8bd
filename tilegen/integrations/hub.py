"""Bundles laid out for Hugging Face's package `kernels`, which loads kernels from repositories.

What is written needs torch and triton only: emitted kernels, a table of which one computes which
problem, and a small module that looks there (shipped.py). The compiler stays behind: that package
lets kernels depend on a handful of packages, and SymPy is none of them.
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
from tilegen.disk import write_whole
from tilegen.errors import InvalidProblem, Unsupported
from tilegen.kernels.config import Kernel
from tilegen.kernels.q_stationary import Q_STATIONARY
from tilegen.kernels.two_pass import TWO_PASS
from tilegen.masks.score import softcap
from tilegen.problem import AttentionProblem

Backend = Literal["cuda", "rocm", "cpu"]
NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")
_TENSORS = re.compile(r"(t\d+|c\d+|dc\d+|sinks|tiles|dropout)_ptr")
"""Names of arguments: tensors of masks and scores, lists of tiles made of these, seeds."""


def lay_out(
    bundle: str | Path,
    out: str | Path,
    *,
    name: str = "tilegen-attention",
    version: int = 1,
    license: str = "unknown",
    backends: Sequence[Backend] | None = None,
) -> Path:
    """Write a bundle's kernels as a repository for `kernels.get_kernel` and `get_local_kernel`, and
    return its folder.

    The module that these return has `attention`, `flash_attn_func` and `problems`. `backends` are
    by default those of the bundle's architectures; "cpu" is for Triton's interpreter. Raises
    InvalidProblem and Unsupported: problems whose masks or scores read tensors, or whose tiles are
    listed, need tilegen at run time.
    """
    if not NAME.fullmatch(name):
        raise InvalidProblem(f"name must be lower-case words joined by dashes, got {name!r}")
    found = Bundle(Path(bundle))
    if damaged := found.damaged():
        raise Unsupported(f"{bundle} is not whole: {damaged[0]} is not what the manifest says")
    manifest = found.manifest
    rows = [_row(one, manifest) for one in manifest.problems]
    sources = sorted({manifest.by_file[file].source for one in rows for file in one.pop("files")})
    table = json.dumps(rows, indent=1) + "\n"
    files = {
        "__init__.py": Path(__file__).with_name("shipped.py").read_bytes(),
        "table.json": table.encode(),
        "emitted/__init__.py": b"",
        **{f"emitted/{Path(one).name}": (found.path / one).read_bytes() for one in sources},
    }
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:12]
    archs = manifest.architectures
    backends = backends or tuple(
        dict.fromkeys("rocm" if one.startswith("gfx") else "cuda" for one in archs)
    )
    for backend in backends:
        folder = Path(out) / "build" / f"torch-{backend}"
        for file, data in files.items():
            write_whole(folder / file, data)
        metadata = {
            # Modules are known by it: each build has its own.
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
    """Return the table's row of a problem."""
    problem = AttentionProblem.parse(served.serves)
    files = [file for one in served.passes.values() for file in one.binaries.values()]
    binaries = [manifest.by_file[file] for file in files]
    reads = [name for one in binaries for name, _ in one.arguments if _TENSORS.fullmatch(name)]
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
    """Return the modules of a pass, in the order of their launches; None if it is missing, or is
    of other kernels."""
    one = served.passes.get(direction)
    if one is None:
        return None
    if set(one.binaries) != set(kernels):
        raise Unsupported(
            f"expected the {direction} of '{served.problem}' as {', '.join(kernels)}, got "
            f"{', '.join(one.binaries)}; leave it out of the catalogue"
        )
    binaries: list[Binary] = [by_file[one.binaries[kernel]] for kernel in kernels]
    return [Path(binary.source).stem for binary in binaries]


def _softcap(problem: AttentionProblem) -> float:
    """Return the soft cap of a problem's score, 0 for none. Raises Unsupported for other scores."""
    if problem.score is None:
        return 0.0
    match = re.match(r"([0-9.e+-]+)\*tanh\(", problem.score.text)
    cap = float(match[1]) if match else 0.0
    if not cap or problem.score.sinks or softcap(cap).form != problem.score:
        raise Unsupported(
            f"expected no score, or a soft cap, got {problem.score.notation}; leave it out of the "
            "catalogue"
        )
    return cap
