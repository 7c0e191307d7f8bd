"""Deliberate breaks of the kernels for Hopper: of the forward in breaks.toml, of the backward in
backward_breaks.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent
_FOUND = tomllib.loads((_HERE / "breaks.toml").read_text(encoding="utf-8"))
_BACKWARD = tomllib.loads((_HERE / "backward_breaks.toml").read_text(encoding="utf-8"))


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
    kernel: str = "fwd_hopper"

    def __str__(self) -> str:
        return f"{self.kernel}: {self.name}" if self.kernel != "fwd_hopper" else self.name

    def of(self, source: str) -> str:
        """Return the broken text."""
        before, actual, after = (source.rpartition if self.last else source.partition)(self.old)
        assert actual, f"{self.old!r} is not in the text: update the break"
        return f"{before}{self.new}{after}"


BREAKS = [Break(**one) for one in _FOUND["breaks"]]
HARMLESS = [Break(**one) for one in _FOUND["harmless"]]
"""Changes that leave the kernel right."""
BACKWARD = [
    Break(**(one | {"kernel": kernel})) for kernel, breaks in _BACKWARD.items() for one in breaks
]
EQUIVALENT: dict[str, str] = _FOUND["equivalent"]
"""Neighbours that may change places, and why."""
