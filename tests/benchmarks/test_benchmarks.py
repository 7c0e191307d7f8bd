"""The benchmarks without a GPU: catalogue, arithmetic, result files, checks, driver."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import tilegen
from benchmarks import cpu, rows, run
from benchmarks.arithmetic import compulsory_bytes, flops, ideal_seconds, kept_pairs
from benchmarks.call_cost import as_on_a_gpu
from benchmarks.check import Verdict, check, make_inputs
from benchmarks.environment import Environment, start_over
from benchmarks.providers import providers, varlen_window
from benchmarks.run import with_tensors
from benchmarks.workloads import CATALOGUE, HEAD, MASKED, Workload, head
from tests.benchmarks.cases import PROBLEM, a_provider, a_row, a_workload
from tests.support.problems import PROBLEMS
from tilegen.check.peers import flex, sdpa
from tilegen.check.reference import dense_mask, torch_attention
from tilegen.errors import Unsupported
from tilegen.gpus.spec import gpu
from tilegen.masks import parse_mask
from tilegen.problem import AttentionProblem
from tilegen.tuning.measure import DeviceLost, Measurement

H200 = gpu("h200")
TIMED = Measurement(status="ok", median_us=10.0, p20_us=9.0, p80_us=11.0, repeats=10)
RIGHT = Verdict(ok=True, error=0.1, allowed=0.2, detail="")


# --------------------------------------------------------------------------------------------------
# Catalogue and arithmetic


def test_catalogue_names_are_unique_and_head_is_part_of_it() -> None:
    names = [workload.name for workload in CATALOGUE]
    assert len(set(names)) == len(names)
    assert [workload.name for workload in head()] == list(HEAD)


@pytest.mark.parametrize(
    "model",
    [
        *("gpt2", "bert-large", "llama3-8b", "llama3-70b", "mistral-7b", "gemma2", "gpt-oss"),
        *("qwen", "deepseek", "palm", "gemma-7b", "vit", "wan", "prefill", "packed-documents"),
        *("sd-vae", "sdxl-vae"),
    ],
)
def test_catalogue_has_the_model(model: str) -> None:
    results = [workload for workload in CATALOGUE if workload.name.startswith(model)]
    assert results
    assert all(workload.source for workload in results)


def test_tokens_counts_the_whole_batch() -> None:
    (workload,) = [w for w in CATALOGUE if w.name == "packed-documents-32k"]
    assert workload.tokens == 32768


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_kept_pairs_is_the_exact_count(problem: AttentionProblem) -> None:
    dense = dense_mask(problem.mask, problem.seqlen_q, problem.seqlen_kv)
    assert kept_pairs(problem) == int(dense.sum())


def test_flops_and_bytes_by_hand() -> None:
    problem = AttentionProblem.parse("b2 hq4 hkv2 q8 kv8 d16/32 bf16 causal")
    pairs = 8 * 9 // 2
    assert flops(problem, "forward") == 2 * 4 * pairs * (2 * 16 + 2 * 32)
    assert flops(problem, "backward") == 2 * 4 * pairs * (3 * 2 * 16 + 2 * 2 * 32)
    q, k, v, out, lse = 2 * 4 * 8 * 16, 2 * 2 * 8 * 16, 2 * 2 * 8 * 32, 2 * 4 * 8 * 32, 2 * 4 * 8
    assert compulsory_bytes(problem, "forward") == 2 * (q + k + v + out) + 4 * lse
    # q, k, v, out and dout in; dq, dk and dv out.
    backward = 2 * (q + k + v + out + out) + 2 * (q + k + v) + 4 * lse
    assert compulsory_bytes(problem, "backward") == backward


def test_ideal_time_is_bound_by_arithmetic_or_by_memory() -> None:
    by_name = {workload.name: workload.problem for workload in CATALOGUE}
    dense, window = by_name["wan-14b-480p"], by_name["window-128-32k"]
    seconds = ideal_seconds(dense, "forward", H200)
    assert seconds == flops(dense, "forward") / H200.tensor_flops_16
    seconds = ideal_seconds(window, "forward", H200)
    assert seconds == compulsory_bytes(window, "forward") / H200.dram_bandwidth


# --------------------------------------------------------------------------------------------------
# Result files


def test_columns_are_the_fields_in_order_and_end_with_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.csv"
    rows.append(path, a_row())
    header = path.read_text().splitlines()[0].split(",")
    assert header == rows.columns(rows.Row)
    of_environment = [field.name for field in fields(Environment)]
    for row_type in (rows.Row, cpu.Number):
        assert rows.columns(row_type)[-len(of_environment) :] == of_environment


def test_rows_read_back_and_half_a_row_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    rows.append(path, a_row(detail='with "quotes", commas'))
    with path.open("a") as file:
        file.write("w,half a ro")  # a killed run
    rows.append(path, a_row(detail="after"))
    assert [row["detail"] for row in rows.read(path)] == ['with "quotes", commas', "after"]
    assert rows.read(tmp_path / "missing.csv") == []


def test_environment_names_versions_and_command() -> None:
    machine = Environment()
    assert machine.torch == torch.__version__
    assert machine.triton
    assert machine.command.startswith("python")


# --------------------------------------------------------------------------------------------------
# Checks


@pytest.mark.parametrize("rows_first", [False, True])
def test_inputs_have_the_same_values_in_both_layouts(rows_first: bool) -> None:
    plain = make_inputs(PROBLEM, device="cpu")
    other = make_inputs(PROBLEM, device="cpu", rows_first=rows_first)
    assert torch.equal(plain.q, other.q)
    assert other.q.transpose(1, 2).is_contiguous() == rows_first


def results(problem: AttentionProblem, provider: str) -> tuple[dict[str, torch.Tensor], ...]:
    """Return a provider's out, and its gradients, on the inputs the check expects."""
    (items,) = [p for p in providers() if p.name == provider]
    inputs = make_inputs(problem, device="cpu")
    leaves = [tensor.requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
    out = items.prepare(problem, "cpu")(*leaves)
    grads = torch.autograd.grad(out, leaves, inputs.dout)
    return {"out": out}, dict(zip(("dq", "dk", "dv"), grads, strict=True))


KEEPS_SOMETHING_IN_EVERY_ROW = [
    problem
    for problem in PROBLEMS
    if problem.seqlen_q < 1000
    and dense_mask(problem.mask, problem.seqlen_q, problem.seqlen_kv).any(-1).all()
]


@pytest.mark.parametrize("problem", KEEPS_SOMETHING_IN_EVERY_ROW, ids=str)
def test_sdpa_gets_the_right_mask(problem: AttentionProblem) -> None:
    inputs = make_inputs(problem, device="cpu")
    for actual in results(problem, "sdpa-math"):
        verdict = check(problem, inputs, actual)
        assert verdict.ok, verdict.detail


@pytest.mark.parametrize("grid", ["@h:4,16", "@b:4,16", "@bh:4,16"])
def test_each_head_is_checked_against_its_own_part_of_a_mask(grid: str) -> None:
    problem = AttentionProblem.parse(
        f"b2 hq4 hkv2 q70 kv70 d16 fp32 kv_prefix(1)|block_sparse({grid})"
    )
    problem = run.with_tensors(problem, "cpu")
    inputs = make_inputs(problem, device="cpu")
    out = torch_attention(inputs.q, inputs.k, inputs.v, mask=problem.mask)
    verdict = check(problem, inputs, {"out": out})
    assert verdict.ok, verdict.detail
    swapped = torch_attention(
        *(one.flip(0).flip(1) for one in (inputs.q, inputs.k, inputs.v)), mask=problem.mask
    )
    assert not check(problem, inputs, {"out": swapped.flip(0).flip(1)}).ok


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
@pytest.mark.parametrize("batch, head", [(0, 0), (1, -1)])
def test_check_sees_one_wrong_element(name: str, batch: int, head: int) -> None:
    inputs = make_inputs(PROBLEM, device="cpu")
    (out,) = [r for r in results(PROBLEM, "sdpa-math") if name in r]
    out[name] = out[name].detach().clone()
    out[name][batch, head, -1, -1] += 0.01
    verdict = check(PROBLEM, inputs, out)
    assert not verdict.ok
    assert name in verdict.detail


def test_check_sees_a_dropped_mask() -> None:
    full = AttentionProblem.parse("b2 hq4 hkv2 q70 kv70 d16 fp32 full")
    inputs = make_inputs(PROBLEM, device="cpu")
    assert not any(check(PROBLEM, inputs, found).ok for found in results(full, "sdpa-math"))


# --------------------------------------------------------------------------------------------------
# Driver


def test_providers_rotate_and_slow_ones_come_last() -> None:
    order = [
        (case.workload.name, case.provider.name)
        for case in run.cases(
            [a_workload("1"), a_workload("2")],
            [a_provider("a"), a_provider("slow", slow=True), a_provider("b")],
        )
    ]
    assert order == [
        *(("1", "a"), ("1", "b"), ("2", "b"), ("2", "a")),
        *(("1", "slow"), ("2", "slow")),
    ]


def run_driver(path: Path, names: Sequence[str], *, seconds: float = 60.0) -> int:
    todo = run.cases([a_workload(name) for name in names], [a_provider("p")])
    deadline = time.monotonic() + seconds
    return run.run(todo, path, deadline=deadline, seconds=0.1, spec=H200)


def test_driver_writes_rows_and_resumes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []

    def measure(case: run.Case, seconds: float) -> tuple[Verdict, Measurement]:
        measured.append(case.workload.name)
        return RIGHT, TIMED

    monkeypatch.setattr(run, "check_and_time", measure)
    path = tmp_path / "rows.csv"
    assert run_driver(path, ["1", "2"]) == 0
    assert run_driver(path, ["1", "2", "3"]) == 0
    assert measured == ["1", "2", "3"]
    (row, *_) = rows.read(path)
    assert row["status"] == "ok"
    assert float(row["tflops"]) == pytest.approx(flops(PROBLEM, "forward") / 10e-6 / 1e12, rel=1e-3)
    assert float(row["max_error"]) == 0.1
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_driver_starts_nothing_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "check_and_time", lambda *_: (RIGHT, TIMED))
    path = tmp_path / "rows.csv"
    assert run_driver(path, ["1", "2"], seconds=-1.0) == 2
    assert rows.read(path) == []


