"""PyTorch's own kernels for a pass: measured, recorded, chosen only where measured to be faster,
and called so that they mean the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

import tilegen
from benchmarks.call_cost import as_on_a_gpu
from benchmarks.providers import providers
from tests.records import UNMEASURED, place, record, timed
from tilegen import api
from tilegen.check.reference import attention_reference, make_inputs
from tilegen.choose import libraries as choosing
from tilegen.choose.known import Known
from tilegen.choose.libraries import BACKENDS, Backend, library_used, why_not
from tilegen.cli import main
from tilegen.errors import InvalidRecord
from tilegen.gpus.spec import ASSUMED, gpu
from tilegen.integrations import flash_backend
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import KERNELS, LARGE_CACHE
from tilegen.kernels.spec import Direction
from tilegen.measure import Measurement
from tilegen.problem import AttentionProblem
from tilegen.runtime import libraries
from tilegen.runtime.changes import Wanted
from tilegen.runtime.libraries import OPERATORS, Library, Operators
from tilegen.store import Versions, current_versions
from tilegen.store.library_record import (
    LibraryRecord,
    library_path,
    library_record,
    save_library,
)
from tilegen.tuning import libraries as tuning
from tilegen.tuning.libraries import LibraryBench, check_library, tune_libraries

pytestmark = pytest.mark.usefixtures("own_cache")

SPEC = gpu(ASSUMED)
PROBLEM = AttentionProblem.parse("b1 hq2 hkv2 q64 kv64 d16 bf16 causal")
FORWARD, BACKWARD = ("fwd",), ("bwd_preprocess", "bwd_dkdv", "bwd_dq")
KERNELS_OF: dict[Direction, tuple[str, ...]] = {"forward": FORWARD, "backward": BACKWARD}


def of_library(us: float = 50.0, **changes: Any) -> LibraryRecord:
    one = LibraryRecord(
        gpu=SPEC.name,
        arch=SPEC.arch,
        direction="forward",
        problem=PROBLEM,
        library="flash",
        measurement=timed(us),
        versions=current_versions(),
        date="2026-11-21T09:30:00Z",
    )
    return replace(one, **changes)


@pytest.fixture
def measured(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting, and records of all kernels of the problem, each of 30 us."""
    monkeypatch.setenv("TILEGEN_LIBRARIES", "1")
    for kernel in (*FORWARD, *BACKWARD):
        config = TileConfig(block_m=32, block_n=32)
        its = record(gpu=SPEC.name, arch=SPEC.arch, kernel=kernel, problem=PROBLEM, config=config,
                     us=30.0, versions=current_versions())  # fmt: skip
        place(own_cache, its)


def used(direction: Direction = "forward", **options: Any) -> LibraryRecord | None:
    return library_used(Known(PROBLEM, SPEC, **options), direction, KERNELS_OF[direction])


# --------------------------------------------------------------------------------------------------
# Records


def test_a_record_names_its_library_and_reads_back() -> None:
    one = of_library()
    file = save_library(one)
    assert file.match("libraries/*/forward/b1_hq2_hkv2_q64_kv64_d16_bf16_causal.json")
    assert library_record(PROBLEM, SPEC, "forward") == one
    assert library_record(PROBLEM, SPEC, "backward") is None
    assert one.config == "library: flash"
    assert json.loads(file.read_text())["library"] == "flash"


@pytest.mark.parametrize(
    "changed",
    [
        {"library": "math"},
        {"schema": 2},
        {"direction": "sideways"},
        {"measurement": {"status": "ok"}},
        {"measurement": vars(UNMEASURED)},
        {"problem": "b1 hq2 q64 d16 bf16 causal"},
        {"versions": {}},
    ],
)
def test_what_a_record_says_is_checked(changed: dict[str, Any]) -> None:
    values = json.loads(of_library().to_json()) | changed
    with pytest.raises(InvalidRecord):
        LibraryRecord.from_json(json.dumps(values))
    save_library(of_library()).write_text(json.dumps(values))
    assert library_record(PROBLEM, SPEC, "forward") is None


