"""The record of a tuning winner, and its JSON form. cache/README.md documents it for users."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Generator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, cast, get_args

from tilegen.errors import InvalidRecord, TilegenError
from tilegen.kernels.config import OPTIONS, Kernel, TileConfig
from tilegen.kernels.registry import KERNELS, check_config
from tilegen.masks.notation import older_notations
from tilegen.problem import AttentionProblem
from tilegen.store.fields import MAX_TEXT, Fields, parse_json
from tilegen.store.versions import Versions, release_order
from tilegen.tuning.measure import MAX_REPEATS, POLICY, Measurement, Status
from tilegen.version import __version__

if TYPE_CHECKING:
    from tilegen.model.estimate import CostEstimate

SCHEMA = 1
"""Version of the JSON form. Raise it when an older tilegen would misread a newer record."""

DIGESTS = r"([0-9a-f]{12}( [0-9a-f]{12})*)?"
ARCH = r"sm_\d{2,4}[a-z]?|gfx[0-9a-f]{3,5}|avx512(bf16)?|amx|avx2|sse2|neon(bf16)?"
MAX_SECONDS = 1e9
MAX_BYTES = 2**63
MAX_RIVALS = 15
MASK = 7
"""The place of the mask among the words of a problem's notation."""
KEY = ("gpu", "arch", "kernel", "problem", "policy")
"""Fields that identify the task of a record; its rivals share them."""


class OtherSchema(InvalidRecord):
    """A file that only another tilegen can read: it has another schema, an unknown knob, values of
    a newer version, or another canonical notation. It is never set aside or replaced."""


