"""The base of masks and scores, which are expressions over tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tilegen.masks.values import Table

if TYPE_CHECKING:
    import torch


class OfTables:
    """An expression over tables: a mask, a score, or what a function computes."""

    follows: ClassVar[Any] = None
    """The functions that a mask or a score follows, or None: `follows.now(mask)` is the mask of a
    call."""
    tables: Any
    """The tables t0, t1, ... of the expression."""
    unused: Any = ()
    """Tables that a function reads, and on which the result does not depend: `bias` in `s + 0 *
    bias[q]`. Their gradient is 0."""

    @cached_property
    def captured(self) -> tuple[torch.Tensor, ...]:
        """The tensors t0, t1, ... of the expression."""
        return tuple([table.tensor for table in self.tables])

    @cached_property
    def makes_tensors(self) -> bool:
        """Whether the expression reads tensors that are made of other tensors."""
        return any(table.recipe is not None for table in (*self.tables, *self.unused))

    def with_tables(self, changed: Callable[[Table], Table]) -> Self:
        """Return the same over tables each of which is replaced by `changed(table)`."""
        tables, unused = (tuple(map(changed, some)) for some in (self.tables, self.unused))
        return replace(self, tables=tables, unused=unused)  # type: ignore[type-var]

    def with_tensors(self, changed: Callable[[Any], Any]) -> Self:
        """Return the same over tensors each of which is replaced by `changed(tensor)`."""
        recipes: dict[int, Any] = {}

        def of_table(table: Table) -> Table:
            if (recipe := table.recipe) is None:
                return table.but(tensor=changed(table.tensor))
            if id(recipe) not in recipes:
                recipes[id(recipe)] = replace(recipe, sources=tuple(map(changed, recipe.sources)))
            return table.but(recipe=recipes[id(recipe)])

        return self.with_tables(of_table)