def test_a_record_about_something_else_is_passed_over() -> None:
    file = save_library(of_library())
    other = AttentionProblem.parse("b1 hq2 hkv2 q128 kv128 d16 bf16 causal")
    elsewhere = file.parents[3] / library_path(SPEC.name, "forward", other)
    elsewhere.write_text(file.read_text())
    assert library_record(other, SPEC, "forward") is None


# --------------------------------------------------------------------------------------------------
# Which one is used


@pytest.mark.usefixtures("measured")
def test_a_library_is_used_where_it_was_measured_to_be_faster() -> None:
    assert used() is None, "nobody has measured one"
    for us, wins in ((29.9, True), (30.0, False), (31.0, False)):
        save_library(of_library(us))
        assert (used() is not None) == wins, us
    for us, wins in ((89.0, True), (91.0, False)):  # three kernels of 30 us
        save_library(of_library(us, direction="backward"))
        assert (used("backward") is not None) == wins, us


@pytest.mark.usefixtures("measured")
def test_who_asks_is_told_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tilegen cache why`, and rows of the benchmarks."""
    monkeypatch.setattr("tilegen.gpus.spec.detect", lambda *_: SPEC)
    (ours,) = (one for one in providers() if one.name == "tilegen")
    ask = ["cache", "why", PROBLEM.key, "--gpu", SPEC.name]
    for saved in (False, True):
        if saved:
            save_library(of_library(1.0))
        result = CliRunner().invoke(main.app, ask)
        assert result.exit_code == 0, result.output
        assert result.output.count("calls go to library: flash") == int(saved)
        told = json.loads(CliRunner().invoke(main.app, [*ask, "--json"]).output)
        assert {one["kernel"]: one["library"] for one in told} == {
            **dict.fromkeys(BACKWARD, ""), "fwd": "library: flash" if saved else ""
        }  # fmt: skip
        assert ("library: flash" in ours.describe(PROBLEM, "forward")) == saved


@pytest.mark.usefixtures("measured")
def test_it_is_asked_for_and_never_where_choices_must_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_library(of_library(1.0))
    assert used() is not None
    assert used(deterministic=True) is None
    monkeypatch.setenv("TILEGEN_DETERMINISTIC", "1")
    assert used() is None
    monkeypatch.setenv("TILEGEN_DETERMINISTIC", "0")
    monkeypatch.setattr(Known, "agreed", lambda *_: TileConfig(block_m=16, block_n=16))
    assert used() is None
    monkeypatch.undo()
    monkeypatch.delenv("TILEGEN_LIBRARIES", raising=False)
    assert used() is None


def test_kernels_that_nobody_has_timed_lose_to_no_library(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGEN_LIBRARIES", "1")
    save_library(of_library(1.0))
    assert used() is None
    assert not list(own_cache.glob("h*/*/*.json"))


@pytest.mark.usefixtures("measured")
def test_a_kernel_that_nobody_has_timed_leaves_its_pass_to_kernels(own_cache: Path) -> None:
    save_library(of_library(1.0, direction="backward"))
    assert used("backward") is not None
    (own_cache / record(gpu=SPEC.name, kernel="bwd_dq", problem=PROBLEM).path).unlink()
    assert used("backward") is None


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("changed", [{"torch": "2.12.0"}, {"cuda": "11.8"}])
def test_a_record_counts_for_the_torch_that_made_it(changed: dict[str, str]) -> None:
    versions = replace(current_versions(), **changed)
    save_library(of_library(1.0, versions=versions))
    assert used() is None
    other = replace(current_versions(), driver="1.0", tilegen="0.0.1")
    save_library(of_library(1.0, versions=other))
    assert used() is not None


@pytest.mark.parametrize(
    "text, takers",
    [
        ("hq8 q64 d64 bf16 causal", BACKENDS),
        ("hq8 q64 kv256 d64 fp16 full", BACKENDS),
        ("hq8 hkv2 q64 d64 bf16 full", ("cudnn", "flash")),
        ("hq8 q64 kv256 d64 fp16 causal", ()),
        ("hq8 q64 kv256 d64 fp16 causal(bottom_right)", ()),
        ("hq8 q64 d64 bf16 window(9,0)", ()),
        ("hq8 q64 d64 bf16 causal&window(9,0)", ()),
        ("hq8 q64 d64 bf16 causal&kv_prefix(@b:9)", ()),
        ("hq8 q64 d64 bf16 ~causal", ()),
        ("hq8 q64 d64 fp32 causal", ()),
        ("hq8 q64 d64/32 bf16 causal", ()),
        ("hq8 q64 d60 bf16 causal", ()),
        ("hq8 q64 d512 bf16 causal", ()),
        ("hq8 q64 d64 bf16 causal dropout", ()),
        ("hq8 q64 d64 bf16 causal score((k-q)*t0[h]+s,float32)", ()),
    ],
)
def test_libraries_are_asked_only_where_they_mean_the_same(
    text: str, takers: tuple[Backend, ...]
) -> None:
    problem = AttentionProblem.parse(text)
    reasons = {backend: why_not(problem, backend) for backend in BACKENDS}
    assert tuple(one for one in BACKENDS if not reasons[one]) == takers
    assert all(backend in reason for backend, reason in reasons.items() if reason)


# --------------------------------------------------------------------------------------------------
# Measuring


def bench(times: dict[Backend, Measurement], *wrong: Backend) -> LibraryBench:
    trouble = Measurement(status="wrong", message="out WRONG")
    return LibraryBench(
        measure=times.__getitem__, check=lambda one: trouble if one in wrong else None
    )


def test_the_fastest_that_is_right_is_recorded() -> None:
    times: dict[Backend, Measurement] = {
        "cudnn": timed(10.0), "flash": timed(20.0), "efficient": timed(30.0)
    }  # fmt: skip
    for wrong, winner in (((), "cudnn"), (("cudnn",), "flash"), (BACKENDS[:2], "efficient")):
        found = tune_libraries(PROBLEM, SPEC, "forward", bench=bench(times, *wrong))
        assert found is not None
        assert (found.library, found.measurement) == (winner, times[winner])
        assert library_record(PROBLEM, SPEC, "forward") == found
    assert tune_libraries(PROBLEM, SPEC, "backward", bench=bench(times, *BACKENDS)) is None
    assert library_record(PROBLEM, SPEC, "backward") is None


def test_what_a_library_refuses_is_no_time() -> None:
    refused = Measurement(status="launch_failed", message="No available kernel")
    times: dict[Backend, Measurement] = {
        "cudnn": refused, "flash": timed(20.0), "efficient": refused
    }  # fmt: skip
    found = tune_libraries(PROBLEM, SPEC, "backward", bench=bench(times))
    assert found is not None
    assert found.library == "flash"


def test_only_those_that_mean_the_same_are_measured() -> None:
    shared = AttentionProblem.parse("hq8 hkv2 q64 kv64 d64 bf16 causal")
    times: dict[Backend, Measurement] = {"cudnn": timed(10.0), "flash": timed(20.0)}
    assert tune_libraries(shared, SPEC, "forward", bench=bench(times)) is not None
    window = AttentionProblem.parse("hq8 q64 kv64 d64 bf16 window(9,0)")
    assert tune_libraries(window, SPEC, "forward", bench=bench({})) is None


@pytest.mark.parametrize("asked", [False, True])
def test_tuning_measures_libraries_where_asked(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGEN_LIBRARIES", str(int(asked)))
    monkeypatch.setattr("tilegen.gpus.spec.detect", lambda *_: SPEC)
    monkeypatch.setattr("tilegen.tuning.tuner.tune", lambda *_, kernel, **__: kernel)
    measured: list[tuple[str, str]] = []
    monkeypatch.setattr(
        tuning,
        "tune_libraries",
        lambda problem, gpu, direction, command: measured.append((direction, command)),
    )
    assert api.tune(PROBLEM) == list(LARGE_CACHE)
    assert api.tune(PROBLEM, kernel="fwd") == ["fwd"]
    assert api.tune(PROBLEM, kernel="bwd_dq") == ["bwd_dq"]
    command = f"tilegen tune '{PROBLEM}'"
    expected = [("forward", command), ("backward", command), ("forward", command)]
    assert measured == (expected if asked else [])


# --------------------------------------------------------------------------------------------------
# Calling: on a CPU by its own operator, which is made alike


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
    for direction in KERNELS_OF:
        save_library(of_library(1.0, direction=direction))
    x = make_inputs(PROBLEM)
    with as_on_a_gpu(notes=True) as driver:
        found = both(tilegen.causal(), x.q, x.k, x.v, x.dout, scale=scale)
        assert driver.launches == []
    wide = [one.double().requires_grad_() for one in (x.q, x.k, x.v)]
    out, lse = attention_reference(*wide, mask=tilegen.causal(), scale=scale)
    gradients = torch.autograd.grad(out, wide, x.dout.double())
    for one, expected in zip(found, (out, lse, *gradients), strict=True):
        assert one.shape == expected.shape
        torch.testing.assert_close(one.double(), expected, atol=0.03, rtol=0.03)


@pytest.mark.usefixtures("measured", "cpu_flash")
def test_passes_are_chosen_one_by_one() -> None:
    """The backward of tilegen's kernels follows the forward of a library."""
    save_library(of_library(1.0))
    x = make_inputs(PROBLEM)
    with as_on_a_gpu(notes=True) as driver:
        both(tilegen.causal(), x.q, x.k, x.v, x.dout)
    names = [name.split("_d16")[0] for _, name, _ in driver.launches]
    assert names == ["attention_bwd_preprocess", "attention_bwd_dq", "attention_bwd_dkdv"]


@pytest.mark.usefixtures("measured", "cpu_flash")
def test_calls_of_the_bucket_that_mean_something_else_go_to_the_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_library(of_library(1.0))
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


def test_the_gradient_of_lse_is_not_asked_of_a_library(measured: None, cpu_flash: None) -> None:
    for direction in KERNELS_OF:
        save_library(of_library(1.0, direction=direction))
    q = torch.zeros(1, 2, 64, 16, dtype=torch.bfloat16, requires_grad=True)
    with as_on_a_gpu(notes=True) as driver:
        out, lse = tilegen.attention(q, q, q, mask=tilegen.causal(), return_lse=True)
        (out.float().sum() + lse.sum()).backward()
    assert len(driver.launches) == 3


def test_a_refusal_is_said_once_and_computed_all_the_same(
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
    assert [line for line in caplog.messages if "cudnn refused: No available kernel" in line]


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
    found = library.backward((x.q, x.k, x.v, *forward), x.dout, 0.25, wanted)
    assert found is not None
    assert found.dq is not None
    assert found.dq.stride() == x.q.stride()
    assert found.dk is found.dv is None


def test_the_check_finds_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = AttentionProblem.parse("hq2 q40 kv40 d16 bf16 causal")
    for doubled in (False, True):
        monkeypatch.setitem(OPERATORS, "flash", on_cpu(doubled=doubled))
        found = check_library(problem, "forward", "flash", "cpu")
        assert (found is not None) == doubled
    monkeypatch.setitem(OPERATORS, "flash", on_cpu())
    assert check_library(problem, "backward", "flash", "cpu") is None


# --------------------------------------------------------------------------------------------------
# The operators of a GPU, as far as shapes go


@pytest.mark.parametrize("rows", [64, 70])
@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_take_what_they_are_given(backend: Backend, rows: int) -> None:
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
    """What operators of attention are given, by the names in their schemas."""

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
    for one in (forward, backward):
        assert one.get("is_causal", False) is causal
        assert one["scale"] == 0.3
        assert one.get("dropout_p", 0.0) == 0.0
        assert one.get("attn_bias") is None
        assert one["query"] is one["key"] is one["value"] is q
    assert forward.get("compute_log_sumexp", True)
    assert backward["out"] is out
    assert next(iter(backward.values())) is dout
    rows = {"cudnn": (70, 1), "flash": (70,), "efficient": (96,)}
    assert backward["logsumexp"].shape == (2, 4, *rows[backend])


def test_there_are_operators_for_every_back_end() -> None:
    assert tuple(OPERATORS) == BACKENDS == choosing.BACKENDS
    assert set(LARGE_CACHE) <= set(KERNELS)
    assert Versions(torch="2.13.0") != current_versions()
