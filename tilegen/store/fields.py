"""Parsing of untrusted JSON: the type and range of every value are checked. A `Form` has a rule for
each field of a dataclass."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, NoReturn, TypeVar, cast

from tilegen.errors import InvalidRecord

MAX_TEXT = 1000

T = TypeVar("T")


@dataclass(frozen=True)
class Fields:
    """The fields of one JSON object. Each method checks a value, or raises InvalidRecord with the
    field's name.

    Unknown fields are ignored, so that records may gain fields without a new schema.
    """

    values: dict[str, Any]
    where: str = ""
    """Prefix of field names in messages, such as `measurement.`."""

    def integer(self, name: str, low: int, high: int) -> int:
        """Return an integer field in `low`..`high`, both included."""
        value = self._get(name)
        if type(value) is not int or not low <= value <= high:
            self._refuse(name, f"an int in {low}..{high}", value)
        return value

    def number(self, name: str, low: float, high: float) -> float:
        """Return a finite number in `low`..`high`, both included, as a float."""
        value = self._get(name)
        if type(value) not in (int, float) or not low <= value <= high:
            self._refuse(name, f"a number in {low:g}..{high:g}", value)
        return float(value)

    def text(self, name: str, pattern: str = "", expected: str = "", *, longest: int = 200) -> str:
        """Return a printable text of at most `longest` characters.

        A `pattern` must match the whole text; `expected` describes the pattern in the error.
        """
        value = self._get(name)
        # Texts may reach a terminal: no escape sequences, line ends or lone surrogates.
        if not isinstance(value, str) or len(value) > longest or not value.isprintable():
            self._refuse(name, f"printable text of at most {longest} characters", value)
        if pattern and not re.fullmatch(pattern, value):
            self._refuse(name, expected, value)
        return value

    def choice(self, name: str, allowed: Collection[str]) -> str:
        """Return a text field that is in `allowed`."""
        value = self._get(name)
        if not isinstance(value, str) or value not in allowed:
            self._refuse(name, f"one of {', '.join(allowed)}", value)
        return value

    def flag(self, name: str) -> bool:
        """Return a boolean field."""
        value = self._get(name)
        if not isinstance(value, bool):
            self._refuse(name, "true or false", value)
        return value

    def group(self, name: str) -> Fields:
        """Return the fields of a nested JSON object."""
        return fields_of(self._get(name), self.where + name)

    def groups(self, name: str, most: int) -> list[Fields]:
        """Return the fields of each JSON object in a list of at most `most`."""
        entries = self._list(name, most, "JSON objects")
        return [fields_of(item, f"{self.where}{name}[{i}]") for i, item in enumerate(entries)]

    def texts(self, name: str, pattern: str, expected: str, most: int) -> tuple[str, ...]:
        """Return a list of at most `most` texts, each matched whole by `pattern`."""
        entries = {str(i): item for i, item in enumerate(self._list(name, most, "texts"))}
        items = Fields(entries, f"{self.where}{name}.")
        return tuple(items.text(i, pattern, expected) for i in entries)

    def _list(self, name: str, most: int, of: str) -> list[Any]:
        value = self._get(name)
        if not isinstance(value, list) or len(value) > most:
            self._refuse(name, f"a list of at most {most} {of}", value)
        return cast("list[Any]", value)

    def is_null(self, name: str) -> bool:
        """Return True if the field is null. A missing field raises InvalidRecord."""
        return self._get(name) is None

    def _get(self, name: str) -> Any:
        if name not in self.values:
            raise InvalidRecord(f"expected the field {self.where}{name}, found none")
        return self.values[name]

    def _refuse(self, name: str, expected: str, value: object) -> NoReturn:
        raise InvalidRecord(f"{self.where}{name} must be {expected}, got {reprlib.repr(value)}")


def parse_json(text: str) -> Fields:
    """Parse a JSON object. Raises InvalidRecord and no other error."""
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise InvalidRecord("expected a flat JSON object, found one nested too deep") from None
    except InvalidRecord:
        raise
    except ValueError as error:  # not JSON, or an integer of thousands of digits
        raise InvalidRecord(f"expected JSON, found something else ({error})") from None
    return fields_of(value, "")


def fields_of(value: object, name: str) -> Fields:
    """Wrap a decoded JSON object called `name`. Raises InvalidRecord if the value is no object."""
    if not isinstance(value, dict):
        shown = name or "the file"
        raise InvalidRecord(f"{shown} must be a JSON object, got {reprlib.repr(value)}")
    return Fields(cast("dict[str, Any]", value), f"{name}." if name else "")


def _no_constant(name: str) -> NoReturn:
    raise InvalidRecord(f"expected finite numbers, found {name}")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise InvalidRecord("expected every field once, found one twice")
    return values


@dataclass(frozen=True)
class Rule:
    """The reader and the writer of a field of a dataclass in JSON."""

    read: Callable[[Fields, str], Any]
    """Check the field of a name; raises InvalidRecord."""
    write: Callable[[Any], Any] = lambda value: value
    is_optional: bool = False
    """True if the field may be absent, and has its default then."""
    is_sparse: bool = False
    """True if the field is left out where it has its default."""


class Form(Generic[T]):
    """The JSON object of a dataclass: a rule for each field, in the order of the object."""

    def __init__(self, kind: type[T], **rules: Rule) -> None:
        self._kind, self._rules = kind, rules
        self._defaults = {field.name: field.default for field in fields(cast("Any", kind))}

    def read(self, fields: Fields, **given: Any) -> T:
        """Check all fields but the given ones, and make the dataclass. Raises InvalidRecord."""
        values = {
            name: rule.read(fields, name)
            for name, rule in self._rules.items()
            if name not in given and (name in fields.values or not rule.is_optional)
        }
        return self._kind(**values, **given)

    def values(self, value: T) -> dict[str, Any]:
        """Return the JSON values; `read` is the inverse."""
        return {
            name: rule.write(stored)
            for name, rule in self._rules.items()
            if not ((stored := getattr(value, name)) == self._defaults[name] and rule.is_sparse)
        }


def rule(check: Callable[..., Any], *limits: Any, **options: Any) -> Rule:
    """Return the rule of a method of Fields: `rule(Fields.integer, 0, 9)`."""
    return Rule(lambda fields, name: check(fields, name, *limits, **options))


def group(form: Form[Any]) -> Rule:
    """Return the rule of a nested object."""
    return Rule(lambda fields, name: form.read(fields.group(name)), form.values)


def nullable(of: Rule) -> Rule:
    """Return a rule that also admits null."""
    return Rule(
        lambda fields, name: None if fields.is_null(name) else of.read(fields, name),
        lambda value: None if value is None else of.write(value),
    )


def optional(of: Rule) -> Rule:
    """Return the rule of a field that may be absent."""
    return replace(of, is_optional=True)


def sparse(of: Rule) -> Rule:
    """Return the rule of a field that is left out where it has its default."""
    return replace(of, is_optional=True, is_sparse=True)
