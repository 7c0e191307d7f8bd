"""Kernels compiled ahead of time: later calls compile nothing, in this process and in others."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tilegen
from benchmarks.call_cost import as_on_a_gpu
from tilegen import cpu
from tilegen.bounded_cache import BoundedCache
from tilegen.cli.main import app
from tilegen.cpu import build
from tilegen.emit import kernel_files
from tilegen.errors import InvalidProblem, Unsupported
from tilegen.launch import triton_run
from tilegen.runtime import plans

DECODE = "hq4 hkv2 q1 kv512 d16 fp32 causal(bottom_right)"
PROMPT = "hq4 hkv2 q64 d16 fp32 causal"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "cache"))
    forget(monkeypatch)
    yield
    plans.forget()


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave of earlier calls what a new process would find: files."""
    plans.forget()
    monkeypatch.setattr(cpu, "_kernels", BoundedCache(99))
    monkeypatch.setattr(kernel_files, "_modules", BoundedCache(99))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels compiled so far."""
    names: list[str] = []
    compile_ = build.compiled

    def noted(source: Any, *given: Any) -> Any:
        names.append(source.name)
        return compile_(source, *given)

    monkeypatch.setattr(build, "compiled", noted)
    return names


def decode(length: int) -> None:
    q, (k, v) = torch.randn(1, 4, 1, 16), torch.randn(2, 1, 2, length, 16).unbind()
    out = tilegen.attention(q, k, v, mask=tilegen.causal("bottom_right"))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(out, expected)


def train(length: int) -> None:
    q = torch.randn(1, 4, length, 16, requires_grad=True)
    k, v = torch.randn(2, 1, 2, length, 16).unbind()
    out = tilegen.attention(q, k, v, mask=tilegen.causal())
    (grad,) = torch.autograd.grad(out.sum(), [q])
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), [q])[0])


def test_a_new_length_compiles_nothing_up_to_the_next_power_of_two(compiled: list[str]) -> None:
    decode(1025)
    before = len(compiled)
    for length in (1026, 1500, 2048):
        decode(length)
    assert len(compiled) == before
    decode(2049)
    assert len(compiled) > before


@pytest.mark.slow
def test_lengths_compiled_ahead_compile_nothing_in_calls(compiled: list[str]) -> None:
    buckets = tilegen.warm(DECODE, range(1, 2200))
    assert [bucket.seqlen_kv for bucket in buckets] == [2**i for i in range(13)]
    assert {bucket.seqlen_q for bucket in buckets} == {1}
    before = len(compiled)
    assert before
    for length in (*range(1, 40), 513, 1024, 1025, 2048, 2049, 2199):
        decode(length)
    assert len(compiled) == before


@pytest.mark.slow
def test_a_command_compiles_for_later_processes(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    catalog = tmp_path / "problems"
    catalog.write_text(PROMPT)
    words = ["warm", "--catalog", str(catalog), "--lengths", "1..300", "--backward"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.stdout.splitlines()[0] == "b1 hq4 hkv2 q1 kv1 d16 fp32 causal"
    assert "10 buckets of lengths are compiled" in result.stdout
    before = len(compiled)
    assert before
    forget(monkeypatch)
    for length in (1, 2, 17, 64, 65, 200, 300):
        train(length)
    assert len(compiled) == before


def test_pages_are_compiled_ahead(compiled: list[str]) -> None:
    tilegen.warm("b2 hq4 hkv2 q1 kv64 d16 fp32 page16")
    before = len(compiled)
    assert before
    q, pages = torch.randn(2, 4, 1, 16), torch.randn(8, 16, 2, 16)
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    tilegen.attention_paged(q, pages, pages.clone(), table, torch.tensor([50, 64]).int())
    assert len(compiled) == before


def test_invariant_calls_are_compiled_ahead(compiled: list[str]) -> None:
    with tilegen.settings(batch_invariant=True):
        (bucket,) = tilegen.warm(DECODE, [5, 5000])
        assert bucket.invariant
        before = len(compiled)
        decode(700)
    assert len(compiled) == before


def test_each_compilation_and_each_choice_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="tilegen")
    for _ in range(2):
        tilegen.warm(PROMPT)
    told = {level: [] for level in ("INFO", "DEBUG")}
    for record in caplog.records:
        if record.name == "tilegen":
            told[record.levelname].append(record.message)
    (line,) = told["INFO"]
    assert line.startswith("compiled attention_fwd_d16_causal_")
    assert line.endswith(" s")
    (line,) = told["DEBUG"]
    assert line.startswith("fwd for 'b1 hq4 hkv2 q64 kv64 d16 fp32 causal': TileConfig(")
    assert line.endswith(", from the model")


def test_a_gpu_launches_each_kernel_once_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    compiled_for = triton_run.compiled_for

    def noted(*given: Any) -> Any:
        compiled.append(given)
        return compiled_for(*given)

    monkeypatch.setattr(triton_run, "compiled_for", noted)
    with as_on_a_gpu():
        tilegen.warm("hq2 q64 d16 bf16 causal", "40..64", backward=True)
        before = len(compiled)
        assert before
        q, k, v = torch.zeros(3, 1, 2, 50, 16).bfloat16().requires_grad_().unbind()
        tilegen.attention(q, k, v, mask=tilegen.causal()).sum().backward()
        assert len(compiled) == before


@pytest.mark.parametrize("lengths", ["1-9", "", [0], [1.5], [], range(1, 10**6), "1..999999999"])
def test_lengths_that_are_none_are_refused(lengths: Any) -> None:
    with pytest.raises(InvalidProblem, match="lengths"):
        tilegen.warm(DECODE, lengths)


def test_where_pytorch_computes_there_is_nothing_to_compile(compiled: list[str]) -> None:
    with tilegen.settings(cpu="torch"):
        assert tilegen.warm(DECODE) == []
        result = CliRunner().invoke(app, ["warm", DECODE])
    assert isinstance(result.exception, Unsupported)
    assert "TILEGEN_CPU=torch is set" in str(result.exception)
    assert not compiled