@dataclass(frozen=True, kw_only=True)
class EstimateSummary:
    """The model's prediction of time and traffic for the recorded config."""

    seconds: float
    limit: str
    read_bytes: int
    write_bytes: int

    @classmethod
    def of(cls, estimate: CostEstimate) -> EstimateSummary:
        """Summarise an estimate, with seconds rounded to four digits."""
        return cls(
            seconds=float(f"{estimate.seconds:.4g}"),
            limit=estimate.limit,
            read_bytes=estimate.read_bytes,
            write_bytes=estimate.write_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class TuningRecord:
    """The config to use for one kernel of one problem bucket on one GPU, and how it was found."""

    gpu: str
    """Catalogue name: `h200`."""
    arch: str
    """Architecture of the GPU: `sm_90`."""
    kernel: Kernel
    """Name of the kernel: fwd, bwd_dq, ..."""
    problem: AttentionProblem
    """The measured problem. Batch and lengths are powers of two, since a bucket shares a record."""
    policy: str = POLICY
    """How times are measured; times of different policies are not comparable."""
    config: TileConfig
    """The tiles and launch options that won."""
    measurement: Measurement
    """Time of the config, with status ok; status unmeasured for a choice of the model."""
    estimate: EstimateSummary | None = None
    """The model's prediction for the config, if there is one."""
    versions: Versions
    """Versions of the tools that compiled and measured."""
    template_digest: str = ""
    """Digest of the kernel's template. If the template changes, the record is stale."""
    trials: int = 0
    """Number of configs tried for this record, over all runs."""
    seconds_spent: float = 0.0
    """Time spent on those trials, over all runs [seconds]."""
    source: str = ""
    """Hexadecimal identifier of the machine that measured. Of each machine only the latest finding
    counts."""
    date: str
    """UTC date of the finding, `2026-11-21T09:30:00Z`; of the trial if another machine measured."""
    command: str = ""
    """Command line that recreates the record."""
    rivals: tuple[TuningRecord, ...] = ()
    """Findings of other machines for the same key, without rivals of their own."""

    def __post_init__(self) -> None:
        if self.problem != (bucket := self.problem.rounded):
            raise InvalidRecord(
                f"problem must be that of a bucket, got '{self.problem}'; its bucket is '{bucket}'"
            )
        if self.measurement.status not in ("ok", "unmeasured"):
            raise InvalidRecord(
                f"a record needs a config that ran, or was not run; got one that is "
                f"{self.measurement.status}: {self.measurement.message}"
            )
        for rival in self.rivals:
            if rival.rivals or rival.key != self.key:
                raise InvalidRecord(
                    f"a rival must be about {self.key} and have none itself, got {rival.key}"
                )

    @property
    def key(self) -> tuple[str, ...]:
        """The subject of the record: gpu, arch, kernel, problem, policy."""
        return tuple(str(getattr(self, name)) for name in KEY)

    @property
    def findings(self) -> tuple[TuningRecord, ...]:
        """The winner and its rivals, as records without rivals."""
        return (replace(self, rivals=()), *self.rivals) if self.rivals else (self,)

    @property
    def is_measured(self) -> bool:
        """True if the config was timed, False if the model chose it."""
        return self.measurement.status == "ok"

    @property
    def path(self) -> PurePosixPath:
        """Path of the record in every location: `h200/fwd/b4_hq32_..._causal.json`."""
        return record_path(self.gpu, self.kernel, self.problem, self.policy)

    def to_json(self) -> str:
        """Serialise the record to its file's text; `TuningRecord.from_json` is the inverse."""
        key = {**{name: getattr(self, name) for name in KEY}, "problem": self.problem.key}
        values: dict[str, Any] = {"schema": SCHEMA, **key, **self._finding()}
        if self.rivals:
            values["rivals"] = [rival._finding() for rival in self.rivals]
        return json.dumps(values, indent=2, ensure_ascii=True, allow_nan=False) + "\n"

    def _finding(self) -> dict[str, Any]:
        """Return the JSON values of all fields except the key and the rivals."""
        values: dict[str, Any] = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in (*KEY, "rivals")
        }
        for name in ("estimate", "versions"):
            values[name] = values[name] and dataclasses.asdict(values[name])
        values["measurement"] = measurement_values(self.measurement)
        values["config"] = self.config.values
        return values

    @classmethod
    def from_json(cls, text: str) -> TuningRecord:
        """Parse a record and check every field. Raises InvalidRecord."""
        fields = parse_json(text)
        if (schema := fields.integer("schema", 1, 2**31)) != SCHEMA:
            raise OtherSchema(f"schema must be {SCHEMA}, got {schema}")
        with naming_newer(fields):
            return cls._from(fields)

    @classmethod
    def _from(cls, fields: Fields) -> TuningRecord:
        key: dict[str, Any] = {
            "gpu": gpu_of(fields),
            "arch": arch_of(fields),
            "kernel": kernel_of(fields),
            "problem": problem_of(fields),
            "policy": fields.text("policy", r"[a-z0-9_]{1,40}", "such as cold_l2")
            if "policy" in fields.values
            else POLICY,
        }
        rivals: list[Fields] = []
        if "rivals" in fields.values:
            rivals = fields.groups("rivals", MAX_RIVALS)
        return cls(
            **key,
            **_finding_from(fields, key["kernel"]),
            rivals=tuple(cls(**key, **_finding_from(rival, key["kernel"])) for rival in rivals),
        )


def _finding_from(fields: Fields, kernel: Kernel) -> dict[str, Any]:
    """Parse all fields of a record except the key and the rivals. Raises InvalidRecord."""
    return {
        "config": config_from(fields.group("config"), kernel),
        "measurement": measurement_from(fields.group("measurement")),
        "estimate": None if fields.is_null("estimate") else _estimate(fields.group("estimate")),
        "versions": versions_of(fields.group("versions")),
        "template_digest": fields.text("template_digest", r"[0-9a-f]{0,64}", "hexadecimal digits"),
        "trials": fields.integer("trials", 0, 10**9),
        "seconds_spent": fields.number("seconds_spent", 0, MAX_SECONDS),
        "source": source_of(fields),
        "date": date_of(fields),
        "command": fields.text("command", longest=MAX_TEXT),
    }


