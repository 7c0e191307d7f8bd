"""Addresses of a loop's next iteration, from where products fetch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tilegen.cpu.ir import REGISTER, Code
from tilegen.cpu.mlir import Block, Op, Value


@dataclass(frozen=True)
class FollowedLoop:
    """A loop that is being written."""

    body: Block
    step: str
    """The step of its counter."""


def following(
    loop: FollowedLoop | None,
    pointer: Value,
    env: dict[Value, Any],
    code: Code,
    lower: Callable[[Op], None],
) -> Any:
    """Return the address that a pointer of a loop's body has in the next iteration; None if it is
    not known yet. `lower` writes an operation and its result to `env`."""
    if loop is None or pointer.block is not loop.body:
        return None
    counter, *carried = loop.body.args
    ends = dict(zip(carried, loop.body.ends, strict=True))
    chain = _chain(pointer, ends, env)
    if chain is None:
        return None
    before = {value: env[value] for value in (*loop.body.args, *(op.result for op in chain))}
    type_ = REGISTER[counter.type.elem]
    next_ = {counter: code.emit(f"add {type_} {env[counter]}, {loop.step}")}
    next_ |= {value: env[end] for value, end in ends.items() if end in env}
    env.update(next_)
    for op in chain:
        lower(op)
    address = env[pointer]
    env.update(before)
    return address


def _chain(
    pointer: Value, ends: Mapping[Value, Value], env: Mapping[Value, Any]
) -> list[Op] | None:
    """Return the operations of a loop's body that a pointer derives from, in order; None if one of
    them is more than arithmetic, or if a value for the next iteration is not known yet."""
    needed: set[int] = set()
    waiting = [pointer]
    while waiting:
        value = waiting.pop()
        if value.block is not pointer.block:
            continue
        if value in ends and ends[value] not in env:
            return None
        op = value.op
        if op is None or id(op) in needed:
            continue
        if op.regions or not op.name.startswith(("arith.", "tt.")) or op.name in _MEMORY:
            return None
        needed.add(id(op))
        waiting += op.operands
    return [op for op in pointer.block.ops if id(op) in needed]


_MEMORY = ("tt.load", "tt.store", "tt.atomic_rmw", "tt.dot", "tt.reduce")
