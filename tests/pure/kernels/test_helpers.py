"""Functions of emitted kernels, with parameters computed from their lines."""

from __future__ import annotations

import ast

from tilegen.emit.helpers import WIDTH, Helper

BODY = """\
if MASKED:
    k_exists = tile_n * BLOCK_N + offs_n < seqlen_kv
    k = tl.load(k_tile + k_offs, mask=k_exists[:, None], other=0.0)
else:
    k = tl.load(k_tile + k_offs)
for d_first in range(0, HEAD_DIM_QK, BLOCK_D):
    s += _product(q, k, d_first, float("inf"))
total = total * s
"""


def test_parameters_are_the_names_that_are_read_first_those_that_are_returned() -> None:
    step = Helper("_step", "Add a tile.", "total, fresh", BODY)
    assert step.parameters == [
        *("total", "tile_n", "offs_n", "seqlen_kv", "k_tile", "k_offs", "q", "s"),
    ]
    assert step.call(True) == (
        "total, fresh = _step(total, tile_n, offs_n, seqlen_kv, k_tile, k_offs, q, s, MASKED=True)"
    )
    lines = step.definition.splitlines()
    assert lines[0] == "@triton.jit"
    assert lines[2] == '    """Add a tile."""'
    assert lines[-1] == "    return total, fresh"
    (function,) = ast.parse(step.definition).body
    assert isinstance(function, ast.FunctionDef)
    assert [one.arg for one in function.args.args] == [*step.parameters, "MASKED"]


def test_a_constant_is_a_parameter_only_if_read() -> None:
    step = Helper("_twice", "Double x.", "y", "y = 2 * x")
    assert (
        step.definition
        == '@triton.jit\ndef _twice(x):\n    """Double x."""\n    y = 2 * x\n    return y\n'
    )
    assert step.call(False) == "y = _twice(x)"


def test_long_lists_are_wrapped() -> None:
    names = [f"argument_{i}" for i in range(30)]
    step = Helper("_sum", "Add all.", "y", f"y = {' + '.join(names)}")
    for text, indent in ((step.definition, 0), (step.call(False, 8), 8)):
        lines = [line for line in text.splitlines() if "=" not in line or "(" in line]
        assert all(indent + len(line) <= WIDTH for line in lines)
        ast.parse(text)