def config_from(fields: Fields, kernel: Kernel) -> TileConfig:
    """Parse a config of a kernel. Raises InvalidRecord; OtherSchema for an unknown knob."""
    known = {field.name: field for field in dataclasses.fields(TileConfig)}
    # An unknown knob makes it another config, so unknown fields are not ignored here.
    if unknown := sorted(fields.values.keys() - known.keys()):
        raise OtherSchema(f"config must have {', '.join(known)}; got also {unknown[0][:40]!r}")
    values: dict[str, Any] = {
        name: fields.flag(name) if OPTIONS[name].is_flag else fields.integer(name, 0, 2**16)
        for name, field in known.items()
        if name in fields.values or field.default is dataclasses.MISSING
    }
    try:
        config = TileConfig(**values)
        check_config(config, kernel)
        return config
    except TilegenError as error:
        raise InvalidRecord(f"config: {error}") from None


def measurement_from(fields: Fields) -> Measurement:
    """Parse a measurement. Raises InvalidRecord."""
    status = cast("Status", fields.choice("status", get_args(Status)))
    message = fields.text("message")
    if status != "ok":
        for name in ("median_us", "p20_us", "p80_us"):
            if not fields.is_null(name):
                raise InvalidRecord(f"measurement.{name} must be null when the status is {status}")
        return Measurement(status=status, message=message, repeats=fields.integer("repeats", 0, 0))
    p20, median, p80 = (
        fields.number(name, 1e-3, 1e6 * MAX_SECONDS) for name in ("p20_us", "median_us", "p80_us")
    )
    if not p20 <= median <= p80:
        raise InvalidRecord(
            f"measurement must have p20_us <= median_us <= p80_us, got {p20:g}, {median:g}, {p80:g}"
        )
    digest = ""
    if "digest" in fields.values:  # older records have no digest
        digest = fields.text("digest", DIGESTS, "groups of 12 hexadecimal digits")
    return Measurement(
        status=status,
        median_us=median,
        p20_us=p20,
        p80_us=p80,
        repeats=fields.integer("repeats", 1, MAX_REPEATS),
        message=message,
        digest=digest,
    )


def measurement_values(measurement: Measurement) -> dict[str, Any]:
    """Return the JSON values of a measurement; `measurement_from` is the inverse."""
    values = dataclasses.asdict(measurement)
    if not measurement.digest:
        del values["digest"]
    return values


@lru_cache(maxsize=4096)
def bucket_of(problem: AttentionProblem) -> AttentionProblem:
    """Return the bucket of a problem, cached because it is slow to compute."""
    return problem.bucket


@lru_cache(maxsize=4096)
def record_path(
    gpu: str, kernel: Kernel, problem: AttentionProblem, policy: str = POLICY
) -> PurePosixPath:
    """Return the path of a problem's record, relative to a location."""
    # Rounded, not normalised: records of earlier tilegens, not in normal form, keep their paths.
    return path_of_key(gpu, kernel, problem.rounded.key, policy)


def older_paths(
    gpu: str, kernel: Kernel, problem: AttentionProblem, policy: str = POLICY
) -> tuple[PurePosixPath, ...]:
    """Return the paths under which earlier tilegens stored records of the same problem."""
    words = problem.rounded.key.split(" ")
    keys = ([*words[:MASK], older, *words[MASK + 1 :]] for older in older_notations(problem.mask))
    return tuple(path_of_key(gpu, kernel, " ".join(key), policy) for key in keys)


def path_of_key(gpu: str, kernel: str, key: str, policy: str) -> PurePosixPath:
    """Return the path of the record of a problem's notation, relative to a location."""
    suffix = "" if policy == POLICY else f".{policy}"
    return PurePosixPath(slug(gpu), kernel, f"{slug(key)}{suffix}.json")


