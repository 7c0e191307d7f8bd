"""Passes computed by PyTorch's own kernels: their arguments and their meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tilegen
from benchmarks.call_cost import as_on_a_gpu
from tests.support.libraries import PROBLEM, save_time
from tilegen.check.reference import attention_reference, make_inputs
from tilegen.integrations import flash_backend
from tilegen.kernels.registry import FAMILIES, KERNELS, LARGE_CACHE
from tilegen.kernels.spec import BACKENDS, Backend
from tilegen.launch import libraries
from tilegen.launch.changes import Wanted
from tilegen.launch.libraries import OPERATORS, Library, Operators
from tilegen.problem import AttentionProblem
from tilegen.store import Versions, current_versions
from tilegen.tuning.libraries import check_library

pytestmark = pytest.mark.usefixtures("own_cache")


# --------------------------------------------------------------------------------------------------
# Calling: on a CPU by PyTorch's operator for it, which has the same form


def on_cpu(*, doubled: bool = False) -> Operators:
    """FlashAttention's operators of the CPU, in fp32; `doubled`, their results twice as large."""

    def forward(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = op(*(one.float() for one in (q, k, v)), 0.0, causal, scale=scale)
        return (2 * out if doubled else out).to(q.dtype), lse

    def backward(dout: Any, *saved: Any) -> Any:
        *tensors, causal, scale = saved
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        wide = (one.float() for one in (dout, *tensors))
        return tuple(one.to(dout.dtype) for one in op(*wide, 0.0, causal, scale=scale))

    return Operators(forward, backward)


@pytest.fixture
def cpu_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(libraries.OPERATORS, "flash", on_cpu())


def both(mask: Any, q: Any, k: Any, v: Any, dout: Any, **options: Any) -> list[torch.Tensor]:
    leaves = [one.detach().requires_grad_() for one in (q, k, v)]
    out, lse = tilegen.attention(*leaves, mask=mask, return_lse=True, **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.usefixtures("measured", "cpu_flash")
@pytest.mark.parametrize("scale", [0.3, -0.3])
def test_a_call_goes_to_the_library_and_means_the_same(scale: float) -> None:
    """Through attention(), forward and backward, while tilegen's own kernels compute nothing."""
    for direction in FAMILIES:
        save_time(1.0, direction)
    x = make_inputs(PROBLEM)
    with as_on_a_gpu(notes=True) as driver:
        actual = both(tilegen.causal(), x.q, x.k, x.v, x.dout, scale=scale)
        assert driver.launches == []
    wide = [item.double().requires_grad_() for item in (x.q, x.k, x.v)]
    out, lse = attention_reference(*wide, mask=tilegen.causal(), scale=scale)
    gradients = torch.autograd.grad(out, wide, x.dout.double())
    for item, expected in zip(actual, (out, lse, *gradients), strict=True):
        assert item.shape == expected.shape
        torch.testing.assert_close(item.double(), expected, atol=0.03, rtol=0.03)


@pytest.mark.slow
@pytest.mark.usefixtures("measured", "cpu_flash")
def test_passes_are_chosen_one_by_one() -> None:
    """The backward of tilegen's kernels follows the forward of a library."""
    save_time(1.0)
    x = make_inputs(PROBLEM)
    with as_on_a_gpu(notes=True) as driver:
        both(tilegen.causal(), x.q, x.k, x.v, x.dout)
    names = [name.split("_d16")[0] for _, name, _ in driver.launches]
    assert names == ["attention_bwd_preprocess", "attention_bwd_dq", "attention_bwd_dkdv"]


@pytest.mark.usefixtures("measured", "cpu_flash")
def test_calls_of_the_bucket_that_mean_something_else_go_to_the_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_time(1.0)
    q = torch.zeros(1, 2, 64, 16, dtype=torch.bfloat16)
    with as_on_a_gpu(notes=True) as driver:
        tilegen.attention(q, q, q, mask=tilegen.causal())
        assert len(driver.launches) == 0
        tilegen.attention(q[:, :, :50], q, q, mask=tilegen.causal())
        assert len(driver.launches) == 1, "top left is not what a library means there"
        torch.use_deterministic_algorithms(True)
        try:
            tilegen.attention(q, q, q, mask=tilegen.causal())
        finally:
            torch.use_deterministic_algorithms(False)
        assert len(driver.launches) == 2


def test_the_gradient_of_lse_is_not_computed_by_a_library(measured: None, cpu_flash: None) -> None:
    for direction in FAMILIES:
        save_time(1.0, direction)
    q = torch.zeros(1, 2, 64, 16, dtype=torch.bfloat16, requires_grad=True)
    with as_on_a_gpu(notes=True) as driver:
        out, lse = tilegen.attention(q, q, q, mask=tilegen.causal(), return_lse=True)
        (out.float().sum() + lse.sum()).backward()
    assert len(driver.launches) == 3


def test_a_failed_library_warns_once_and_the_call_is_computed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def refuse(*_: Any) -> Any:
        asked.append(1)
        raise RuntimeError("No available kernel.\nAborting execution.")

    monkeypatch.setitem(OPERATORS, "cudnn", Operators(refuse, refuse))
    library = Library("cudnn", causal=False)
    q = torch.zeros(1, 1, 4, 8)
    assert library.forward(q, q, q, 1.0) is None
    assert library.forward(q, q, q, 1.0) is None
    assert len(asked) == 1
    assert [
        line
        for line in caplog.messages
        if "cudnn failed; using tilegen's kernels: No available" in line
    ]


def test_memory_that_runs_out_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhaust(*_: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("tried to allocate 9 GiB")

    monkeypatch.setitem(OPERATORS, "cudnn", Operators(exhaust, exhaust))
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        Library("cudnn", causal=False).forward(q, q, q, 1.0)


def test_a_library_that_calls_tilegen_is_answered_by_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As FlashAttention's operators do while `tilegen.activate()` is in force."""
    library = Library("flash", causal=False)
    answers: list[Any] = []

    def again(q: Any, k: Any, v: Any, *_: Any) -> Any:
        answers.append(library.forward(q, k, v, 1.0))
        return q, q[..., 0]

    monkeypatch.setitem(OPERATORS, "flash", Operators(again, again))
    q = torch.zeros(1, 1, 4, 8)
    assert library.forward(q, q, q, 1.0) is not None
    assert answers == [None]
    assert flash_backend.OPERATORS.keys() & {"_flash_attention_forward"}


@pytest.mark.parametrize("heads_inside", [False, True])
def test_results_are_laid_out_as_by_the_kernels(
    heads_inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the layout of q, k and v, whatever a library makes of it."""
    x = make_inputs(PROBLEM, heads_inside=heads_inside)
    turned = on_cpu()

    def other_way(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: tuple(
            one.transpose(-1, -2).contiguous().transpose(-1, -2) if one.ndim == 4 else one
            for one in make(*given)
        )

    monkeypatch.setitem(
        OPERATORS, "flash", Operators(other_way(turned.forward), other_way(turned.backward))
    )
    library = Library("flash", causal=True)
    forward = library.forward(x.q, x.k, x.v, 0.25)
    assert forward is not None
    assert forward[0].stride() == x.q.stride()
    assert forward[1].is_contiguous()
    wanted = Wanted(dq=True, dkdv=False, sinks=False, captured=())
    grads = library.backward((x.q, x.k, x.v, *forward), x.dout, 0.25, wanted)
    assert grads is not None
    assert grads.dq is not None
    assert grads.dq.stride() == x.q.stride()
    assert grads.dk is grads.dv is None


def test_the_check_finds_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = AttentionProblem.parse("hq2 q40 kv40 d16 bf16 causal")
    for doubled in (False, True):
        monkeypatch.setitem(OPERATORS, "flash", on_cpu(doubled=doubled))
        actual = check_library(problem, "forward", "flash", "cpu")
        assert (actual is not None) == doubled
    monkeypatch.setitem(OPERATORS, "flash", on_cpu())
    assert check_library(problem, "backward", "flash", "cpu") is None


# --------------------------------------------------------------------------------------------------
# The operators of a GPU, as far as shapes go


@pytest.mark.parametrize("rows", [64, 70])
@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_use_their_arguments(backend: Backend, rows: int) -> None:
    """By their schemas and shapes, on tensors without data."""
    made = {"dtype": torch.bfloat16, "device": "meta"}
    q, k, v, dout = (torch.empty(2, 4, rows, 64, **made) for _ in range(4))
    out, lse = OPERATORS[backend].forward(q, k, v, True, 0.125)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]
    assert lse.dtype == torch.float32
    gradients = OPERATORS[backend].backward(dout, q, k, v, out, lse, True, 0.125)
    assert [one.shape for one in gradients] == [q.shape, k.shape, v.shape]


class Given(TorchDispatchMode):
    """Arguments of attention operators, by the names in their schemas."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, dict[str, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith("aten::_scaled_dot_product"):
            names = [one.name for one in func._schema.arguments]
            self.seen[func._schema.name] = dict(zip(names, args, strict=False)) | (kwargs or {})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_are_given_mask_scale_and_lse(backend: Backend, causal: bool) -> None:
    q, dout, out = (torch.empty(2, 4, 70, 64, dtype=torch.bfloat16, device="meta") for _ in "qdo")
    lse = torch.empty(2, 4, 70, device="meta")
    with Given() as given:
        OPERATORS[backend].forward(q, q, q, causal, 0.3)
        OPERATORS[backend].backward(dout, q, q, q, out, lse, causal, 0.3)
    forward, backward = given.seen.values()
    for operator in (forward, backward):
        assert operator.get("is_causal", False) is causal
        assert operator["scale"] == 0.3
        assert operator.get("dropout_p", 0.0) == 0.0
        assert operator.get("attn_bias") is None
        assert operator["query"] is operator["key"] is operator["value"] is q
    assert forward.get("compute_log_sumexp", True)
    assert backward["out"] is out
    assert next(iter(backward.values())) is dout
    rows = {"cudnn": (70, 1), "flash": (70,), "efficient": (96,)}
    assert backward["logsumexp"].shape == (2, 4, *rows[backend])


def test_there_are_operators_for_every_back_end() -> None:
    assert tuple(OPERATORS) == BACKENDS
    assert set(LARGE_CACHE) <= set(KERNELS)
    assert Versions(torch="2.13.0") != current_versions()
