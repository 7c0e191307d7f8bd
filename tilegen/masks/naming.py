"""Canonical masks: what a mask keeps decides its form, not how it was written.

A join of masks, or a traced function, becomes one expression. Its comparisons are written in one
way, and masks with a name, such as causal and windows, are read back from it. Masks with facts that
no expression states, such as documents and trees, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import permutations, zip_longest
from math import gcd
from typing import Any, Literal

from tilegen.bounded_cache import BoundedCache
from tilegen.masks.form import CAUSAL, FULL, WINDOW
from tilegen.masks.language.algebra import (
    add,
    as_expr,
    at_most,
    both,
    either,
    equal,
    less,
    opposite,
    subtract,
)
from tilegen.masks.language.bounds import LARGEST, MAX_LENGTH, bounded
from tilegen.masks.language.expr import (
    FALSE,
    PAIR,
    SEQLEN_KV,
    SEQLEN_Q,
    SYMBOLS,
    TRUE,
    Expr,
    K,
    Q,
    slot_of,
)
from tilegen.masks.language.integers import combined, linear
from tilegen.masks.language.rewriting import captured_slots, made, renamed
from tilegen.masks.language.texts import to_text
from tilegen.masks.mask import AND, NOT, OR, Mask, sliding_window
from tilegen.masks.usual import DILATED, GLOBAL, KEEP, KV_PREFIX, PREFIX_LM
from tilegen.masks.values import MAX_WINDOW, Alignment, Pair, Table, shown

Join = Literal["and", "or"]
_EXPRESSED = (FULL, CAUSAL, WINDOW, PREFIX_LM, GLOBAL, KV_PREFIX, DILATED, KEEP)
"""Forms of which their condition says everything."""
MAX_PLANS = 4096


def canonical(mask: Mask) -> Mask:
    """Return the one form of the masks that keep the same pairs, as far as algebra shows it."""
    given = mask.tables
    origins = [i if one.is_stand_in else (one.identity, one.facts) for i, one in enumerate(given)]
    places = [origins.index(origin) for origin in origins]
    # Placeholders know their place by `part`: equal structures share what was found for one.
    ghosts = [
        one.but(tensor=None, recipe=None, part=at) for one, at in zip(given, places, strict=True)
    ]
    left = iter([ghosts[place] for place in places])
    structure = mask.with_tables(lambda _: next(left))
    plan = _plans.get((structure, tuple(places)), lambda: _Names().canonical(structure))
    if not given:
        return Mask(plan.form, plan.args)  # which keeps by itself how it was made

    def filled(ghost: Table) -> Table:
        own = given[ghost.part]
        if ghost == ghosts[ghost.part]:
            return own
        return ghost.but(tensor=own.tensor, recipe=own.recipe, part=own.part)

    mask = plan.with_tables(filled)
    is_judged = all(value.typical >= 0 for value in plan.tables)
    return mask if is_judged else _with_percents(mask)


_plans: BoundedCache[Any, Mask] = BoundedCache(MAX_PLANS)


def _with_percents(mask: Mask) -> Mask:
    """Judge the density of expressions that were joined, whose tables have a negative number: the
    smallest percentage of the parts, which stands for it where tensors are missing."""
    if mask.form is not KEEP or not mask.tables or mask.tables[0].typical > 0:
        return mask.with_parts(_with_percents)
    from tilegen.masks.tiles.tile_lists import percent_live  # loads torch

    real = not mask.is_stand_in
    percent = percent_live(mask) if real else -mask.tables[0].typical
    return mask.with_tables(lambda table: table.but(typical=percent))


class _Names:
    """Names the masks in one expression."""

    def __init__(self) -> None:
        self.atoms: dict[Expr, Mask] = {}
        self.tables: dict[int, Table] = {}
        self.percents: dict[Expr, int] = {}
        self.known: dict[Expr, Mask | None] = {}

    def canonical(self, mask: Mask) -> Mask:
        """Return the canonical form of a mask of placeholders."""
        return self.mask(simplified(self.expression(mask)))

    def expression(self, mask: Mask) -> Expr:
        """Return the condition of a mask, in which symbols stand for masks with facts."""
        if mask.form in (AND, OR):
            return (both if mask.form is AND else either)(*map(self.expression, mask.parts))
        if mask.form is NOT:
            return opposite(self.expression(mask.args[0]))
        if mask.form not in _EXPRESSED:
            places = [value.part for value in mask.tables]
            atom = Expr("symbol", "bool", (), f"{mask.notation}#{places}")
            self.atoms[atom] = mask
            return atom
        self.tables.update((value.slot, value) for value in mask.tables)
        keep = as_expr(mask.keep(Pair(*PAIR)))
        if mask.form is KEEP and mask.tables:
            self.percents[simplified(keep)] = mask.tables[0].typical
        return keep

    def mask(self, keep: Expr) -> Mask:
        """Return the mask of a condition: parts with a name, and one expression of all others."""
        if (name := self.named(keep)) is not None:
            return name
        join: Join = "or" if keep.op == "or" else "and"
        masks, rest = self.split(keep.args if keep.op == join else (keep,), join)
        joined = [part for part in rest if part.free & set(self.atoms)]
        masks += map(self.mask, joined)
        others = [part for part in rest if part not in joined]
        if others:
            masks.append(self.unnamed((both if join == "and" else either)(*others)))
        return _joined(masks, join)

    def named(self, keep: Expr) -> Mask | None:
        """Return the mask of a condition that consists of named masks; None for others."""
        if keep not in self.known:
            self.known[keep] = self._named(keep)
        return self.known[keep]

    def _named(self, keep: Expr) -> Mask | None:
        if keep.is_const:
            return Mask.of(FULL) if keep is TRUE else Mask.of(NOT, Mask.of(FULL))
        if keep.op not in ("and", "or"):
            return self.leaf(keep)
        masks, rest = self.split(keep.args, keep.op)  # type: ignore[arg-type]
        return None if rest else _joined(masks, keep.op)  # type: ignore[arg-type]

    def split(self, parts: Iterable[Expr], join: Join) -> tuple[list[Mask], list[Expr]]:
        """Return the masks among conditions that are joined, and the conditions without a name.

        Windows and prefixes are joins of two conditions: `and` joins those of a window, and those
        of the negation of a prefix; `or` those of a prefix, and of the negation of a window.
        """
        masks: list[Mask] = []
        rest: list[Expr] = []
        sides: dict[tuple[Alignment, str], list[int | Table]] = {}
        for part in self._without_prefixes(list(parts), join, masks):
            if ends := self.window(part if join == "and" else opposite(part)):
                for side, limit in ends:
                    sides.setdefault(side, []).append(limit)
            elif (name := self.named(part)) is not None:
                masks.append(name)
            else:
                rest.append(part)
        for alignment in ("top_left", "bottom_right"):
            left, right = (sides.get((alignment, side), []) for side in ("left", "right"))
            pairs = zip_longest(sorted(left, key=shown), sorted(right, key=shown))
            windows = [sliding_window(one, other, alignment) for one, other in pairs]
            masks += windows if join == "and" else [Mask.of(NOT, window) for window in windows]
        return masks, rest

    def _without_prefixes(self, parts: list[Expr], join: Join, masks: list[Mask]) -> list[Expr]:
        """Move prefix_lm and global masks from conditions to masks."""
        turned = parts if join == "or" else [opposite(part) for part in parts]
        for form in (GLOBAL, PREFIX_LM):  # a prefix that both could take is of the former
            for first, second in permutations(turned, 2):
                limit = self.prefix(second, K)
                if form is PREFIX_LM:
                    fits = first is at_most(K, Q)
                else:
                    number = self.prefix(first, Q)
                    fits = number is limit or (isinstance(number, int) and number == limit)
                if limit is None or not fits or first not in turned or second not in turned:
                    continue
                mask = Mask.of(form, limit)
                masks.append(mask if join == "or" else Mask.of(NOT, mask))
                turned = [part for part in turned if part not in (first, second)]
        return turned if join == "or" else [opposite(part) for part in turned]

    def leaf(self, part: Expr) -> Mask | None:
        """Return the mask of a comparison, of an atom, or of the negation of one."""
        name = self._named_leaf(part)
        if name is not None:
            return name
        name = self._named_leaf(opposite(part))
        return None if name is None else Mask.of(NOT, name)

    def _named_leaf(self, part: Expr) -> Mask | None:
        if part in self.atoms:
            return self.atoms[part]
        if ends := self.window(part):
            alignment = ends[0][0][0]
            limits = {side: limit for (_, side), limit in ends}
            return sliding_window(limits.get("left"), limits.get("right"), alignment)
        if (step := _step(part)) is not None:
            return Mask.of(DILATED, step)
        number = self.prefix(part, K)
        return None if number is None else Mask.of(KV_PREFIX, number)

    def window(self, part: Expr) -> list[tuple[tuple[Alignment, str], int | Table]]:
        """Return the bounds of the distance from a diagonal that a comparison states."""
        if part.op not in ("le", "lt") or not part.args[0].is_int or not part.has(Q):
            return []
        low, high = part.args
        room = high - low - int(part.op == "lt")
        diagonals: dict[Alignment, Expr] = {"top_left": Q, "bottom_right": Q + SEQLEN_KV - SEQLEN_Q}
        for alignment, centre in diagonals.items():
            right, left, around = (
                self.number(add(room, distance))
                for distance in (K - centre, centre - K, abs(centre - K))
            )
            if around is not None:
                return [((alignment, "left"), around), ((alignment, "right"), around)]
            if left is not None or right is not None:
                side, limit = ("left", left) if right is None else ("right", right)
                return [((alignment, side), limit)]  # type: ignore
        return []

    def prefix(self, part: Expr, index: Expr) -> int | Table | None:
        """Return n of `index < n`, None for any other condition."""
        if part.op not in ("le", "lt") or not part.args[0].is_int:
            return None
        low, high = part.args
        return self.number(high - low + index + int(part.op == "le"))

    def number(self, limit: Expr) -> int | Table | None:
        """Return a number of a mask: an integer, or a table that is read at the pair."""
        if limit.is_const:
            return limit.value if 0 <= limit.value <= MAX_WINDOW else None
        table = self.tables.get(slot_of(limit)) if limit.op == "load" else None
        if table is None or table.axes is None:
            return None
        return table if limit.args == tuple(SYMBOLS[axis] for axis in table.axes) else None

    def unnamed(self, keep: Expr) -> Mask:
        """Return the mask of an expression, over its tables in an order that it determines."""
        slots = captured_slots(keep)
        if not slots:
            return Mask.of(KEEP, to_text(keep))

        def alone(slot: int) -> str:
            marks = {one: (int(one == slot), self.tables[one].elements_kind) for one in slots}
            return to_text(renamed(keep, marks))

        order = sorted(slots, key=lambda slot: (alone(slot), self.tables[slot].part))
        tables = [self.tables[slot] for slot in order]
        least = min(abs(one.typical) if one.axes is None else 100 for one in tables)
        percent = self.percents.get(keep, -least)
        places = {slot: (i, self.tables[slot].elements_kind) for i, slot in enumerate(order)}
        read = (replace(one, axes=None, pattern="table", typical=percent) for one in tables)
        return Mask.of(KEEP, to_text(renamed(keep, places)), *read)


def _joined(masks: list[Mask], join: Join) -> Mask:
    masks = sorted(masks, key=lambda part: part.notation)
    return masks[0] if len(masks) == 1 else Mask.of(AND if join == "and" else OR, *masks)


def _step(part: Expr) -> int | None:
    """Return n where a condition is `(q - k) % n == 0`, or `q % n == k % n`."""
    if part.op != "eq" or any(side.op != "mod" and not side.is_const for side in part.args):
        return None
    first, second = part.args
    if second.is_const:
        distances = (Q - K, K - Q, abs(Q - K))
        is_of = first.op == "mod" and second.value == 0 and first.args[0] in distances
    else:
        is_of = {first.args[0], second.args[0]} == {Q, K} and first.args[1] is second.args[1]
    step = first.args[1] if is_of else FALSE
    return step.value if step.is_int and step.is_const and 1 <= step.value <= MAX_WINDOW else None


# --------------------------------------------------------------------------------------------------
# Conditions in one way of writing


def simplified(keep: Expr) -> Expr:
    """Return an equal condition: negations stand before comparisons alone, comparisons of integers
    are written in one way, and no part repeats what a part beside it states."""
    if keep.op == "not" and keep.args[0].op in ("and", "or"):
        join = either if keep.args[0].op == "and" else both
        return simplified(join(*(opposite(part) for part in keep.args[0].args)))
    if keep.op not in ("and", "or"):
        return _compared(keep)
    keep = made(keep, tuple(map(simplified, keep.args)))
    if keep.op not in ("and", "or"):
        return keep
    # Beside a part that must hold, it is true; beside one that suffices, it may be false.
    beside = TRUE if keep.op == "and" else FALSE
    parts = list(keep.args)
    for part in keep.args:
        if part.op not in ("and", "or") and part in parts:
            fact = part if keep.op == "and" else opposite(part)
            parts = [one if one is part else _given(one, fact) for one in parts]
    joined = [set(part.args) for part in parts if part.op in ("and", "or")]
    parts = [one for one in parts if not any(other < set(one.args) for other in joined)]
    simpler = made(keep, tuple(part for part in parts if part is not beside) or (beside,))
    return simpler if simpler is keep else simplified(simpler)


def _given(keep: Expr, fact: Expr) -> Expr:
    """Return a condition that equals another where a fact holds."""
    if keep.op in ("and", "or"):
        return made(keep, tuple(_given(part, fact) for part in keep.args))
    if _implies(fact, keep):
        return TRUE
    return FALSE if _implies(fact, opposite(keep)) else keep


def _implies(fact: Expr, other: Expr) -> bool:
    """Return whether a comparison implies another, of which both are the same but for a number."""
    if fact is other:
        return True
    if not all(one.op in ("lt", "le") and _is_exact(one) for one in (fact, other)):
        return False
    rooms = [one.args[1] - one.args[0] - int(one.op == "lt") for one in (other, fact)]
    more = subtract(*rooms)
    return more.is_const and more.value >= 0


def _is_exact(comparison: Expr) -> bool:
    """Return whether a comparison is of integers whose sums do not wrap around."""
    ends = (bounded(side, MAX_LENGTH) for side in comparison.args if side.is_int)
    return comparison.args[0].is_int and all(-LARGEST < low <= high < LARGEST for low, high in ends)


def _compared(keep: Expr) -> Expr:
    """Return a comparison of integers with sums of positive factors on its sides: `k<=q+9` for
    `k-q<10` and for `9>=k-q`."""
    of = keep.args[0] if keep.op == "not" else keep
    if of.op not in ("lt", "le", "eq") or not _is_exact(of):
        return keep
    terms, constant = linear(subtract(of.args[1], of.args[0]))
    constant -= int(of.op == "lt")
    common = gcd(*terms.values())
    if of.op != "eq" or constant % common == 0:
        terms = {term: factor // common for term, factor in terms.items()}
        constant //= common
    if of.op == "eq" and constant < 0:
        terms, constant = {term: -factor for term, factor in terms.items()}, -constant
    more = combined({term: factor for term, factor in terms.items() if factor > 0})
    less_ = combined({term: -factor for term, factor in terms.items() if factor < 0})
    if of.op == "eq":
        same = equal(less_, add(more, constant))
        return opposite(same) if keep.op == "not" else same
    if constant == -1 and not more.is_const:
        return less(less_, more)
    if more.is_const:
        return less(less_, constant + 1)
    return (
        at_most(less_, add(more, constant))
        if constant >= 0
        else at_most(add(less_, -constant), more)
    )
