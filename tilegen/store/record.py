"""The record of a tuning winner, and the JSON forms of what it shares with trials and manifests.
cache/README.md documents them for users."""

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
from typing import TYPE_CHECKING, Any, get_args

from tilegen.errors import InvalidRecord, TilegenError
from tilegen.kernels.config import OPTIONS, Kernel, TileConfig
from tilegen.kernels.registry import KERNELS, check_config
from tilegen.masks.notation import older_notations
from tilegen.problem import AttentionProblem
from tilegen.store.fields import (
    MAX_TEXT,
    Fields,
    Form,
    Rule,
    group,
    nullable,
    optional,
    parse_json,
    rule,
    sparse,
)
from tilegen.store.versions import Versions, release_order
from tilegen.tuning.measure import MAX_REPEATS, POLICY, Measurement, Status
from tilegen.tuning.surroundings import MOST, Surroundings
from tilegen.version import __version__

if TYPE_CHECKING:
    from tilegen.model.estimate import CostEstimate

SCHEMA = 1
"""Version of the JSON form. Raise it when an older tilegen would misread a newer record."""
KEY = ("gpu", "arch", "kernel", "problem", "policy")
"""Fields that identify the task of a record; its rivals share them."""
MAX_SECONDS = 1e9
MAX_BYTES = 2**63
MAX_RIVALS = 15
ARCH = r"sm_\d{2,4}[a-z]?|gfx[0-9a-f]{3,5}|avx512(bf16)?|amx|avx2|sse2|neon(bf16)?"
DIGESTS = r"([0-9a-f]{12}( [0-9a-f]{12})*)?"
MASK = 7
"""The place of the mask among the words of a problem's notation."""


class OtherSchema(InvalidRecord):
    """A file that only another tilegen can read: it has another schema, an unknown knob, values of
    a newer version, or another canonical notation. It is never set aside or replaced."""


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


def problem_of(fields: Fields, name: str = "problem") -> AttentionProblem:
    """Parse the field `problem`, which must be in canonical notation, but for the spelling of its
    mask. Raises InvalidRecord."""
    text = fields.text(name, longest=MAX_TEXT)
    try:
        problem = AttentionProblem.parse(text)
    except TilegenError as error:
        raise InvalidRecord(f"problem: {error}") from None
    words, given = problem.key.split(" "), text.split(" ")
    if [*words[:MASK], *words[MASK + 1 :]] != [*given[:MASK], *given[MASK + 1 :]]:
        raise OtherSchema(f"problem must be {problem.key!r}, its canonical form; got {text!r}")
    return problem


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
    status = fields.choice("status", get_args(Status))
    if status != "ok":
        for name in ("median_us", "p20_us", "p80_us"):
            if not fields.is_null(name):
                raise InvalidRecord(f"measurement.{name} must be null when the status is {status}")
        return _FAILED.read(fields)
    measurement = _TIMED.read(fields)
    p20, median, p80 = (fields.values[name] for name in ("p20_us", "median_us", "p80_us"))
    if not p20 <= median <= p80:
        raise InvalidRecord(
            f"measurement must have p20_us <= median_us <= p80_us, got {p20:g}, {median:g}, {p80:g}"
        )
    return measurement


def measurement_values(measurement: Measurement) -> dict[str, Any]:
    """Return the JSON values of a measurement; `measurement_from` is the inverse."""
    return _TIMED.values(measurement)


def _date_of(fields: Fields, name: str) -> str:
    text = fields.text(name, r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "such as 2026-11-21T09:30:00Z")
    try:
        datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidRecord(f"date must be a date in UTC, got {text!r} ({error})") from None
    return text


