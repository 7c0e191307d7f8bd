"""Deliberate breaks of the Gluon forward, of breaks.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

_FOUND = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Break:
    """A change of the emitted text."""

    name: str
    old: str
    new: str
    says: str = "right"
    """The expected verdict, as a regular expression."""
    last: bool = False
    """True: the last place of `old` changes. False: the first."""

    def __str__(self) -> str:
        return self.name

    def of(self, source: str) -> str:
        """Return the broken text."""
        before, actual, after = (source.rpartition if self.last else source.partition)(self.old)
        assert actual, f"{self.old!r} is not in the text: update the break"
        return f"{before}{self.new}{after}"


BREAKS = [Break(**one) for one in _FOUND["breaks"]]
HARMLESS = [Break(**one) for one in _FOUND["harmless"]]
"""Changes that leave the kernel right."""
EQUIVALENT: dict[str, str] = _FOUND["equivalent"]
"""Neighbours that may change places, and why."""
