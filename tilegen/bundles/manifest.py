"""The manifest of a bundle: what each binary computes and how it is launched. format.md documents
it for programs in other languages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, cast, get_args

from tilegen.cpu.processors import PROCESSORS, OnCpu
from tilegen.errors import InvalidRecord
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import FAMILIES, KERNELS
from tilegen.kernels.spec import Direction
from tilegen.model.resources import Resources
from tilegen.store.fields import MAX_TEXT, Fields, Form, Rule, group, parse_json, rule
from tilegen.store.record import ARCH as GPU_ARCH
from tilegen.store.record import CONFIG, GPU, KERNEL

MANIFEST = "manifest.json"
SCHEMA = 3
"""Version of the JSON form. Raise it when an older tilegen, or another program, would misread a
newer manifest."""
WITHOUT_LAUNCHES = 2
"""The version before, without digests of launches, is read too."""

BundledOrigin = Literal["record", "model"]
GRID_SIZES = (
    *("batch", "num_heads_q", "num_heads_kv", "seqlen_q", "seqlen_kv"),
    *("num_heads", "num_rows", "head_dim", "head_dim_qk", "head_dim_v"),
    *("requests", "longest_q", "longest_kv"),
)
TYPES = ["*fp16", "*bf16", "*fp32", "*fp64", "*i8", "*u8", "*i16", "*i32", "*i64", "i32", "fp32"]
"""Types of arguments, as Triton names them; `*` marks a pointer."""
ARCH = "|".join((GPU_ARCH, *map(re.escape, PROCESSORS)))
MAX_ENTRIES = 100_000
MAX_BYTES = 2**30
MAX_THREADS = 1024


@dataclass(frozen=True, kw_only=True)
class Binary:
    """A compiled kernel."""

    file: str
    """`sm_90/NAME.cubin` or `x86-64-v3/NAME.so`, relative to the manifest."""
    sha256: str
    """Digest of the file."""
    source: str
    """`kernels/NAME.py`: the emitted kernel."""
    source_sha256: str
    """Digest of the emitted kernel."""
    launch_sha256: str
    """Digest of the launch in the emitted kernel; empty if a bundle of WITHOUT_LAUNCHES has it."""
    kernel: Kernel
    arch: str
    function: str
    """Name of the kernel in the binary."""
    config: TileConfig
    arguments: tuple[tuple[str, str], ...]
    """Name and type of each argument, in order."""
    stride_unit: int
    """Number of elements in a unit of the arguments `stride_*`."""
    grid: tuple[tuple[str, int], ...]
    """Pairs (size, divisor). The product of ceil(size / divisor) is the number of programs."""
    threads: int
    """Number of threads in a program."""
    resources: Resources
    """Resources that the compiler reported, without the instructions of a step."""
    digest: str
    """Digest of everything that determines the source."""
    template_digest: str
    """Digest of the kernel's template."""
    on_cpu: OnCpu | None = None
    """Facts about a shared object; None for a GPU."""


