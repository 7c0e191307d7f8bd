"""The whole idea in one file, `tilegen/examples/mini.py`: its formula, its kernels, its winners."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tilegen.cpu.direct import DirectFunction
from tilegen.examples import mini


def problem(causal: bool, dtype: torch.dtype = torch.float32) -> mini.Problem:
    return mini.Problem(heads=4, group=2, length=200, head_dim=32, dtype=dtype, causal=causal)


@pytest.fixture(autouse=True)
def on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mini, "ON_GPU", False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", [mini.Tile(16, 64), mini.Tile(64, 32), mini.Tile(64, 64)], ids=str)
def test_a_kernel_is_right_and_moves_the_bytes_of_the_formula(
    causal: bool, tile: mini.Tile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def counting(function: Any) -> DirectFunction:
        made.append(DirectFunction(function, mode="count"))
        return made[-1]

    monkeypatch.setattr(mini, "DirectFunction", counting)
    torch.manual_seed(0)
    given = problem(causal)
    q, k, v = mini.inputs(given)
    out = mini.load(given, tile, tmp_path)(q, k, v)
    k, v = (x.double().repeat_interleave(2, dim=1) for x in (k, v))
    scores = q.double() @ k.mT / 32**0.5
    if causal:
        scores += torch.full((200, 200), float("-inf")).triu(1)
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ v, atol=1e-5, rtol=0)
    (compiled,) = made[0]._known.values()
    counted = compiled.traffic.read_bytes + compiled.traffic.write_bytes
    assert counted == mini.traffic(given, tile)


@pytest.mark.slow
def test_only_a_right_kernel_wins_and_the_file_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tile fails to compile and another is wrong; the second run times nothing."""
    given, device = problem(True), mini.Device("here", 2, 2**18, 4e10, 1e10, 1e-6)
    first, second, third, *_ = mini.propose(given, device)
    real = mini.load

    def load(given: mini.Problem, tile: mini.Tile, folder: Path) -> mini.Launch:
        if tile == first:
            raise RuntimeError("out of shared memory")
        launch = real(given, tile, folder)
        return (lambda *qkv: 1.001 * launch(*qkv)) if tile == second else launch

    tried: list[mini.Tile] = []
    monkeypatch.setattr(mini, "load", load)
    monkeypatch.setattr(mini, "seconds_of", lambda run: len(tried) + (tried.append(first) or 0.0))
    assert mini.winner(given, device, tmp_path) == third
    assert json.loads((tmp_path / "winners.json").read_text()) == {
        "h4 n200 d32 group 2 float32 causal on here": {"m": third.m, "n": third.n, "warps": 4}
    }
    monkeypatch.setattr(mini, "load", None)
    assert mini.winner(given, device, tmp_path) == third


def test_its_kernel_compiles_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: list[Any] = []
    monkeypatch.setattr(mini, "DirectFunction", kernels.append)
    mini.load(problem(True, torch.bfloat16), mini.Tile(128, 64), tmp_path)
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")
    source = ASTSource(fn=kernels[0], signature={**pointers, "length": "i32"})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert "wgmma" in compiled.asm["ptx"]
