"""Reading JSON that anybody may have written: every value is checked for its type and range."""

from __future__ import annotations

import json
import re
import reprlib
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from tilegen.errors import InvalidRecord

MAX_TEXT = 1000


@dataclass(frozen=True)
class Fields:
    """One JSON object. Each method returns a checked value or raises InvalidRecord with its name.

    Fields nobody asks for are ignored, so that a record may grow some without a new schema.
    """

    values: dict[str, Any]
    where: str = ""
    """Prefix of the names in messages, such as `measurement.`."""

    def integer(self, name: str, low: int, high: int) -> int:
        """Return the int `low <= name <= high`."""
        value = self._get(name)
        if type(value) is not int or not low <= value <= high:
            self._refuse(name, f"an int in {low}..{high}", value)
        return value

    def number(self, name: str, low: float, high: float) -> float:
        """Return the finite number `low <= name <= high` as a float."""
        value = self._get(name)
        if type(value) not in (int, float) or not low <= value <= high:
            self._refuse(name, f"a number in {low:g}..{high:g}", value)
        return float(value)

    def text(self, name: str, pattern: str = "", expected: str = "", *, longest: int = 200) -> str:
        """Return the printable text; if `pattern` is given, one that matches all of it."""
        value = self._get(name)
        # Text may reach a terminal: no escape sequences, line ends or lone surrogates.
        if not isinstance(value, str) or len(value) > longest or not value.isprintable():
            self._refuse(name, f"printable text of at most {longest} characters", value)
        if pattern and not re.fullmatch(pattern, value):
            self._refuse(name, expected, value)
        return value

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        """Return the text, one of `allowed`."""
        value = self._get(name)
        if not isinstance(value, str) or value not in allowed:
            self._refuse(name, f"one of {', '.join(allowed)}", value)
        return value

    def flag(self, name: str) -> bool:
        """Return true or false."""
        value = self._get(name)
        if not isinstance(value, bool):
            self._refuse(name, "true or false", value)
        return value

    def group(self, name: str) -> Fields:
        """Return the JSON object `name`."""
        return fields_of(self._get(name), self.where + name)

    def groups(self, name: str, most: int) -> list[Fields]:
        """Return the JSON objects of the list `name`, at most `most`."""
        value = self._get(name)
        if not isinstance(value, list) or len(value) > most:
            self._refuse(name, f"a list of at most {most} JSON objects", value)
        return [
            fields_of(one, f"{self.where}{name}[{index}]")
            for index, one in enumerate(cast("list[Any]", value))
        ]

    def is_null(self, name: str) -> bool:
        """True where the field is there and null."""
        return self._get(name) is None

    def _get(self, name: str) -> Any:
        if name not in self.values:
            raise InvalidRecord(f"expected the field {self.where}{name}, found none")
        return self.values[name]

    def _refuse(self, name: str, expected: str, value: object) -> NoReturn:
        raise InvalidRecord(f"{self.where}{name} must be {expected}, got {reprlib.repr(value)}")


def parse_json(text: str) -> Fields:
    """Return the JSON object that `text` holds. Raises InvalidRecord, never anything else."""
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
    """Return the fields of a JSON object that is called `name`. Raises InvalidRecord."""
    if not isinstance(value, dict):
        what = name or "the file"
        raise InvalidRecord(f"{what} must be a JSON object, got {reprlib.repr(value)}")
    return Fields(cast("dict[str, Any]", value), f"{name}." if name else "")


def _no_constant(name: str) -> NoReturn:
    raise InvalidRecord(f"expected finite numbers, found {name}")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise InvalidRecord("expected every field once, found one twice")
    return values
