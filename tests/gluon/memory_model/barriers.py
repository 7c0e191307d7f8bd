"""mbarriers, as the PTX documentation has them (mbarrier objects, phases, transaction counts).

A phase completes when its pending arrivals and its transaction count are both zero; the barrier is
then in the next phase, with all arrivals pending again. Waits name a parity: that of the phase they
wait for, so a barrier two phases on looks to a waiter as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.gluon.memory_model.clocks import Actor, View
from tests.gluon.memory_model.faults import Fault

MAX_COUNT = 2**20 - 1
"""Largest count of arrivals, and of transactions [bytes] (PTX, mbarrier: limits)."""

MakeFault = Callable[[str], Fault]


@dataclass
class Barrier:
    """One mbarrier."""

    name: str
    count: int = 0
    """Number of arrivals that complete a phase; 0 before the barrier is initialised."""
    pending: int = 0
    bytes_left: int = 0
    """Bytes that were expected and did not come, less those that came unexpected [bytes]."""
    phase: int = 0
    made: View | None = None
    """View of the actor that initialised the barrier."""
    known: View = field(default_factory=View)
    """Joined view of the actors that arrived in this phase."""
    done: dict[int, View] = field(default_factory=dict)
    """Views with which the last two phases completed, by the number of the phase."""
    waits: dict[Actor, tuple[int, int]] = field(default_factory=dict)
    """Phase that each actor waited for last, and the count of the actor then."""

    def start(self, count: int, view: View, fault: MakeFault) -> None:
        """Initialise the barrier. Raises Fault where it is already, or for a count out of range."""
        if self.count:
            raise fault(f"{self.name} is initialised twice")
        if not 0 < count <= MAX_COUNT:
            raise fault(f"{self.name} is initialised for {count} arrivals, not 1..{MAX_COUNT}")
        self.count = self.pending = count
        self.made = view.copy()

    def end(self, fault: MakeFault) -> None:
        """Invalidate the barrier. Raises Fault where it is not initialised."""
        self._check(None, fault)
        self.count = self.pending = 0
        self.made = None

    def arrive(self, count: int, view: View, fault: MakeFault) -> None:
        """Take arrivals of an actor with a view. Raises Fault beyond the count."""
        self._check(view, fault)
        self._check_phase(view, fault)
        if count > self.pending:
            raise fault(
                f"{self.name} gets {count} arrivals where {self.pending} of {self.count} are "
                f"pending in phase {self.phase}"
            )
        self.pending -= count
        self.known.join(view)
        self._advance(fault)

    def expect(self, size: int, view: View, fault: MakeFault) -> None:
        """Expect bytes in this phase, and arrive once (mbarrier.arrive.expect_tx)."""
        self._check(view, fault)
        if not 0 < size <= MAX_COUNT:
            raise fault(f"{self.name} expects {size} bytes, not 1..{MAX_COUNT}")
        self.bytes_left += size
        self.arrive(1, view, fault)

    def deliver(self, size: int, view: View, fault: MakeFault) -> None:
        """Take the bytes of a transfer that is complete."""
        self._check(view, fault)
        self._check_phase(view, fault)
        self.bytes_left -= size
        self.known.join(view)
        if not self.pending and self.bytes_left < 0:
            raise fault(
                f"{self.name} got {-self.bytes_left} bytes more than phase {self.phase} expects"
            )
        self._advance(fault)

    def awaited(self, actor: Actor, parity: int, view: View, fault: MakeFault) -> int:
        """Return the phase that an actor waits for: of this parity, the one it waited for last, or
        the next."""
        self._check(view, fault)
        if parity not in (0, 1):
            raise fault(f"{self.name} is waited for with parity {parity}, not 0 or 1")
        before = self.waits.get(actor)
        if before is None:
            return -1 if parity else 0
        return before[0] if before[0] % 2 == parity else before[0] + 1

    def is_over(self, phase: int) -> bool:
        """Return True if a wait for a phase returns."""
        return self.phase > phase

    def leave(self, actor: Actor, phase: int, view: View, fault: MakeFault) -> None:
        """Have an actor go on that waited for a phase. Raises Fault where the barrier is further on
        than that: the wait might have come too late."""
        if self.phase > phase + 1:
            raise fault(
                f"{self.name} is in phase {self.phase} when phase {phase} is waited for: by its "
                "parity the wait never ends"
            )
        if phase >= 0:
            view.join(self.done[phase])
        self.waits[actor] = phase, view.seen[actor]

    def _check(self, view: View | None, fault: MakeFault) -> None:
        if self.made is None:
            raise fault(f"{self.name} is used and is not initialised")
        if view is not None and any(view.seen.get(a, 0) < n for a, n in self.made.seen.items()):
            raise fault(f"nothing orders this use of {self.name} after its initialisation")

    def _check_phase(self, view: View, fault: MakeFault) -> None:
        """Raise Fault where an arrival might have been one of the phase before."""
        before = self.done.get(self.phase - 1)
        if before and any(view.seen.get(one, 0) < count for one, count in before.seen.items()):
            raise fault(
                f"nothing orders this arrival at {self.name} after the end of phase "
                f"{self.phase - 1}: it might be counted there"
            )

    def _advance(self, fault: MakeFault) -> None:
        if self.pending or self.bytes_left:
            return
        for actor, (phase, count) in self.waits.items():
            if phase == self.phase - 1 and self.known.seen.get(actor, 0) < count:
                raise fault(
                    f"{self.name} completes phase {self.phase}, and nothing orders that after a "
                    f"wait for phase {phase}: a slower partition would wait for ever"
                )
        self.done[self.phase] = self.known
        self.done.pop(self.phase - 2, None)
        self.known = View()
        self.phase += 1
        self.pending = self.count

    def __str__(self) -> str:
        if not self.count:
            return f"{self.name}: not initialised"
        actual = f"{self.name}: phase {self.phase}, {self.pending} of {self.count} arrivals pending"
        if self.bytes_left > 0:
            actual += f", {self.bytes_left} bytes expected that did not come"
        elif self.bytes_left:
            actual += f", {-self.bytes_left} bytes came that are not expected"
        return actual