def test_wrong_results_are_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = Verdict(ok=False, error=3.0, allowed=0.1, detail="out WRONG")
    monkeypatch.setattr(run, "check_and_time", lambda *_: (wrong, TIMED))
    run_driver(tmp_path / "rows.csv", ["1"])
    (row,) = rows.read(tmp_path / "rows.csv")
    assert (row["status"], row["detail"], row["median_us"]) == ("wrong", "out WRONG", "10.0")


@pytest.mark.parametrize(
    "error, status",
    [
        (Unsupported("no such mask"), "unsupported"),
        (RuntimeError("No available kernel. Aborting execution."), "unsupported"),
        (torch.cuda.OutOfMemoryError("tried to allocate 99 GiB"), "out_of_memory"),
        (RuntimeError("unexpected"), "launch_failed"),
        (TypeError("unsupported operand type(s) for |"), "launch_failed"),
    ],
)
def test_failures_are_rows(
    error: Exception, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(case: run.Case, seconds: float) -> tuple[Verdict, Measurement]:
        raise error

    monkeypatch.setattr(run, "check_and_time", fail)
    run_driver(tmp_path / "rows.csv", ["1"])
    (row,) = rows.read(tmp_path / "rows.csv")
    assert row["status"] == status
    assert row["detail"]
    assert row["median_us"] == ""


def test_lost_device_is_a_row_and_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(case: run.Case, seconds: float) -> tuple[Verdict, Measurement]:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(run, "check_and_time", fail)
    monkeypatch.setattr("tilegen.tuning.measure._device_answers", lambda: False)
    with pytest.raises(DeviceLost):
        run_driver(tmp_path / "rows.csv", ["1", "2"])
    (row,) = rows.read(tmp_path / "rows.csv")
    assert row["status"] == "launch_failed"
    assert "illegal memory access" in row["detail"]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(typer.BadParameter, match="llama3-8b-8k"):
        run.named("workload", CATALOGUE, ["llama"])


def test_without_a_gpu_calls_on_the_cpu_are_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[Path | None] = []
    monkeypatch.setattr(run, "has_gpu", lambda: False)
    monkeypatch.setattr(run.cpu_calls, "main", lambda *, out, minutes: called.append(out))
    run.main(csv=tmp_path / "cpu.csv")
    assert called == [tmp_path / "cpu.csv"]
    (line,) = capsys.readouterr().out.splitlines()
    assert "no GPU" in line


# --------------------------------------------------------------------------------------------------
# Providers and CPU benchmarks


@pytest.mark.parametrize(
    "mask, window",
    [
        ("full", (-1, -1)),
        ("causal", (-1, 0)),
        ("causal(bottom_right)", (-1, 0)),
        ("window(127,0)", (127, 0)),
        ("window(5,-1)", (5, -1)),
    ],
)
def test_varlen_window(mask: str, window: tuple[int, int]) -> None:
    problem = AttentionProblem.parse(f"hq1 q64 kv64 d64 bf16 {mask}")
    assert varlen_window(problem) == window


@pytest.mark.parametrize("text", ["q64 kv65 d8 fp16 causal", "q64 d8 fp16 window(9,1)&dilated(2)"])
def test_varlen_refuses_calls_that_it_would_compute_differently(text: str) -> None:
    with pytest.raises(Unsupported):
        varlen_window(AttentionProblem.parse(f"hq1 {text}"))


def test_large_masks_and_scores_are_refused() -> None:
    by_name = {provider.name: provider for provider in providers()}
    window = next(w.problem for w in CATALOGUE if w.name == "window-128-32k")
    with pytest.raises(Unsupported, match="dense mask of 1 GiB"):
        by_name["sdpa-efficient"].prepare(window, "cpu")
    with pytest.raises(Unsupported, match="512 GiB of scores"):
        by_name["sdpa-math"].prepare(window, "cpu")


def test_starting_over_repeats_the_command_for_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda program, command: ran.append(command))
    given = ["-m", "benchmarks.run", "--minutes", "9"]
    monkeypatch.setattr(sys, "orig_argv", ["python", *given])
    start_over(time.monotonic() + 600, "--csv=a.csv")
    ((program, *options, minutes),) = ran
    assert [program, *options] == [sys.executable, *given, "--csv=a.csv"]
    assert 9 < float(minutes.removeprefix("--minutes=")) <= 10


