"""Order of events, by vector clocks; and races: accesses that nothing orders.

An actor is a partition, or one asynchronous operation. Each counts its releases (arrivals at a
barrier, operations issued, fences); an access carries its actor's count. What an actor has `seen`
of others is passed on through barriers and waits (Lamport; Mattern, 1989). Two accesses of the same
bytes, one of them a write, must be ordered, whichever came first in the schedule that was run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.gluon.memory_model.faults import Fault

Actor = int
Region = tuple[tuple[int, int], ...]
"""First and last but one index of each dimension of an allocation."""


@dataclass(slots=True)
class View:
    """Knowledge of an actor of what has happened, as counts of other actors."""

    seen: dict[Actor, int] = field(default_factory=dict)
    fenced: dict[Actor, int] = field(default_factory=dict)
    """Counts of ordinary loads and stores before a fence: later operations of the asynchronous
    proxy are ordered after them."""

    def copy(self) -> View:
        """Return a view that changes apart from this one."""
        return View(dict(self.seen), dict(self.fenced))

    def join(self, other: View) -> None:
        """Know what another actor knows."""
        for mine, others in ((self.seen, other.seen), (self.fenced, other.fenced)):
            for actor, count in others.items():
                if mine.get(actor, 0) < count:
                    mine[actor] = count


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes that an actor reads or writes."""

    actor: Actor
    count: int
    """Number of releases of the actor before the access."""
    writes: bool
    ordinary: bool
    """True: by ordinary loads and stores. False: by the asynchronous proxy, as TMA and wgmma."""
    region: Region
    what: str
    """The access in words, with its line."""


class Ledger:
    """The accesses of one allocation, as far as they may race with later ones."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._accesses: list[Access] = []

    def note(self, new: Access, view: View, fault: Callable[[str], Fault]) -> None:
        """Note an access of an actor with a view. Raises Fault where it races with an earlier one,
        or where no fence orders the asynchronous proxy after an ordinary access."""
        kept: list[Access] = []
        for old in self._accesses:
            if not _overlap(old.region, new.region):
                kept.append(old)
                continue
            if old.writes or new.writes:
                if view.seen.get(old.actor, 0) < old.count:
                    raise fault(
                        f"race on {self.name}{_shown(new.region)}: nothing orders {new.what} after "
                        f"{old.what}"
                    )
                unfenced = view.fenced.get(old.actor, 0) < old.count
                if old.ordinary and not new.ordinary and unfenced:
                    may = "may not see" if old.writes else "may be there before"
                    who = "store" if old.writes else "load"
                    raise fault(
                        f"no proxy fence on {self.name}{_shown(new.region)}: {new.what} {may} "
                        f"{old.what}; fence_async_shared() belongs after the {who}, in the "
                        f"partition that {who}s"
                    )
            covers = _covers(new.region, old.region)
            again = old.actor == new.actor and old.writes == new.writes
            if not (covers and (new.writes or again)):
                kept.append(old)
        kept.append(new)
        self._accesses = kept


def _overlap(region: Region, other: Region) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(region, other, strict=True))


def _covers(region: Region, other: Region) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(region, other, strict=True))


def _shown(region: Region) -> str:
    parts = (str(a) if b == a + 1 else f"{a}:{b}" for a, b in region)
    return f"[{', '.join(parts)}]"
