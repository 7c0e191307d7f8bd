"""`attention` served from a bundle computes what the reference does, forward and backward.

The driver's place is taken by the compiler for the CPU: it compiles the bundle's own source, which
runs on arguments read back from the memory that the driver would read.
"""

import importlib.util
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tilegen
from tests.support.bundles import StandIn, write_bundle
from tests.support.calls import gpu_road
from tilegen import bundles
from tilegen.bundles.manifest import Binary
from tilegen.bundles.served import Bundle
from tilegen.check.reference import TORCH_DTYPES, attention_reference
from tilegen.cpu.direct import DirectFunction
from tilegen.gpus.spec import gpu
from tilegen.launch.changes import Changes
from tilegen.masks import Mask
from tilegen.masks.dropout import Dropout
from tilegen.masks.score import Score
from tilegen.problem import AttentionProblem
from tilegen.runtime.call import problem_of

ELEMENTS = {"*i32": torch.int32, "*i64": torch.int64, "*u8": torch.uint8}
TABLE = torch.linspace(-1, 1, 4 * 61).reshape(4, 61).requires_grad_()
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True)
CASES: dict[str, tuple[str, Mask, Score | None]] = {
    "whole heads": ("b2 hq4 hkv2 q70 kv133 d40/24 fp32", tilegen.causal("bottom_right"), None),
    "half precision": ("b1 hq4 hkv1 q100 d64 fp16", tilegen.sliding_window(30, 5), None),
    "small cache": ("b1 hq2 hkv1 q40 kv70 d512 fp32", tilegen.causal(), None),
    "values of a mask": (
        "b2 hq4 hkv2 q90 d16 fp32",
        tilegen.causal() & tilegen.kv_lengths(torch.tensor([90, 31])),
        None,
    ),
    "lists of tiles": (
        "b1 hq4 hkv2 q90 d16 fp32",
        tilegen.block_sparse(
            torch.rand(3, 3, generator=torch.Generator().manual_seed(0)) > 0.4, 32
        ),
        None,
    ),
    "trained table": ("b1 hq4 hkv2 q70 d16 fp32", tilegen.causal(), tilegen.relative_bias(TABLE)),
    "sinks": (
        "b1 hq4 hkv2 q70 d16 fp32",
        tilegen.causal(),
        tilegen.softcap(5.0).then(tilegen.sinks(SINKS)),
    ),
    "dropout": ("b1 hq4 hkv2 q70 d16 fp32", tilegen.causal(), None),
}


