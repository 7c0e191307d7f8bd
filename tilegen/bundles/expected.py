"""Comparison of a bundle with the bundle that this tilegen would build, without building it.

A binary is launched as its manifest describes. A manifest that was edited, or that another tilegen
wrote, could make kernels access the wrong memory. The comparison is no protection against attacks:
whoever can write a manifest can write binaries.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tilegen.bundles.folder import read
from tilegen.bundles.manifest import TYPES, Binary, Manifest, Served
from tilegen.cpu.processors import PROCESSORS
from tilegen.emit.identity import VECTOR_BYTES, argument_names, digest_of_kind, template_digest
from tilegen.kernels.arguments import extra
from tilegen.kernels.config import threads_of
from tilegen.kernels.registry import KERNELS, grid_of
from tilegen.problem import DTYPE_BYTES
from tilegen.version import __version__

SCRATCH_POINTERS = 2
"""Number of scratch pointers that Triton appends for NVIDIA GPUs. tilegen's kernels use no scratch
memory."""

KIND = re.compile(r"b1 hq(\d{1,9}) hkv1 q1024 kv1024 d\S+ (fp16|bf16|fp32) \S.*")
"""Notation of a class of problems. Group 1 is the group size, group 2 the dtype."""


def why_not_ours(path: Path, manifest: Manifest) -> str:
    """Explain in one line why this tilegen cannot launch a folder's binaries; empty if it can."""
    theirs, ours = manifest.versions.get("tilegen", ""), __version__
    if theirs != ours:
        return f"it was made by tilegen {theirs or 'of an unknown version'}, and this is {ours}"
    for binary in manifest.binaries:
        # Without a launch of its own, a binary is launched by the names of its arguments.
        if binary.launch_sha256 and binary.template_digest != template_digest(binary.kernel):
            return (
                f"its {binary.kernel} was emitted from another template "
                f"({binary.template_digest}, and here it is {template_digest(binary.kernel)})"
            )
    used: set[str] = set()
    for served in manifest.problems:
        for file in (file for pass_ in served.passes.values() for file in pass_.binaries.values()):
            used.add(file)
            if difference := _why_not_expected(path, served, manifest.by_file[file]):
                serves = served.serves[:200]
                return f"{file} differs from this tilegen's binary for '{serves}': {difference}"
    for file in manifest.by_file:
        if file not in used:
            return f"{file} serves no problem"
    return ""


def _why_not_expected(path: Path, served: Served, binary: Binary) -> str:
    """Describe the first mistake in a binary that serves a class of problems; empty if there is
    none."""
    if not (kind := KIND.fullmatch(served.serves)):
        return "expected a class such as 'b1 hq4 hkv1 q1024 kv1024 d128 bf16 causal'"
    group_size, dtype = int(kind[1]), kind[2]
    digest = digest_of_kind(served.serves, binary.config, binary.kernel, served.aligned)
    if binary.launch_sha256 and binary.digest != digest:
        return "its digest is that of another kernel, mask, config or tilegen"
    processor = PROCESSORS.get(binary.arch)
    needed = processor.features if processor else None
    threads = 1 if processor else threads_of(binary.arch, binary.config.num_warps)
    unit = VECTOR_BYTES // DTYPE_BYTES[dtype] if served.aligned else 1
    for name, stated, expected in (
        ("threads", binary.threads, threads),
        ("features", binary.on_cpu and binary.on_cpu.features, needed),
        ("stride_unit", binary.stride_unit, unit),
        ("grid", binary.grid, grid_of(binary.kernel, binary.config, group_size)),
        ("folder", binary.file.partition("/")[0], binary.arch),
    ):
        if stated != expected:
            return f"{name} must be {expected}, got {stated}"
    source = (read(path / binary.source) or b"").decode("utf-8", errors="replace")
    if (names := argument_names(source, binary.function)) is None:
        return f"its source has no function {binary.function}"
    return _why_not_taken(binary, names, dtype)


def _why_not_taken(binary: Binary, names: Iterable[str], dtype: str) -> str:
    """Describe the first mistake in the arguments of a binary; empty if there is none."""
    known = KERNELS[binary.kernel].by_name
    expected = [(name, known.get(name) or extra(name)) for name in names]
    stated = list(binary.arguments)
    scratch = 0 if binary.on_cpu else SCRATCH_POINTERS
    if binary.arch.startswith("gfx"):  # any number: it depends on the Triton that compiled
        scratch = len(stated) - len(expected)
    expected += [(name, extra(name)) for name in (f"scratch_{i}" for i in range(scratch))]
    if len(stated) != len(expected):
        return f"expected {len(expected)} arguments, got {len(stated)}"
    pointers = [type_ for type_ in TYPES if type_.startswith("*")]
    for i, ((name, argument), (got, got_type)) in enumerate(zip(expected, stated, strict=True)):
        type_ = argument.type_for(dtype) if argument else ""
        if name != got or got_type not in ([type_] if type_ else pointers):
            return f"argument {i} must be {name} of {type_ or 'a pointer'}, got {got} of {got_type}"
    return ""
