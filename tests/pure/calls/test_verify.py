"""The correctness rule itself, on tensors made for it."""

import pytest
import torch

from tests.support import interpreting
from tilegen import cpu
from tilegen.check.sizes import checkable, reduced
from tilegen.check.verification import judge, require, run_device
from tilegen.errors import Unsupported, WrongResult
from tilegen.problem import AttentionProblem

pytestmark = pytest.mark.oldest

EXPECTED = torch.linspace(-1, 1, 9, dtype=torch.float64)


def own(error: float) -> torch.Tensor:
    return (EXPECTED + error).to(torch.float32)


def test_twice_pytorchs_error_is_allowed_and_no_more() -> None:
    assert judge("out", EXPECTED + 0.019, EXPECTED, [own(0.01)]).ok
    assert not judge("out", EXPECTED + 0.021, EXPECTED, [own(0.01)]).ok
    assert judge("out", EXPECTED + 0.021, EXPECTED, [own(0.001), own(0.011)]).ok


def test_rounding_floors_are_added_for_each_element() -> None:
    floor = torch.zeros_like(EXPECTED)
    floor[3] = 0.5
    values = EXPECTED.clone()
    values[3] += 0.519
    assert judge("out", values, EXPECTED, [own(0.01)], floor).ok
    values[4] += 0.021
    check = judge("out", values, EXPECTED, [own(0.01)], floor)
    assert (check.ok, check.index) == (False, (4,))
    assert check.allowed == pytest.approx(0.02, abs=1e-6)


def test_nan_passes_on_neither_side() -> None:
    nan = torch.full_like(EXPECTED, float("nan"))
    assert not judge("dq", nan, EXPECTED, [own(0.01)]).ok
    assert not judge("dq", EXPECTED + 99, EXPECTED, [nan.float()]).ok
    assert not judge("dq", EXPECTED + 0.1, EXPECTED, [nan.float(), own(0.01)]).ok
    assert judge("dq", EXPECTED + 0.01, EXPECTED, [nan.float(), own(0.01)]).ok


def test_equal_infinities_are_equal() -> None:
    lse = EXPECTED.clone()
    lse[3] = float("-inf")
    assert judge("lse", lse.clone(), lse, [lse.float()]).ok
    assert not judge("lse", EXPECTED, lse, [lse.float()]).ok


def test_the_worst_element_is_named() -> None:
    values = EXPECTED.clone()
    values[7] += 5
    check = judge("out", values, EXPECTED, [own(0.0)])
    assert (check.index, check.ok) == ((7,), False)
    assert "WRONG" in str(check)
    with pytest.raises(WrongResult, match=r"worst at \(7,\)"):
        require((check,))


def test_other_shapes_are_wrong() -> None:
    with pytest.raises(WrongResult, match="must have shape"):
        judge("out", EXPECTED.view(3, 3), EXPECTED, [own(9.0)])


def test_reduced_problems_keep_the_kernel() -> None:
    problem = AttentionProblem.parse("b4 hq32 hkv8 q8192 kv100 d192/128 bf16 causal")
    assert reduced(problem, 64).key == "b1 hq4 hkv1 q64 kv64 d192/128 bf16 causal"
    assert reduced(problem).seqlen_kv == 100


def test_large_problems_are_checked_at_a_reduced_size(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large, huge = (
        AttentionProblem.parse(f"hq32 hkv8 {lengths} d64 bf16 causal")
        for lengths in ("q300", "q4096", "q100000")
    )
    assert checkable(small) == small
    assert checkable(large) == reduced(large)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**37, 2**37))
    assert checkable(large) == large
    assert checkable(huge) == reduced(huge)


def test_an_interpreter_that_cannot_work_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 with numpy from 2.4 on; neither alone."""
    versions = {"triton": "3.6.0", "numpy": "2.5.1"}
    monkeypatch.setattr(interpreting, "version", versions.__getitem__)
    message = "needs triton from 3.7 on, or numpy below 2.4; found triton 3.6.0 and numpy 2.5.1"
    assert interpreting.trouble().endswith(message)
    with pytest.raises(Unsupported, match="or numpy below"):
        interpreting.prepare()
    for others in ({"triton": "3.7.0"}, {"numpy": "2.3.9"}):
        monkeypatch.setattr(interpreting, "version", (versions | others).__getitem__)
        assert interpreting.trouble() == ""


def test_where_kernels_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cpu, "why_not_compiled", lambda: "llvmlite is not installed")
    with pytest.raises(Unsupported, match="needs a GPU or the CPU compiler: llvmlite is not"):
        run_device()
