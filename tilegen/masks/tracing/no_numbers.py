"""Functions that compute what is not a number, such as the logarithm of a negative distance.

SymPy takes every value for a number and simplifies by that: `log(x) * 0 == 0` always holds for it.
A function with an operation whose result may be no number is tried on a few pairs, and refused
where PyTorch meets one there and the traced expression says something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.overrides import TorchFunctionMode

from tilegen.errors import Unsupported
from tilegen.masks.language.evaluation import evaluate

MAY_GIVE_NONE = frozenset(
    "log log2 log10 log1p logit xlogy sqrt rsqrt reciprocal pow float_power truediv "  # noqa: SIM905
    "true_divide div divide fmod remainder mod asin arcsin acos arccos acosh arccosh atanh arctanh "
    "lgamma digamma erfinv".split()
)
"""Operations of torch that give no number for some numbers."""
TRIED = (0, 1, 2, 5, 8, 31, 100)
"""Query rows and key columns of the pairs that are tried."""
SCORE = 0.5
"""Score of the pairs that are tried."""


class _Watching(TorchFunctionMode):
    """Notices whether a result is not a number."""

    met = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.is_floating_point():
            self.met |= bool(found.isnan().any())
        return found


def check_numbers(
    fn: Callable[..., Any],
    expr: sympy.Basic,
    captured: Sequence[torch.Tensor],
    *,
    is_score: bool,
) -> None:
    """Raise Unsupported where a traced expression differs from its function because a result is not
    a number. Of scores, only whether they are numbers is compared."""
    device = captured[0].device if captured else torch.device("cpu")
    score = torch.tensor(SCORE, device=device)
    zero = torch.tensor(0, device=device)
    for row in TRIED:
        for column in TRIED:
            q, k = torch.tensor(row, device=device), torch.tensor(column, device=device)
            watching = _Watching()
            try:
                with watching:
                    expected = torch.as_tensor(
                        fn(*[score] * is_score, zero, zero, q, k), device=device
                    )
            except (IndexError, RuntimeError):
                continue  # a table is smaller, or the function takes no tensors of one pair
            if not watching.met:
                continue
            length = max(TRIED) + 1
            found = evaluate(
                expr,
                captured,
                b=zero,
                h=zero,
                q=q,
                k=k,
                s=score if is_score else None,
                seqlen_q=length,
                seqlen_kv=length,
            )
            if is_score:
                expected, found = expected.isnan(), found.isnan()
            if bool(expected) != bool(found):
                raise Unsupported(
                    f"expected a function that computes with numbers: at q_idx {row} and kv_idx "
                    f"{column} PyTorch meets one that is none, and what it gives is not that of "
                    f"{expr}; clamp what is divided by, and the arguments of log, sqrt and the like"
                )
