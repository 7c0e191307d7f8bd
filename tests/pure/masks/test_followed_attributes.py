"""Masks and scores that are made once look the attributes of objects up again at each call."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize

import tilegen
from tilegen.masks.made import OfFunction

pytestmark = pytest.mark.oldest

N, OLD, NEW = 24, (0.1, 0.2), (1.0, 0.5)
Q = torch.randn(1, 2, N, 16, generator=torch.Generator().manual_seed(0))
AT = torch.arange(N)


class Layer(torch.nn.Module):
    """Attention with a score, and a mask, made once."""

    def __init__(self, form: str = "alone") -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.tensor(OLD))
        self.reach: torch.Tensor
        self.register_buffer("reach", torch.tensor([5, 9]))
        self.window = 4
        self.score = tilegen.score(lambda s, b, h, q, k: s - (q - k).abs() * self.slopes[h])
        self.mask = tilegen.predicate(self.keeps)
        if form == "derived":
            self.score = tilegen.score(
                lambda s, b, h, q, k: s - (q - k).abs() * (self.slopes * 2)[h] / 2
            )
        if form == "joined":
            half = tilegen.score(lambda s, b, h, q, k: s - (q - k).abs() * self.slopes[h] / 2)
            self.score = half.then(half)
            every = tilegen.sliding_window(N, N)
            self.mask = every & ~(~self.mask | ~every)

    def keeps(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((q - k).abs() < self.reach[h]) | self.is_near(q - k)

    def is_near(self, distance: Any) -> Any:
        return distance.abs() < self.window

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return tilegen.attention(q, q, q, mask=self.mask, score=self.score)


def expected(slopes: torch.Tensor, reach: Any = (5, 9), window: int = 4) -> torch.Tensor:
    """Compute the layer in fp64 by its definition."""
    q, distance = Q.double(), (AT[:, None] - AT).abs()
    logits = q @ q.mT / 4 - distance * slopes.double()[:, None, None]
    keep = (distance < torch.as_tensor(reach)[:, None, None]) | (distance < window)
    return torch.where(keep, logits, -torch.inf).softmax(-1) @ q


def check(layer: Callable[[torch.Tensor], torch.Tensor], slopes: Any, **others: Any) -> None:
    """Check result and gradient of a layer whose parameter is `slopes`."""
    slopes.grad = None
    out, real = layer(Q), slopes.detach().clone().requires_grad_()
    reference = expected(real, **others)
    torch.testing.assert_close(out.double(), reference, atol=1e-5, rtol=1e-5)
    (out * Q).sum().backward()
    (reference * Q).sum().backward()
    torch.testing.assert_close(slopes.grad, real.grad, atol=1e-4, rtol=1e-4)


@pytest.fixture(params=["alone", "joined", "derived"])
def layer(request: Any) -> Layer:
    made = Layer(request.param)
    check(made, made.slopes)
    return made


def test_a_state_that_is_assigned(layer: Layer) -> None:
    state = {"slopes": torch.tensor(NEW), "reach": torch.tensor([2, 7])}
    layer.load_state_dict(state, assign=True)
    check(layer, layer.slopes, reach=(2, 7))
    layer.window = 9
    check(layer, layer.slopes, reach=(2, 7), window=9)
    layer.slopes = torch.nn.Parameter(torch.tensor(OLD))
    check(layer, layer.slopes, reach=(2, 7), window=9)


def test_functional_call(layer: Layer) -> None:
    new = torch.tensor(NEW, requires_grad=True)
    for tensor in (new, new.detach().clone().requires_grad_(), layer.slopes):
        check(lambda q, t=tensor: torch.func.functional_call(layer, {"slopes": t}, q), tensor)
    check(layer, layer.slopes)


def test_a_transform_of_a_functional_call(layer: Layer) -> None:
    def loss(slopes: torch.Tensor) -> torch.Tensor:
        return (torch.func.functional_call(layer, {"slopes": slopes}, Q) * Q).sum()

    for slopes in map(torch.tensor, (NEW, OLD)):
        real = slopes.clone().requires_grad_()
        (expected(real) * Q).sum().backward()
        torch.testing.assert_close(torch.func.grad(loss)(slopes), real.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_torch_compile_follows(layer: Layer) -> None:
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    check(compiled, layer.slopes)
    layer.load_state_dict({"slopes": torch.tensor(NEW), "reach": torch.tensor([2, 7])}, assign=True)
    check(compiled, layer.slopes, reach=(2, 7))


@pytest.mark.parametrize("layer", ["alone", "joined"], indirect=True)
def test_torch_compile_follows_a_copy(layer: Layer) -> None:
    other = copy.deepcopy(layer)
    other.slopes = torch.nn.Parameter(torch.tensor(NEW))
    check(torch.compile(other, backend="aot_eager", fullgraph=True), other.slopes)


@pytest.mark.parametrize("layer", ["alone", "joined"], indirect=True)
def test_a_copy_follows_itself(layer: Layer) -> None:
    layers = copy.deepcopy(torch.nn.ModuleList([layer, layer]))
    other: Any = layers[0]
    check(other, other.slopes)
    other.slopes = torch.nn.Parameter(torch.tensor(NEW))
    layer.reach = torch.tensor([1, 1])
    check(other, other.slopes)
    check(layer, layer.slopes, reach=(1, 1))


def test_a_parameter_that_is_computed(layer: Layer) -> None:
    class Doubled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    parametrize.register_parametrization(layer, "slopes", Doubled())
    original: Any = layer.parametrizations.slopes.original  # type: ignore[union-attr]
    for _ in range(2):
        torch.testing.assert_close(layer(Q).double(), expected(2 * original), atol=1e-5, rtol=1e-5)
        with torch.no_grad():
            original.mul_(3)


def test_attributes_that_are_computed_are_looked_up_at_each_call() -> None:
    tables = {"slopes": torch.tensor(OLD)}
    holder: Any = type("Holder", (), {"slopes": property(lambda _: tables["slopes"])})()
    score = tilegen.score(lambda s, b, h, q, k: s - (q - k).abs() * holder.slopes[h])
    for _ in range(2):
        out = tilegen.attention(Q, Q, Q, score=score)
        reference = expected(tables["slopes"], window=N)
        torch.testing.assert_close(out.double(), reference, atol=1e-5, rtol=1e-5)
        tables["slopes"] = torch.tensor(NEW)


def test_masks_and_scores_that_read_no_object_follow_nothing() -> None:
    slopes = torch.tensor(OLD)
    assert tilegen.score(lambda s, b, h, q, k: s * slopes[h]).follows is None
    assert (tilegen.predicate(lambda b, h, q, k: q >= k) & tilegen.full()).follows is None


def test_an_unchanged_layer_is_traced_once(monkeypatch: pytest.MonkeyPatch, layer: Layer) -> None:
    layer.load_state_dict({"slopes": torch.tensor(NEW), "reach": torch.tensor([2, 7])}, assign=True)
    layer(Q)
    monkeypatch.setattr("tilegen.masks.tracing.trace.call", None)
    layer(Q)


def test_pickled_scores_keep_their_tensors() -> None:
    score = pickle.loads(pickle.dumps(Layer().score))
    assert not isinstance(score.follows, OfFunction)
    torch.testing.assert_close(score.captured[0].detach(), torch.tensor(OLD))


def test_fsdp(tmp_path: Any) -> None:
    distributed: Any = torch.distributed
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        from torch.distributed.fsdp import fully_shard

        layer = Layer()
        mesh = distributed.init_device_mesh("cpu", (1,))
        fully_shard(layer, mesh=mesh)
        for _ in range(2):
            out = layer(Q)
            (out * Q).sum().backward()
            slopes: Any = layer.slopes
            real = slopes.full_tensor().detach().clone().requires_grad_()
            reference = expected(real)
            torch.testing.assert_close(out.double(), reference, atol=1e-5, rtol=1e-5)
            (reference * Q).sum().backward()
            gradient = slopes.grad.full_tensor()
            torch.testing.assert_close(gradient, real.grad, atol=1e-4, rtol=1e-4)
            with torch.no_grad():
                slopes.mul_(3)
            slopes.grad = None
    finally:
        distributed.destroy_process_group()
