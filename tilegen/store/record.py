"""The record of a tuning winner, and its JSON form. cache/README.md documents it for users."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from tilegen.errors import InvalidRecord
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.masks.notation import older_notations
from tilegen.problem import AttentionProblem
from tilegen.store.fields import MAX_TEXT, Fields, Form, group, nullable, optional, parse_json, rule
from tilegen.store.forms import (
    ARCH,
    CONFIG,
    DATE,
    GPU,
    KERNEL,
    MASK,
    MAX_BYTES,
    MAX_RIVALS,
    MAX_SECONDS,
    MEASUREMENT,
    PROBLEM,
    SOURCE,
    VERSIONS,
    OtherSchema,
    naming_newer,
)
from tilegen.store.versions import Versions
from tilegen.tuning.measure import POLICY, Measurement

if TYPE_CHECKING:
    from tilegen.model.estimate import CostEstimate

SCHEMA = 1
"""Version of the JSON form. Raise it when an older tilegen would misread a newer record."""
KEY = ("gpu", "arch", "kernel", "problem", "policy")
"""Fields that identify the task of a record; its rivals share them."""


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
