"""Comparison of a bundle with what this tilegen would make, without making it again.

A binary is launched with what its manifest says, so a manifest of another tilegen, or one that was
changed, would have kernels read the wrong memory. This is no protection from somebody who means
harm: who can write a manifest can write binaries.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tilegen.bundles.folder import read
from tilegen.bundles.manifest import TYPES, Binary, Manifest, Served
from tilegen.emit.identity import VECTOR_BYTES, argument_names, digest_of_kind, template_digest
from tilegen.kernels.arguments import extra
from tilegen.kernels.config import threads_of
from tilegen.kernels.registry import KERNELS, grid_of
from tilegen.problem import DTYPE_BYTES
from tilegen.version import __version__

SCRATCH_POINTERS = 2
"""Number of pointers that Triton appends for NVIDIA GPUs; kernels here use none of that memory."""

KIND = re.compile(r"b1 hq(\d{1,9}) hkv1 q1024 kv1024 d\S+ (fp16|bf16|fp32) \S.*")
"""Notation that stands for a class of problems; its groups are the group size and the dtype."""


def why_not_ours(path: Path, manifest: Manifest) -> str:
    """Return in a line why this tilegen cannot launch what a folder holds, and an empty text if it
    can."""
    theirs, ours = manifest.versions.get("tilegen", ""), __version__
    if theirs != ours:
        return f"it was made by tilegen {theirs or 'of no known version'}, and this is {ours}"
    for one in manifest.binaries:
        if one.template_digest != template_digest(one.kernel):
            return (
                f"its {one.kernel} was emitted from another template ({one.template_digest}, and "
                f"here it is {template_digest(one.kernel)})"
            )
    served: set[str] = set()
    for some in manifest.problems:
        for file in (file for its in some.passes.values() for file in its.binaries.values()):
            served.add(file)
            if said := _difference(path, some, manifest.by_file[file]):
                return f"{file} is not what it makes for '{some.serves[:200]}': {said}"
    for file in manifest.by_file:
        if file not in served:
            return f"{file} serves no problem"
    return ""


def _difference(path: Path, served: Served, one: Binary) -> str:
    """Describe a mistake in the entry of a class of problems; empty if there is none."""
    if not (kind := KIND.fullmatch(served.serves)):
        return "expected a class such as 'b1 hq4 hkv1 q1024 kv1024 d128 bf16 causal'"
    group_size, dtype = int(kind[1]), kind[2]
    if one.digest != digest_of_kind(served.serves, one.config, one.kernel, served.aligned):
        return "its digest is that of another kernel, mask, config or tilegen"
    unit = VECTOR_BYTES // DTYPE_BYTES[dtype] if served.aligned else 1
    for name, found, expected in (
        ("threads", one.threads, threads_of(one.arch, one.config.num_warps)),
        ("stride_unit", one.stride_unit, unit),
        ("grid", one.grid, grid_of(one.kernel, one.config, group_size)),
        ("folder", one.file.partition("/")[0], one.arch),
    ):
        if found != expected:
            return f"{name} must be {expected}, got {found}"
    source = (read(path / one.source) or b"").decode("utf-8", errors="replace")
    if (names := argument_names(source, one.function)) is None:
        return f"its source has no function {one.function}"
    return _of_arguments(one, names, dtype)


def _of_arguments(one: Binary, names: Iterable[str], dtype: str) -> str:
    """Describe a mistake in the arguments of a binary; empty if there is none."""
    known = KERNELS[one.kernel].by_name
    arguments = [(name, known.get(name) or extra(name)) for name in names]
    found = list(one.arguments)
    scratch = SCRATCH_POINTERS
    if one.arch.startswith("gfx"):  # as many as that Triton appended
        scratch = len(found) - len(arguments)
    arguments += [(name, extra(name)) for name in (f"scratch_{i}" for i in range(scratch))]
    if len(found) != len(arguments):
        return f"expected {len(arguments)} arguments, got {len(found)}"
    for i, ((name, expected), (its, its_type)) in enumerate(zip(arguments, found, strict=True)):
        type_ = expected.type_for(dtype) if expected else ""
        pointers = [a for a in TYPES if a.startswith("*")]
        if name != its or its_type not in ([type_] if type_ else pointers):
            return f"argument {i} must be {name} of {type_ or 'a pointer'}, got {its} of {its_type}"
    return ""
