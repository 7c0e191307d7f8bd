"""One program of a kernel: its partitions and asynchronous operations, one step of one at a time.

Partitions are greenlets. A partition may be left at each synchronisation and each asynchronous
issue; who goes on is what a `Schedule` says. Faults do not wait for an unlucky schedule: orders are
checked by clocks (clocks.py), whatever the schedule was.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

try:
    from greenlet import GreenletExit, greenlet
except ImportError:
    raise ImportError(
        "the memory model runs partitions as greenlets, which are not installed: pip install "
        "greenlet"
    ) from None

from tests.gluon.memory_model.barriers import Barrier
from tests.gluon.memory_model.clocks import Access, View
from tests.gluon.memory_model.faults import Fault, NotModelled
from tests.gluon.memory_model.memory import SMEM_PER_BLOCK, Allocation, Buffer
from tests.gluon.memory_model.schedules import Schedule
from tests.gluon.memory_model.values import Tile

MAX_STEPS = 10_000_000
REGISTERS_PER_SM = 65536
MIN_REGISTERS, MAX_REGISTERS, REGISTER_UNIT = 24, 256, 8
"""Registers of a thread that setmaxnreg takes: 24 to 256, in steps of 8 (PTX, setmaxnreg)."""


@dataclass
class Partition:
    """Warps that run one function: one actor, whose threads keep together."""

    actor: int
    name: str
    view: View
    run: greenlet
    products: list[Product] = field(default_factory=list)
    """Asynchronous products in flight, in the order of their issue."""
    stores: list[View] = field(default_factory=list)
    """TMA stores whose shared memory is still read, in the order of their issue."""
    transfers: int = 0
    """Number of TMA loads that the partition has issued."""
    waits_for: tuple[Callable[[], bool], str] | None = None
    """Condition that the partition waits for, and the condition in words with its line."""
    done: bool = False

    def release(self) -> None:
        """Start a new epoch: later writes are not covered by earlier releases."""
        self.view.seen[self.actor] += 1


THREADS_OF_GROUP = 128


@dataclass
class NamedBarrier:
    """A barrier that hardware numbers (PTX, barrier): its arrivals, and what they tell."""

    arrived: int = 0
    """Threads that have arrived, in all phases."""
    view: View = field(default_factory=View)

    def arrive(self, threads: int, full: int, view: View) -> int:
        """Count threads, and return the phase of `full` threads in which they arrive."""
        phase = self.arrived // full
        self.arrived += threads
        self.view.join(view)
        return phase


@dataclass(eq=False)
class Product:
    """An asynchronous product in flight (wgmma): its view, its result, and the registers that it
    reads."""

    view: View
    result: Tile
    accumulates: Tile
    registers: tuple[Tile, ...]
    what: str


@dataclass(eq=False)
class Transfer:
    """A TMA load in flight."""

    name: str
    complete: Callable[[], None]
    view: View
    what: str


class Machine:
    """One program while it runs."""

    def __init__(self, file: str, lines: Sequence[str], schedule: Schedule, told: str) -> None:
        """`file` and `lines` are the kernel's text, `told` what a fault says of the schedule."""
        self.program_id, self.num_programs = 0, 1
        self.steps = 0
        self._file, self._lines, self._told = file, lines, told
        self._schedule = schedule
        self._partitions: list[Partition] = []
        self._transfers: list[Transfer] = []
        self._waited: list[Transfer] = []
        self._barriers: dict[tuple[str, int], Barrier] = {}
        self._named: dict[int, NamedBarrier] = {}
        self._actors = 0
        self._used = 0
        self._main = greenlet.getcurrent()
        self._running: Partition | None = None

    # ----------------------------------------------------------------------------------------------
    # Running

    def run(self, function: Callable[[], Any], num_warps: int) -> None:
        """Run a program to its end. Raises Fault and NotModelled."""
        self._main = greenlet.getcurrent()
        self._warps = num_warps
        self._start("program", function, View())
        try:
            self._go_on()
        finally:
            for partition in self._partitions:
                if not partition.done and partition.run:
                    partition.run.throw(GreenletExit)
        self._check_end()

    def _start(self, name: str, function: Callable[[], Any], view: View) -> Partition:
        def body() -> None:
            try:
                function()
            except (Fault, NotModelled) as error:
                if self._told in str(error):
                    raise
                where = self._place_of(error.__traceback__)
                raise type(error)(f"{name}: {error}{where}; {self._told}") from None
            self._leave(partition)

        self._actors += 1
        partition = Partition(self._actors, name, view, greenlet(body, self._main))
        partition.view.seen[partition.actor] = 1
        self._partitions.append(partition)
        self._schedule.start(name)
        return partition

    def _leave(self, partition: Partition) -> None:
        if partition.products:
            raise self.fault(f"{partition.products[0].what} is not waited for before the end")
        if partition.stores:
            raise self.fault("a TMA store still reads shared memory at the end: store_wait(0)")
        partition.done = True

    def _go_on(self) -> None:
        while True:
            able = [item for item in self._partitions if _is_able(item)]
            options: list[Partition | Transfer] = [*able, *self._transfers]
            if not options:
                if all(item.done for item in self._partitions):
                    return
                raise self._deadlock()
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise Fault(f"no end after {MAX_STEPS} steps; {self._told}")
            item = options[self._schedule.choose([item.name for item in options])]
            if isinstance(item, Transfer):
                self._transfers.remove(item)
                self._waited.append(item)
                item.complete()
                continue
            item.waits_for = None
            self._running = item
            item.run.switch()
            self._running = None

    def _deadlock(self) -> Fault:
        results = ["nothing can go on, and nothing is in flight"]
        for partition in self._partitions:
            if partition.waits_for:
                results.append(f"  {partition.name} {partition.waits_for[1]}")
        results += [f"  {barrier}" for barrier in self._barriers.values()]
        return Fault("\n".join([*results, f"  {self._told}"]))

    def _check_end(self) -> None:
        known = View()
        for partition in self._partitions:
            known.join(partition.view)
        for partition in self._waited:
            if any(
                known.seen.get(actor, 0) < count for actor, count in partition.view.seen.items()
            ):
                raise Fault(f"nobody waits for {partition.what}; {self._told}")

    # ----------------------------------------------------------------------------------------------
    # For the language

    @property
    def me(self) -> Partition:
        """The partition that runs."""
        assert self._running is not None
        return self._running

    def pause(self) -> None:
        """Let others go on, if the schedule likes that here."""
        if self._schedule.anywhere:
            self._main.switch()

    def wait(self, holds: Callable[[], bool], what: str) -> None:
        """Let others go on until something holds."""
        self.me.waits_for = holds, f"waits for {what}{self.place()}"
        self._main.switch()

    def fault(self, message: str) -> Fault:
        """Return a fault of the partition that runs, with its line and the schedule."""
        name = f"{self._running.name}: " if self._running else ""
        return Fault(f"{name}{message}{self.place()}; {self._told}")

    def place(self) -> str:
        """Return the line that runs, as a part of a sentence."""
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        while frame is not None:
            if frame.f_code.co_filename == self._file:
                return self._line(frame.f_lineno)
            frame = frame.f_back
        return ""

    def _place_of(self, trace: TracebackType | None) -> str:
        """Return the innermost line of the kernel of a trace, as a part of a sentence."""
        actual = ""
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self._file:
                actual = self._line(trace.tb_lineno)
            trace = trace.tb_next
        return actual

    def _line(self, number: int) -> str:
        return f" (line {number}: {self._lines[number - 1].strip()})"

    def access(self, buffer: Buffer, *, writes: bool, what: str, by: View | None = None) -> None:
        """Note that the partition that runs, or an operation with a view, reads or writes shared
        memory. Raises Fault."""
        view = self.me.view if by is None else by
        actor = self.me.actor if by is None else max(view.seen)
        new = Access(
            actor, view.seen[actor], writes, by is None, buffer.region, f"{what}{self.place()}"
        )
        buffer.allocation.ledger.note(new, view, self.fault)

    def fork(self) -> View:
        """Return the view of a new asynchronous operation of the partition that runs."""
        view = self.me.view.copy()
        self._actors += 1
        view.seen[self._actors] = 1
        self.me.release()
        return view

    def transfer(self, complete: Callable[[], None], view: View, what: str) -> None:
        """Begin a TMA load, complete whenever the schedule likes."""
        self.me.transfers += 1
        name = f"{self.me.name}, transfer {self.me.transfers}"
        self._transfers.append(Transfer(name, complete, view, what))
        self._schedule.start(name)

    def allocate(self, dtype: Any, shape: Sequence[int], layout: Any) -> Buffer:
        """Return new shared memory. Raises Fault beyond what a program has."""
        allocation = Allocation(self._variable(), dtype, [int(one) for one in shape])
        self._used += allocation.bytes
        if self._used > SMEM_PER_BLOCK:
            raise self.fault(
                f"{self._used} bytes of shared memory are allocated, a program has {SMEM_PER_BLOCK}"
            )
        region = tuple((0, int(one)) for one in shape)
        return Buffer(self, allocation, layout, region, tuple(range(len(shape))))

    def barrier(self, buffer: Buffer) -> Barrier:
        """Return the mbarrier that a view of shared memory holds. Raises Fault where it holds
        several."""
        if buffer.allocation.dtype.primitive_bitwidth != 64:
            raise self.fault(f"{buffer} holds no mbarrier, which has 64 bits")
        sizes = [b - a for a, b in buffer.region]
        if math.prod(sizes) != 1:
            raise self.fault(f"{buffer} holds {math.prod(sizes)} mbarriers, expected one")
        name = str(buffer)
        key = name, id(buffer.allocation)
        if key not in self._barriers:
            self._barriers[key] = Barrier(name)
        return self._barriers[key]

    def named_barrier(self, number: int, threads: int, *, waits: bool) -> None:
        """Arrive at a barrier of all threads of some partitions, and wait for the others of its
        phase if `waits`: bar.sync, or else bar.arrive."""
        barrier = self._named.setdefault(number, NamedBarrier())
        phase = barrier.arrive(THREADS_OF_GROUP, threads, self.me.view)
        self.me.release()
        if waits:
            self.wait(lambda: barrier.arrived >= (phase + 1) * threads, f"bar.sync {number}")
            self.me.view.join(barrier.view)
        else:
            self.pause()

    def specialize(
        self,
        functions: Sequence[tuple[Callable[..., Any], Sequence[Any]]],
        warps: Sequence[int],
        registers: Sequence[int] | None,
    ) -> Any:
        """Run the first function here and each other one in a partition of its own; return what the
        first returns, once all are done."""
        if len(functions) != len(warps) + 1:
            raise self.fault(
                f"{len(functions)} functions and warps of {len(warps)} partitions: expected one "
                "number less than functions"
            )
        self._check_registers(warps, registers)
        me = self.me
        workers: list[Partition] = []
        for i, (function, given) in enumerate(functions[1:]):
            name = f"partition {i + 1} ({function.__name__})"

            def body(function: Any = function, given: Any = given) -> None:
                function(*given)

            workers.append(self._start(name, body, me.view.copy()))
        me.release()
        first, given = functions[0]
        result = first(*given)
        self.wait(lambda: all(worker.done for worker in workers), "the other partitions")
        for worker in workers:
            me.view.join(worker.view)
        return result

    def _check_registers(self, warps: Sequence[int], registers: Sequence[int] | None) -> None:
        if registers is None:
            return
        for register in registers:
            if not MIN_REGISTERS <= register <= MAX_REGISTERS or register % REGISTER_UNIT:
                raise self.fault(f"setmaxnreg takes 24 to 256 in steps of 8, not {register}")
        used = sum(32 * n * r for n, r in zip(warps, registers, strict=True))
        left = (REGISTERS_PER_SM - used) // (32 * self._warps)
        if left < MIN_REGISTERS:
            raise self.fault(
                f"{used} registers of {REGISTERS_PER_SM} go to other partitions, which leaves "
                f"{left} for a thread of the first: at least {MIN_REGISTERS} are needed"
            )

    def _variable(self) -> str:
        """Return the name that the running line assigns an allocation to."""
        text = self.place().rpartition(": ")[2]
        return text.partition("=")[0].strip() or "shared memory"


def _is_able(partition: Partition) -> bool:
    return not partition.done and (partition.waits_for is None or partition.waits_for[0]())