@dataclass(frozen=True, kw_only=True)
class BundledPass:
    """The forward or the backward of a problem."""

    binaries: Mapping[Kernel, str]
    """File of each kernel's binary, in the order of launches."""
    config_from: Mapping[Kernel, BundledOrigin]
    """Origin of each kernel's config: a record or the model."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A problem of the catalogue on one GPU model or processor."""

    problem: str
    """Notation, with the sizes that the tiles were chosen for."""
    serves: str
    """Notation of the class of problems that the binaries compute: any batch, heads, lengths."""
    gpu: str
    """Name of the GPU or processor that the tiles were chosen for."""
    arch: str
    aligned: bool
    """True if addresses and strides must be multiples of 16 bytes."""
    passes: Mapping[Direction, BundledPass]

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """Sizes of the problem: (batch * query heads, seqlen_q, seqlen_kv)."""
        batch, heads, _, seqlen_q, seqlen_kv = _sizes(self.problem)
        return batch * heads, seqlen_q, seqlen_kv


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The problems that a bundle serves, and the binaries that compute them."""

    versions: Mapping[str, str]
    """Versions of the tools that made the binaries, by name."""
    problems: tuple[Served, ...]
    """Problems with the files of their binaries, for each GPU model."""
    binaries: tuple[Binary, ...]
    """All binaries, each once."""

    @cached_property
    def by_file(self) -> Mapping[str, Binary]:
        """Binaries by file, relative to the manifest."""
        return {binary.file: binary for binary in self.binaries}

    @property
    def notations(self) -> tuple[str, ...]:
        """Problems by notation, each once, however many architectures they are built for."""
        return tuple(dict.fromkeys(served.problem for served in self.problems))

    @property
    def architectures(self) -> tuple[str, ...]:
        """Architectures of the binaries, in the order of the manifest."""
        return tuple(dict.fromkeys(binary.arch for binary in self.binaries))

    def to_json(self) -> str:
        """Serialise the manifest to its file's text; `Manifest.from_json` is the inverse."""
        values = {
            "schema": SCHEMA,
            "versions": dict(self.versions),
            "problems": [
                _SERVED.values(served)
                | {name: _pass_values(files) for name, files in served.passes.items()}
                for served in self.problems
            ],
            "binaries": [binary_values(binary) for binary in self.binaries],
        }
        return json.dumps(values, indent=1, ensure_ascii=True, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse a manifest and check every field. Raises InvalidRecord."""
        fields = parse_json(text)
        if (schema := fields.integer("schema", 1, 2**31)) not in (SCHEMA, WITHOUT_LAUNCHES):
            raise InvalidRecord(f"schema must be {WITHOUT_LAUNCHES} or {SCHEMA}, got {schema}")
        versions = fields.group("versions")
        manifest = cls(
            versions={name: versions.text(name, longest=80) for name in versions.values},
            problems=tuple(
                _SERVED.read(
                    entry, passes={d: _pass(entry, d) for d in FAMILIES if d in entry.values}
                )
                for entry in fields.groups("problems", MAX_ENTRIES)
            ),
            binaries=tuple(
                binary_from(entry, schema) for entry in fields.groups("binaries", MAX_ENTRIES)
            ),
        )
        for served in manifest.problems:
            for files in served.passes.values():
                for kernel, file in files.binaries.items():
                    binary = manifest.by_file.get(file)
                    if binary is None or (binary.kernel, binary.arch) != (kernel, served.arch):
                        raise InvalidRecord(
                            f"'{served.problem}' names {file!r} as its {kernel} for {served.arch}, "
                            "and binaries has no such one"
                        )
        return manifest


def binary_values(binary: Binary) -> dict[str, Any]:
    """Return the JSON values of a binary's entry; `binary_from` is the inverse."""
    return _BINARY.values(binary) | _RESOURCES.values(binary.resources)


def binary_from(fields: Fields, schema: int = SCHEMA) -> Binary:
    """Parse the entry of a binary. Raises InvalidRecord."""
    given: dict[str, Any] = {} if schema == SCHEMA else {"launch_sha256": ""}
    if _ARCH.read(fields, "arch") not in PROCESSORS:
        given["on_cpu"] = None
        fields.integer("threads", 32, MAX_THREADS)
    return _BINARY.read(fields, resources=_RESOURCES.read(fields), **given)


def _pass(fields: Fields, direction: str) -> BundledPass:
    entries = fields.groups(direction, len(KERNELS))
    kernels: list[Kernel] = [KERNEL.read(entry, "kernel") for entry in entries]
    families = [family.names for family in FAMILIES[cast("Direction", direction)].values()]
    if tuple(kernels) not in families:
        known = "; ".join(", ".join(names) for names in families)
        raise InvalidRecord(f"{direction} must be one of {known}; got {', '.join(kernels)}")
    of_kernels = list(zip(kernels, entries, strict=True))
    return BundledPass(
        binaries={kernel: _FILE.read(entry, "file") for kernel, entry in of_kernels},
        config_from={kernel: _ORIGIN.read(entry, "config_from") for kernel, entry in of_kernels},
    )


def _pass_values(files: BundledPass) -> list[dict[str, Any]]:
    return [
        {"kernel": kernel, "file": file, "config_from": files.config_from[kernel]}
        for kernel, file in files.binaries.items()
    ]


def _pairs(most: int, **rules: Rule) -> Rule:
    """Return the rule of a list of at most `most` objects of two fields, read as pairs."""

    def read(fields: Fields, name: str) -> tuple[tuple[Any, ...], ...]:
        entries = fields.groups(name, most)
        return tuple(tuple(of.read(entry, key) for key, of in rules.items()) for entry in entries)

    return Rule(read, lambda pairs: [dict(zip(rules, pair, strict=True)) for pair in pairs])


def _notation(fields: Fields, name: str) -> str:
    _sizes(problem := fields.text(name, longest=MAX_TEXT))
    return problem


_ARCH = rule(Fields.text, ARCH, "such as sm_90, gfx942 or x86-64-v3")
# The pattern admits only paths inside the bundle.
_FILE = rule(
    Fields.text,
    rf"(?:{ARCH})/[A-Za-z0-9_]+\.(?:cubin|hsaco|so)",
    "such as sm_90/NAME.cubin",
    longest=300,
)
_SHA256 = rule(Fields.text, r"[0-9a-f]{64}", "64 hexadecimal digits")
_DIGEST = rule(Fields.text, r"[0-9a-f]{8,64}", "hexadecimal digits")
_NAMES = rule(Fields.texts, r"[a-z][a-z0-9_]*", "a name", 200)
_BYTES = rule(Fields.integer, 0, MAX_BYTES)
_ORIGIN = rule(Fields.choice, get_args(BundledOrigin))
_SERVED = Form(
    Served,
    problem=Rule(_notation),
    serves=rule(Fields.text, longest=MAX_TEXT),
    gpu=GPU,
    arch=_ARCH,
    aligned=rule(Fields.flag),
)
_ON_CPU = Form(OnCpu, features=_NAMES, scratch_bytes=_BYTES, written=_NAMES, added=_NAMES)
_RESOURCES = Form(
    Resources, shared_bytes=_BYTES, registers=rule(Fields.integer, 0, 1024), spill_bytes=_BYTES
)
_BINARY = Form(
    Binary,
    file=_FILE,
    sha256=_SHA256,
    source=rule(Fields.text, r"kernels/[A-Za-z0-9_]+\.py", "such as kernels/NAME.py"),
    source_sha256=_SHA256,
    launch_sha256=_SHA256,
    kernel=KERNEL,
    arch=_ARCH,
    function=rule(Fields.text, r"[A-Za-z_][A-Za-z0-9_]*", "the name of a function"),
    config=replace(CONFIG, write=lambda config: {"block_d": 0, **config.values}),
    arguments=_pairs(
        200,
        name=rule(Fields.text, r"[a-z][a-z0-9_]*", "a name"),
        type=rule(Fields.choice, tuple(TYPES)),
    ),
    stride_unit=rule(Fields.integer, 1, 16),
    grid=_pairs(4, size=rule(Fields.choice, GRID_SIZES), divisor=rule(Fields.integer, 1, 2**20)),
    threads=rule(Fields.integer, 1, MAX_THREADS),
    digest=_DIGEST,
    template_digest=_DIGEST,
    on_cpu=replace(group(_ON_CPU), is_sparse=True),
)


def _sizes(problem: str) -> tuple[int, ...]:
    """Parse batch, query heads, key-value heads and both lengths from a notation. Raises
    InvalidRecord."""
    match = re.match(r"b(\d{1,9}) hq(\d{1,9}) hkv(\d{1,9}) q(\d{1,9}) kv(\d{1,9}) d", problem)
    if not match or not all(map(int, match.groups())):
        raise InvalidRecord(f"problem must be a notation, got {problem!r}")
    return tuple(map(int, match.groups()))
