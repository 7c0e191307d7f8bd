"""A simpler problem that fails in the same way."""

from __future__ import annotations

import ast
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.differential.problems import DENSE, PLAIN, Problem, reads

SECONDS = 120.0
TRIES = 300


def shrink(problem: Problem, fails: Callable[[Problem], bool]) -> Problem:
    """Return the simplest problem found for which `fails` holds still."""
    deadline, tried, at = time.monotonic() + SECONDS, {str(problem)}, 0
    while len(tried) < TRIES and time.monotonic() < deadline:
        new = [one for one in simpler(problem) if str(one) not in tried]
        if not new:
            break
        at %= len(new)  # not from the start: what was of no use to the last will be of none to this
        tried.add(str(new[at]))
        if fails(new[at]):
            problem = new[at]
    return problem


def simpler(problem: Problem) -> Iterator[Problem]:
    """Yield problems with one thing less, the largest steps first."""
    for changes in _steps(problem):
        candidate = replace(problem, **changes)
        if candidate.requests:
            requests = candidate.requests[: candidate.batch]
            most = candidate.rows, candidate.columns
            requests = tuple((min(q, most[0]), min(k, most[1])) for q, k in requests)
            candidate = replace(candidate, batch=len(requests), requests=requests)
        texts = f"{candidate.keeps} {candidate.score}"
        tables = reads(texts, candidate.tables)
        trained = tuple(name for name in candidate.trained if name in tables)
        candidate = replace(candidate, tables=tables, trained=trained)
        if candidate != problem:
            yield candidate


def _steps(problem: Problem) -> Iterator[dict[str, Any]]:
    yield {"score": "", "trained": ()}
    yield {"mask": "full()"}
    yield {"kv_lengths": ""}
    yield {"invariant": False}
    yield {"backward": False, "trained": (), "trains_lse": False}
    yield {"changed": False}
    yield {"call": "attention", "requests": (), "page": 0, "configs": PLAIN}
    yield {"compiled": False}
    yield {"dropout": 0.0}
    yield {"latent": False}
    if not problem.page:
        yield {"configs": PLAIN}
    yield {"configs": {name: PLAIN.get(name, key) for name, key in problem.configs.items()}}
    yield {"batch": 1, "heads": 1, "heads_kv": 1}
    yield {"batch": 1}
    yield {"requests": problem.requests[1:] or problem.requests}
    yield {"heads": problem.heads_kv}
    yield {"heads": problem.heads // problem.heads_kv, "heads_kv": 1}
    for share in (8, 4, 2):
        yield {"rows": -(-problem.rows // share), "columns": -(-problem.columns // share)}
        yield {"rows": -(-problem.rows // share)}
        yield {"columns": -(-problem.columns // share)}
    yield {"layouts": DENSE}
    yield {"dtype": "fp32"}
    yield {"head_dim": 16, "head_dim_v": 16}
    yield {"head_dim": 8, "head_dim_v": 8}
    yield {"scale": None}
    yield {"trains_lse": False}
    yield {"trained": problem.trained[1:]}
    yield {"trained": problem.trained[:-1]}
    for name in ("mask", "score"):
        for text in _shorter(getattr(problem, name)):
            yield {name: text}
    yield {"rows": max(1, problem.rows - 1), "columns": max(1, problem.columns - 1)}
    yield {"rows": max(1, problem.rows - 1)}
    yield {"columns": max(1, problem.columns - 1)}
    yield {"seed": 0}


def _shorter(text: str) -> Iterator[str]:
    """Yield texts in which one expression is one of its parts, or a small constant."""
    if not text:
        return
    tree = ast.parse(text, mode="eval")
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.expr)]
    seen = {ast.unparse(tree)}
    for at, node in enumerate(nodes):
        for new in _parts(node):
            changed = copy.deepcopy(tree)
            target = [one for one in ast.walk(changed) if isinstance(one, ast.expr)][at]
            shorter = ast.unparse(_Swap(target, new).visit(changed))
            if shorter not in seen and len(shorter) < len(text):
                seen.add(shorter)
                yield shorter


def _parts(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.Lambda() | ast.Name() | ast.Attribute():
            return
        case ast.Constant(value=int() as value) if value not in (0, 1, 2):
            yield ast.Constant(2)
            yield ast.Constant(value // 2)
        case ast.Constant():
            return
        case ast.Call(func=ast.Attribute(value=inner), args=args):
            yield from (inner, *args)
        case ast.Call(args=args) if isinstance(node.func, ast.Name) and node.func.id in (
            "predicate",
            "score",
        ):
            return
        case _:
            children = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
            yield from children
            # A part of a part: the operators between them do not matter.
            for child in children:
                yield from (one for one in ast.iter_child_nodes(child) if isinstance(one, ast.expr))
    if not isinstance(node, ast.Constant):
        yield ast.Name("q")
        yield ast.Name("k")
        yield ast.Constant(1)


class _Swap(ast.NodeTransformer):
    """Replaces one node by another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        """`old` is a node of the tree that is visited."""
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> Any:
        """Return the node or its replacement."""
        return self._new if node is self._old else self.generic_visit(node)
