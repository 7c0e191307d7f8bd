"""Source texts of masks and scores, drawn from the grammar."""

from __future__ import annotations

import re
from random import Random

from tests.differential.grammar import (
    GRAMMAR,
    INDICES,
    PAIRS,
    PARTS,
    SAME,
    TABLES,
    Productions,
)


class Writer:
    """Expands the grammar; collects the tables that texts name."""

    def __init__(self, random: Random) -> None:
        """Choices come from `random` alone."""
        self.tables: dict[str, str] = {}
        self._random = random

    def write(self, symbol: str, depth: int) -> str:
        """Return source text for a symbol, nested `depth` times at most."""
        if interval := re.fullmatch(r"(-?\d+)\.\.(-?\d+)", symbol):
            return str(self._random.randint(int(interval[1]), int(interval[2])))
        if symbol == "same":
            return self._pick(SAME).format(self.write("labels", depth))
        if symbol in TABLES:
            return self._named(self._expanded(self._pick(TABLES[symbol]), depth))
        if symbol in PARTS:
            return self._expanded(self._pick(PARTS[symbol]), depth)
        if kind := re.fullmatch(r"(\w+) look-up", symbol):
            return self._look_up(kind[1], depth)
        if depth <= 0 and f"{symbol} leaf" in GRAMMAR:
            symbol = f"{symbol} leaf"
        written = self._expanded(self._pick(GRAMMAR[symbol]), depth)
        return f"({written})" if symbol in ("cond", "score", "float") else written

    def _pick(self, productions: Productions) -> str:
        weights, texts = zip(*productions, strict=True)
        return self._random.choices(texts, weights)[0]

    def _expanded(self, text: str, depth: int) -> str:
        return re.sub(r"<([^<>= ][^<>=]*)>", lambda one: self.write(one[1], depth - 1), text)

    def _look_up(self, kind: str, depth: int) -> str:
        """Return an element of a table of ints, floats or bools; at times of `table[ints[...]]`."""
        random = self._random
        indices = random.choice(PAIRS) if random.random() < 0.25 else (random.choice(INDICES),)
        sizes = ", ".join(size for _, size in indices)
        at = ", ".join(index for index, _ in indices)
        if len(indices) == 1 and random.random() < 0.2:
            inner = self._expanded(f"ints(<seed>, 0, 9, {sizes}, dtype=<ints>)", depth)
            at, sizes = f"{self._named(inner)}[{at}]", "10"
        text = {
            "int": f"ints(<seed>, <-5..0>, <3..40>, {sizes}, dtype=<widths>)",
            "float": f"floats(<seed>, {sizes}, dtype=<floats>)",
            "bool": f"bools(<seed>, <20..90>, {sizes})",
        }[kind]
        return f"{self._named(self._expanded(text, depth))}[{at}]"

    def _named(self, made: str) -> str:
        name = f"t{len(self.tables)}"
        self.tables[name] = made
        return name
