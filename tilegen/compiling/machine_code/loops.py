"""Loops of a kernel: natural loops of its control-flow graph, as every compiler book defines them.

Code that a loop jumps to and comes back from, such as a wait that is tried again, belongs to the
loop wherever the assembler put it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx

from tilegen.compiling.machine_code.instructions import Instruction


@dataclass(frozen=True)
class MachineLoop:
    """One loop, without the instructions of the loops inside of it."""

    first: int
    """The first instruction of the loop, counted from 0."""
    depth: int
    """Number of loops around this one."""
    instructions: tuple[Instruction, ...]


def loops_of(code: Sequence[Instruction]) -> list[MachineLoop]:
    """Return the loops of a function in the order of their first instructions."""
    graph, blocks = _flow(code)
    if not blocks:
        return []
    dominator = nx.immediate_dominators(graph, 0)
    reached = {0, *nx.descendants(graph, 0)}
    bodies: dict[int, set[int]] = {}
    for tail, head in graph.edges:
        if tail in reached and _dominates(dominator, head, tail):
            before = graph.subgraph(set(graph) - {head}) if tail != head else graph
            body = {head, tail} if tail == head else {head, tail, *nx.ancestors(before, tail)}
            bodies.setdefault(head, set()).update(body & reached)
    loops = []
    for head, body in sorted(bodies.items()):
        inner = [other for at, other in bodies.items() if at != head and at in body]
        own = sorted(body.difference(*inner))
        picked = tuple(code[i] for block in own for i in range(block, blocks[block]))
        depth = sum(at != head and head in other for at, other in bodies.items())
        if len(picked) > 1:  # a program that has ended jumps to itself
            loops.append(MachineLoop(head, depth, picked))
    return loops


def _dominates(dominator: dict[int, int], head: int, block: int) -> bool:
    while block != head and dominator.get(block, block) not in (block, None):
        block = dominator[block]
    return block == head


def _flow(code: Sequence[Instruction]) -> tuple[nx.DiGraph[int], dict[int, int]]:
    """Return the control-flow graph, whose nodes are first instructions of basic blocks, and where
    each block ends."""
    starts = {0, *(instruction.target for instruction in code if instruction.target is not None)}
    for i, instruction in enumerate(code):
        if instruction.target is not None or not instruction.falls_through:
            starts.add(i + 1)
    order = sorted(at for at in starts if at < len(code))
    blocks = dict(zip(order, [*order[1:], len(code)], strict=True))
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(blocks)
    for block, end in blocks.items():
        last = code[end - 1]
        if last.target is not None:
            graph.add_edge(block, last.target)
        if last.falls_through and end < len(code):
            graph.add_edge(block, end)
    # Jumps through registers lead to the parts of a kernel that its warps divide among themselves.
    # Such a part may begin with a loop that waits for registers.
    unreached = [block for block in blocks if block and not {*graph.predecessors(block)} - {block}]
    for block, end in blocks.items():
        if code[end - 1].scatters:
            graph.add_edges_from((block, other) for other in unreached)
    return graph, blocks