@pytest.mark.slow
def test_hot_path_benchmark_leaves_attention_as_it_was() -> None:
    q = torch.ones(1, 8, 128, 64)
    with as_on_a_gpu(notes=True) as driver:
        tilegen.attention(q, q, q, mask=tilegen.causal())
    assert len(driver.launches) == 1
    assert torch.allclose(tilegen.attention(q, q, q, mask=tilegen.causal()), q)


@pytest.mark.parametrize("peer", [sdpa, flex, with_tensors])
def test_problems_with_scores_are_refused(peer: Callable[..., Any]) -> None:
    """Rather than timed as if they had none."""
    problem = AttentionProblem.parse("hq2 q64 d16 fp32 causal score((k-q)*t0[h]+s,float32)")
    with pytest.raises(Unsupported, match=r"masks only.*score\(\(k-q\)"):
        peer(problem, "cpu")


@pytest.mark.parametrize("workload", MASKED, ids=lambda workload: workload.name)
def test_masked_workloads_can_be_computed(workload: Workload) -> None:
    """At a length that a CPU can do: the mask with typical tensors, and FlexAttention's form."""
    problem = replace(workload.problem, seqlen_q=256, seqlen_kv=256)
    if "neighborhood" in workload.name:
        problem = replace(problem, mask=parse_mask("neighborhood(16x16,5x5)"))
    problem = with_tensors(problem, "cpu")
    keep = dense_mask(problem.mask, 256, 256, heads=problem.num_heads_q)
    assert not problem.mask.is_stand_in
    assert keep.any()
    assert callable(flex(problem, "cpu"))
