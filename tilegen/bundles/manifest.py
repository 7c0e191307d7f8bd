"""The manifest of a bundle: what each binary computes and how it is launched. format.md documents
it for programs in other languages."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast, get_args

from tilegen.cpu.processors import PROCESSORS, OnCpu
from tilegen.errors import InvalidRecord
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import FAMILIES, KERNELS
from tilegen.kernels.spec import Direction
from tilegen.model.resources import Resources
from tilegen.store.fields import MAX_TEXT, Fields, parse_json
from tilegen.store.record import ARCH as GPU_ARCH
from tilegen.store.record import config_from, gpu_of, kernel_of

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
            "problems": [_served_values(served) for served in self.problems],
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
            problems=tuple(_served(entry) for entry in fields.groups("problems", MAX_ENTRIES)),
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


def _served_values(served: Served) -> dict[str, Any]:
    values = {field.name: getattr(served, field.name) for field in dataclasses.fields(served)}
    del values["passes"]
    for direction, files in served.passes.items():
        values[direction] = [
            {"kernel": kernel, "file": file, "config_from": files.config_from[kernel]}
            for kernel, file in files.binaries.items()
        ]
    return values


def binary_values(binary: Binary) -> dict[str, Any]:
    """Return the JSON values of a binary's entry; `binary_from` is the inverse."""
    values = {field.name: getattr(binary, field.name) for field in dataclasses.fields(binary)}
    used, on_cpu = values.pop("resources"), values.pop("on_cpu")
    if on_cpu is not None:
        values["on_cpu"] = dataclasses.asdict(on_cpu)
    return values | {
        "shared_bytes": used.shared_bytes,
        "registers": used.registers,
        "spill_bytes": used.spill_bytes,
        "config": {"block_d": 0, **binary.config.values},
        "arguments": [{"name": name, "type": type_} for name, type_ in binary.arguments],
        "grid": [{"size": size, "divisor": divisor} for size, divisor in binary.grid],
    }


def _served(fields: Fields) -> Served:
    passes: dict[Direction, BundledPass] = {
        direction: _pass(fields, direction) for direction in FAMILIES if direction in fields.values
    }
    problem = fields.text("problem", longest=MAX_TEXT)
    _sizes(problem)
    return Served(
        problem=problem,
        serves=fields.text("serves", longest=MAX_TEXT),
        gpu=gpu_of(fields),
        arch=_arch(fields),
        aligned=fields.flag("aligned"),
        passes=passes,
    )


def _pass(fields: Fields, direction: Direction) -> BundledPass:
    entries = fields.groups(direction, len(KERNELS))
    kernels: list[Kernel] = [kernel_of(entry) for entry in entries]
    families = [family.names for family in FAMILIES[direction].values()]
    if tuple(kernels) not in families:
        known = "; ".join(", ".join(names) for names in families)
        raise InvalidRecord(f"{direction} must be one of {known}; got {', '.join(kernels)}")
    binaries: dict[Kernel, str] = {}
    config_from: dict[Kernel, BundledOrigin] = {}
    for kernel, entry in zip(kernels, entries, strict=True):
        binaries[kernel] = _file(entry, "file")
        config_from[kernel] = cast(
            "BundledOrigin", entry.choice("config_from", get_args(BundledOrigin))
        )
    return BundledPass(binaries=binaries, config_from=config_from)


def binary_from(fields: Fields, schema: int = SCHEMA) -> Binary:
    """Parse the entry of a binary. Raises InvalidRecord."""
    kernel, arch = kernel_of(fields), _arch(fields)
    on_cpu = _on_cpu(fields.group("on_cpu")) if arch in PROCESSORS else None
    return Binary(
        file=_file(fields, "file"),
        sha256=_sha256(fields, "sha256"),
        source=fields.text("source", r"kernels/[A-Za-z0-9_]+\.py", "such as kernels/NAME.py"),
        source_sha256=_sha256(fields, "source_sha256"),
        launch_sha256=_sha256(fields, "launch_sha256") if schema == SCHEMA else "",
        kernel=kernel,
        arch=arch,
        function=fields.text("function", r"[A-Za-z_][A-Za-z0-9_]*", "the name of a function"),
        config=config_from(fields.group("config"), kernel),
        arguments=tuple(
            (entry.text("name", r"[a-z][a-z0-9_]*", "a name"), entry.choice("type", tuple(TYPES)))
            for entry in fields.groups("arguments", 200)
        ),
        stride_unit=fields.integer("stride_unit", 1, 16),
        grid=tuple(
            (entry.choice("size", GRID_SIZES), entry.integer("divisor", 1, 2**20))
            for entry in fields.groups("grid", 4)
        ),
        threads=fields.integer("threads", 1 if on_cpu else 32, 1024),
        resources=Resources(
            shared_bytes=fields.integer("shared_bytes", 0, MAX_BYTES),
            registers=fields.integer("registers", 0, 1024),
            spill_bytes=fields.integer("spill_bytes", 0, MAX_BYTES),
        ),
        digest=fields.text("digest", r"[0-9a-f]{8,64}", "hexadecimal digits"),
        template_digest=fields.text("template_digest", r"[0-9a-f]{8,64}", "hexadecimal digits"),
        on_cpu=on_cpu,
    )


def _on_cpu(fields: Fields) -> OnCpu:
    def names(field: str) -> tuple[str, ...]:
        return tuple(fields.texts(field, r"[a-z][a-z0-9_]*", "a name", 200))

    return OnCpu(
        features=names("features"),
        scratch_bytes=fields.integer("scratch_bytes", 0, MAX_BYTES),
        written=names("written"),
        added=names("added"),
    )


def _arch(fields: Fields) -> str:
    return fields.text("arch", ARCH, "such as sm_90, gfx942 or x86-64-v3")


def _file(fields: Fields, name: str) -> str:
    """Parse the path of a binary; the pattern admits only paths inside the bundle."""
    pattern = rf"(?:{ARCH})/[A-Za-z0-9_]+\.(?:cubin|hsaco|so)"
    return fields.text(name, pattern, "such as sm_90/NAME.cubin", longest=300)


def _sha256(fields: Fields, name: str) -> str:
    return fields.text(name, r"[0-9a-f]{64}", "64 hexadecimal digits")


def _sizes(problem: str) -> tuple[int, ...]:
    """Parse batch, query heads, key-value heads and both lengths from a notation. Raises
    InvalidRecord."""
    match = re.match(r"b(\d{1,9}) hq(\d{1,9}) hkv(\d{1,9}) q(\d{1,9}) kv(\d{1,9}) d", problem)
    if not match or not all(map(int, match.groups())):
        raise InvalidRecord(f"problem must be a notation, got {problem!r}")
    return tuple(map(int, match.groups()))
