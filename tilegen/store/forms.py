"""JSON forms of what records, trials and manifests share: configs, measurements, versions."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Generator
from datetime import datetime
from typing import Any, get_args

from tilegen.errors import InvalidRecord, TilegenError
from tilegen.kernels.config import OPTIONS, Kernel, TileConfig
from tilegen.kernels.registry import KERNELS, check_config
from tilegen.problem import AttentionProblem
from tilegen.store.fields import MAX_TEXT, Fields, Form, Rule, group, optional, rule, sparse
from tilegen.store.versions import Versions, release_order
from tilegen.tuning.measure import MAX_REPEATS, Measurement, Status
from tilegen.tuning.surroundings import Surroundings
from tilegen.version import __version__

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
_COUNT = sparse(rule(Fields.integer, 0, 100_000))
_SURROUNDINGS = Form(
    Surroundings,
    clock_mhz=_COUNT,
    throttled=sparse(rule(Fields.texts, r"[a-z0-9_]{1,40}", "a reason of NVML", 64)),
    power_limit_w=_COUNT,
    others=_COUNT,
    load=sparse(rule(Fields.number, 0, 100_000)),
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
KERNEL = rule(Fields.choice, tuple(KERNELS))
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