_STATUS = rule(Fields.choice, get_args(Status))
_US = rule(Fields.number, 1e-3, 1e6 * MAX_SECONDS)
_COUNT = sparse(rule(Fields.integer, 0, MOST))
_SURROUNDINGS = Form(
    Surroundings,
    clock_mhz=_COUNT,
    throttled=sparse(rule(Fields.texts, r"[a-z0-9_]{1,40}", "a reason of NVML", 64)),
    power_limit_w=_COUNT,
    others=_COUNT,
    load=sparse(rule(Fields.number, 0, MOST)),
)
_TIMED = Form(
    Measurement,
    status=_STATUS,
    median_us=_US,
    p20_us=_US,
    p80_us=_US,
    repeats=rule(Fields.integer, 1, MAX_REPEATS),
    message=rule(Fields.text),
    digest=sparse(rule(Fields.text, DIGESTS, "groups of 12 hexadecimal digits")),
    surroundings=sparse(group(_SURROUNDINGS)),
)
_FAILED = Form(
    Measurement, status=_STATUS, repeats=rule(Fields.integer, 0, 0), message=rule(Fields.text)
)

GPU = rule(Fields.text, r"\S.*", "the name of a GPU")
KERNEL = rule(Fields.choice, KERNELS)  # not a copy: a family may be registered later
PROBLEM = Rule(problem_of, lambda problem: problem.key)
CONFIG = Rule(
    lambda fields, name: config_from(fields.group(name), KERNEL.read(fields, "kernel")),
    lambda config: config.values,
)
"""The config of the kernel in the field `kernel`."""
MEASUREMENT = Rule(lambda fields, name: measurement_from(fields.group(name)), measurement_values)
VERSIONS = Form(
    Versions, **{one.name: rule(Fields.text, longest=80) for one in dataclasses.fields(Versions)}
)
SOURCE = optional(rule(Fields.text, r"[0-9a-f]{0,64}", "hexadecimal digits"))
"""Digits of a machine."""
DATE = Rule(_date_of)


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
        values = {"schema": SCHEMA, **_FORM.values(self)}
        if self.rivals:
            of_rivals = map(_FORM.values, self.rivals)
            values["rivals"] = [
                {name: value for name, value in rival.items() if name not in KEY}
                for rival in of_rivals
            ]
        return json.dumps(values, indent=2, ensure_ascii=True, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TuningRecord:
        """Parse a record and check every field. Raises InvalidRecord."""
        fields = parse_json(text)
        if (schema := fields.integer("schema", 1, 2**31)) != SCHEMA:
            raise OtherSchema(f"schema must be {SCHEMA}, got {schema}")
        with naming_newer(fields):
            winner = _FORM.read(fields)
            if "rivals" not in fields.values:
                return winner
            key = {name: getattr(winner, name) for name in KEY}
            rivals = (
                _FORM.read(Fields({**rival.values, "kernel": winner.kernel}, rival.where), **key)
                for rival in fields.groups("rivals", MAX_RIVALS)
            )
            return replace(winner, rivals=tuple(rivals))


_FORM = Form(
    TuningRecord,
    gpu=GPU,
    arch=rule(Fields.text, ARCH, "such as sm_90, gfx942 or avx2"),
    kernel=KERNEL,
    problem=PROBLEM,
    policy=optional(rule(Fields.text, r"[a-z0-9_]{1,40}", "such as cold_l2")),
    config=CONFIG,
    measurement=MEASUREMENT,
    estimate=nullable(
        group(
            Form(
                EstimateSummary,
                seconds=rule(Fields.number, 0, MAX_SECONDS),
                limit=rule(Fields.text, longest=40),
                read_bytes=rule(Fields.integer, 0, MAX_BYTES),
                write_bytes=rule(Fields.integer, 0, MAX_BYTES),
            )
        )
    ),
    versions=group(VERSIONS),
    template_digest=rule(Fields.text, r"[0-9a-f]{0,64}", "hexadecimal digits"),
    trials=rule(Fields.integer, 0, 10**9),
    seconds_spent=rule(Fields.number, 0, MAX_SECONDS),
    source=SOURCE,
    date=DATE,
    command=rule(Fields.text, longest=MAX_TEXT),
)


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