class Driver:
    """Runs the launches of bundles."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.tensors: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def function(self, bundle: Bundle, binary: Binary) -> StandIn:
        """Stand for `Bundle.function`."""
        source = imported(bundle.path / binary.source)
        kernel = DirectFunction(getattr(source, binary.function))
        given = [type_ for name, type_ in binary.arguments if not name.startswith("scratch")]

        def run(grid: int, values: list[Any]) -> None:
            arguments = [
                self.tensors[value, ELEMENTS.get(type_) or TORCH_DTYPES[type_[1:]]]
                if type_.startswith("*")
                else value
                for value, type_ in zip(values, given, strict=False)
            ]
            self.launched.append(binary.kernel)
            kernel[(grid,)](*arguments)

        return StandIn(binary, run)


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    data_ptr = torch.Tensor.data_ptr

    def note_tensor(tensor: torch.Tensor) -> int:
        made.tensors[data_ptr(tensor), tensor.dtype] = tensor
        return data_ptr(tensor)

    monkeypatch.setattr(torch.Tensor, "data_ptr", note_tensor)
    monkeypatch.setattr(Bundle, "function", lambda bundle, tensor: made.function(bundle, tensor))
    with gpu_road():
        yield made
        bundles.loaded.clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_bundle_agrees_with_the_reference(name: str, driver: Driver, tmp_path: Path) -> None:
    text, mask, score = CASES[name]
    asked = AttentionProblem.parse(text)
    dtype = TORCH_DTYPES[asked.dtype]

    def leaf(heads: int, rows: int, dim: int, seed: int) -> torch.Tensor:
        drawn = torch.Generator().manual_seed(seed)
        shape = (asked.batch, heads, rows, dim)
        return torch.randn(shape, generator=drawn).to(dtype).requires_grad_()

    q = leaf(asked.num_heads_q, asked.seqlen_q, asked.head_dim_qk, 0)
    k = leaf(asked.num_heads_kv, asked.seqlen_kv, asked.head_dim_qk, 1)
    v = leaf(asked.num_heads_kv, asked.seqlen_kv, asked.head_dim_v, 2)
    torch.manual_seed(4)
    dropout = Dropout.drawn(0.4, q.device) if name == "dropout" else None
    problem = problem_of(q, k, v, Changes(mask, score, dropout=dropout))
    write_bundle([problem], [gpu("h200")], tmp_path)
    bundle = tilegen.load_bundle(tmp_path)
    needed = [one.kernel for one in bundle.manifest.binaries]
    assert ("bwd_scores" in needed) == (name == "small cache")

    leaves = [q, k, v, *([] if score is None else score.captured)]
    leaves += [] if score is None or score.sink_logits is None else [score.sink_logits]
    results: list[list[torch.Tensor]] = []
    torch.manual_seed(4)
    for compute in (
        partial(tilegen.attention, dropout_p=dropout.p if dropout else 0.0),
        partial(attention_reference, dropout=dropout),
    ):
        out = compute(q, k, v, mask=mask, score=score)
        out = out[0] if isinstance(out, tuple) else out
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
        gradients = torch.autograd.grad((out.float() * weight).sum(), leaves)
        results.append([out.detach(), *gradients])
    assert set(driver.launched) == set(needed)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_a_pass_the_bundle_lacks_is_computed_as_without_it(driver: Driver, tmp_path: Path) -> None:
    problem = AttentionProblem.parse("hq2 q70 d16 fp32 causal")
    write_bundle([problem], [gpu("h200")], tmp_path, directions=["forward"])
    tilegen.load_bundle(tmp_path)
    q = torch.randn(1, 2, 70, 16, requires_grad=True)
    out = tilegen.attention(q, q, q, mask=tilegen.causal())
    expected, _ = attention_reference(q, q, q, mask=tilegen.causal())
    assert driver.launched == ["fwd"]
    (ours,), (theirs,) = (torch.autograd.grad(x.square().sum(), q) for x in (out, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert driver.launched == ["fwd"]


@pytest.mark.slow
def test_a_bundle_is_given_lengths_in_32_bits(driver: Driver, tmp_path: Path) -> None:
    lengths = torch.tensor([70, 31])
    mask = tilegen.causal() & tilegen.kv_lengths(lengths)
    q = torch.randn(2, 2, 70, 16, requires_grad=True)
    write_bundle([problem_of(q, q, q, Changes(mask))], [gpu("h200")], tmp_path)
    bundle = tilegen.load_bundle(tmp_path)
    expected, _ = attention_reference(q, q, q, mask=mask)
    for integers in (lengths, lengths.int(), lengths):
        out = tilegen.attention(q, q, q, mask=tilegen.causal(), kv_lengths=integers)
        ours, theirs = (
            torch.autograd.grad(x.square().sum(), q, retain_graph=True)[0] for x in (out, expected)
        )
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert set(driver.launched) == {one.kernel for one in bundle.manifest.binaries}


@pytest.mark.parametrize("mask", ["full", "dilated(3)"])
def test_a_bundle_takes_places_of_requests_in_32_bits(
    driver: Driver, tmp_path: Path, mask: str
) -> None:
    problem = AttentionProblem.parse(f"b3 hq4 hkv2 q2 kv48 d16 fp32 {mask} page16")
    write_bundle([problem], [gpu("h200")], tmp_path)
    q, pages = torch.randn(3, 4, 2, 16), torch.randn(9, 16, 2, 16)
    table, lengths = torch.randperm(9).view(3, 3), torch.tensor([40, 2, 33])
    tilegen.load_bundle(tmp_path)
    for integers in ((table, lengths), (table.int(), lengths.int()), (table, lengths)):
        out = tilegen.attention_paged(q, pages, pages, *integers, mask=problem.mask)
        for i, length in enumerate(lengths.tolist()):
            keys = pages[table[i]].flatten(0, 1)[:length].transpose(0, 1)[None]
            expected, _ = attention_reference(q[i : i + 1], keys, keys, mask=problem.mask)
            torch.testing.assert_close(out[i : i + 1], expected, rtol=1e-5, atol=1e-5)
    assert driver.launched == ["fwd_paged", "fwd_combine"] * 3
