"""Bundles on the GPU: served from cubins alone, right, in streams, graphs and threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tilegen
from benchmarks.check import check, make_inputs
from tests.support.calls import taking
from tests.support.problems import PROBLEMS
from tilegen import bundles, pipeline
from tilegen.bundles.building import generate
from tilegen.bundles.served import Bundle
from tilegen.check.reference import attention_reference
from tilegen.emit.identity import rows_are_aligned
from tilegen.errors import Unsupported
from tilegen.gpus.spec import detect
from tilegen.problem import AttentionProblem
from tilegen.runtime import plans

pytest.importorskip("cuda.bindings.driver", reason="needs NVIDIA's package cuda-bindings")

CAUSAL = AttentionProblem.parse("b2 hq8 hkv2 q1000 kv1000 d128 bf16 causal")
SMALL_CACHE = AttentionProblem.parse("b1 hq4 hkv2 q600 kv700 d512 bf16 causal")
BUNDLED = (CAUSAL, SMALL_CACHE, *PROBLEMS[::4])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = detect()
    assert spec
    out = tmp_path_factory.mktemp("bundle")
    generate(BUNDLED, [spec], out)
    return out


@pytest.fixture
def bundle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bundle]:
    """Load the bundle, and have every other way fail."""
    loaded = tilegen.load_bundle(folder)
    monkeypatch.setattr(pipeline, "choose", lambda *_, **__: pytest.fail("not from the bundle"))
    yield loaded
    bundles.loaded.clear()
    plans.forget()


@pytest.mark.parametrize("problem", BUNDLED, ids=str)
def test_served_results_keep_the_rule(problem: AttentionProblem, bundle: Bundle) -> None:
    inputs = make_inputs(problem)
    q, k, v = (x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out = tilegen.attention(q, k, v, mask=problem.mask)
    gradients = torch.autograd.grad(out, (q, k, v), inputs.dout)
    for actual in ({"out": out}, dict(zip(("dq", "dk", "dv"), gradients, strict=True))):
        verdict = check(problem, inputs, actual)
        assert verdict.ok, verdict.detail


def test_the_cubins_agree_with_triton(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same source, same config: same bits."""
    inputs = make_inputs(CAUSAL)
    q, k, v = inputs.q, inputs.k, inputs.v
    served, lse = tilegen.attention(q, k, v, mask=CAUSAL.mask, return_lse=True)
    bundle.unload()
    (binary,) = bundle.find(CAUSAL, detect(), "forward", aligned=True)  # type: ignore
    monkeypatch.undo()  # kernels may be chosen again
    monkeypatch.setattr(pipeline, "rank", taking(binary.config))
    compiled, compiled_lse = tilegen.attention(q, k, v, mask=CAUSAL.mask, return_lse=True)
    assert torch.equal(served, compiled)
    assert torch.equal(lse, compiled_lse)


def test_streams_graphs_and_threads(bundle: Bundle) -> None:
    inputs = make_inputs(CAUSAL)
    q, k, v = inputs.q, inputs.k, inputs.v
    expected = tilegen.attention(q, k, v, mask=CAUSAL.mask)
    torch.cuda.synchronize()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        aside = tilegen.attention(q, k, v, mask=CAUSAL.mask)
    stream.synchronize()
    assert torch.equal(aside, expected)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tilegen.attention(q, k, v, mask=CAUSAL.mask)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)

    results: list[torch.Tensor] = []
    threads = [
        threading.Thread(
            target=lambda: results.append(tilegen.attention(q, k, v, mask=CAUSAL.mask))
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(results) == 8
    assert all(torch.equal(one, expected) for one in results)


def test_addresses_that_are_not_aligned_go_the_usual_way(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rows_are_aligned(CAUSAL)
    asked: list[object] = []
    monkeypatch.undo()
    choose = pipeline.choose
    monkeypatch.setattr(pipeline, "choose", lambda *a, **b: asked.append(a) or choose(*a, **b))
    q = torch.randn(1, 8, 100, 129, device="cuda", dtype=torch.bfloat16)[..., 1:]
    k = torch.randn(1, 2, 100, 128, device="cuda", dtype=torch.bfloat16)
    out = tilegen.attention(q, k, k, mask=CAUSAL.mask)
    expected, _ = attention_reference(q.float(), k.float(), k.float(), mask=CAUSAL.mask)
    assert asked
    assert (out - expected).abs().max() < 0.05


SERVE = """
import sys
import torch
import tilegen
tilegen.load_bundle(sys.argv[1])
q, k, v = (
    torch.randn(1, h, 300, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for h in (8, 2, 2)
)
out = tilegen.attention(q, k, v, mask=tilegen.causal())
out.sum().backward()
torch.cuda.synchronize()
print(bool(q.grad.isfinite().all()), *sorted({"triton", "jinja2", "sympy"} & set(sys.modules)))
"""


def test_serving_loads_no_compiler(folder: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-c", SERVE, str(folder)], capture_output=True, text=True, check=True
    ).stdout
    assert said.split() == ["True"]


def test_another_architecture_is_refused(tmp_path: Path, folder: Path) -> None:
    other = "sm_80" if torch.cuda.get_device_capability()[0] >= 9 else "sm_90"
    own = detect()
    assert own
    text = (folder / "manifest.json").read_text().replace(f'"{own.arch}', f'"{other}')
    for path in folder.rglob("*.*"):
        to = tmp_path / str(path.relative_to(folder)).replace(own.arch, other)
        to.parent.mkdir(exist_ok=True)
        to.write_bytes(text.encode() if path.name == "manifest.json" else path.read_bytes())
    with pytest.raises(Unsupported, match=f"generate with --arch {own.arch}"):
        tilegen.load_bundle(tmp_path)