def slug(text: str) -> str:
    """Return a readable file name of [a-z0-9_+.-] for a GPU's name or a problem's key.

    Different keys get different names: a hash is appended where these letters do not suffice, and
    beyond 150 of them.
    """
    plain = text.translate(_SPELLING)
    if re.fullmatch(r"[a-z0-9][a-z0-9_+.-]{0,149}", plain):
        return plain
    readable = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:100]
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:12]}".lstrip("-")


_SPELLING = str.maketrans({" ": "_", "/": "-", "(": "-", ",": "-", ")": None, "&": "+"})


def gpu_of(fields: Fields) -> str:
    """Parse the field `gpu`. Raises InvalidRecord."""
    return fields.text("gpu", r"\S.*", "the name of a GPU")


def arch_of(fields: Fields) -> str:
    """Parse the field `arch`. Raises InvalidRecord."""
    return fields.text("arch", ARCH, "such as sm_90, gfx942 or avx2")


def kernel_of(fields: Fields) -> Kernel:
    """Parse the field `kernel`. Raises InvalidRecord."""
    return fields.choice("kernel", tuple(KERNELS))


def problem_of(fields: Fields) -> AttentionProblem:
    """Parse the field `problem`, which must be in canonical notation, but for the spelling of its
    mask. Raises InvalidRecord."""
    text = fields.text("problem", longest=MAX_TEXT)
    try:
        problem = AttentionProblem.parse(text)
    except TilegenError as error:
        raise InvalidRecord(f"problem: {error}") from None
    words, given = problem.key.split(" "), text.split(" ")
    if [*words[:MASK], *words[MASK + 1 :]] != [*given[:MASK], *given[MASK + 1 :]]:
        raise OtherSchema(f"problem must be {problem.key!r}, its canonical form; got {text!r}")
    return problem


def _estimate(fields: Fields) -> EstimateSummary:
    return EstimateSummary(
        seconds=fields.number("seconds", 0, MAX_SECONDS),
        limit=fields.text("limit", longest=40),
        read_bytes=fields.integer("read_bytes", 0, MAX_BYTES),
        write_bytes=fields.integer("write_bytes", 0, MAX_BYTES),
    )


def versions_of(fields: Fields) -> Versions:
    """Parse a JSON object of versions. Raises InvalidRecord."""
    values: dict[str, Any] = {
        field.name: fields.text(field.name, longest=80) for field in dataclasses.fields(Versions)
    }
    return Versions(**values)


@contextlib.contextmanager
def naming_newer(fields: Fields) -> Generator[None, None, None]:
    """Turn InvalidRecord into OtherSchema if a newer tilegen wrote the record or line of trials."""
    try:
        yield
    except InvalidRecord as error:
        if isinstance(error, OtherSchema) or not (other := _other_writer(fields)):
            raise
        raise OtherSchema(f"{error}; it was written with {other}") from None


def _other_writer(fields: Fields) -> str:
    """Name the newer tilegen that wrote an unreadable record; empty if this installation might have
    written it."""
    findings: list[Any] = [fields.values]
    if isinstance(rivals := fields.values.get("rivals"), list):
        findings += rivals[: MAX_RIVALS + 1]
    for finding in findings:
        versions: Any = finding.get("versions") if isinstance(finding, dict) else None
        stored = versions.get("tilegen") if isinstance(versions, dict) else None
        if not isinstance(stored, str) or not re.fullmatch(r"\d{1,6}(\.\w{1,12}){0,6}", stored):
            continue
        if release_order(stored) > release_order(__version__):
            return f"tilegen {stored}, here is {__version__}"
    return ""


def source_of(fields: Fields) -> str:
    """Parse the field `source`; empty if it is missing. Raises InvalidRecord."""
    if "source" not in fields.values:
        return ""
    return fields.text("source", r"[0-9a-f]{0,64}", "hexadecimal digits")


def date_of(fields: Fields) -> str:
    """Parse the field `date`. Raises InvalidRecord."""
    text = fields.text("date", r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "such as 2026-11-21T09:30:00Z")
    try:
        datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidRecord(f"date must be a date in UTC, got {text!r} ({error})") from None
    return text
