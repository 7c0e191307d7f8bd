"""Values that are the first columns of keys: right, loaded once, in every form that a call has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilegen
from tests.support.counted import counted, predicted
from tests.support.problems import tiled
from tests.support.splits import COMBINE
from tilegen import cpu
from tilegen.check.reference import attention_reference, make_inputs
from tilegen.check.verification import check, require, verify
from tilegen.emit.render import render
from tilegen.kernels.config import TileConfig
from tilegen.model.traffic import traffic_of
from tilegen.problem import AttentionProblem
from tilegen.runtime import plans
from tilegen.tuning.bench import check_config

FWD = {"fwd": TileConfig(block_m=32, block_n=16)}
PARTS = TileConfig(block_m=1, block_n=16, heads=16, split_kv=64)
"""A tile holds 16 heads, of a group of more."""
SPLIT = {"fwd_split": PARTS, "fwd_combine": COMBINE}
PAGED = {"fwd_paged": PARTS, "fwd_combine": COMBINE}
CASES = [
    ("b2 hq4 hkv1 q50 kv70 d48/32 bf16 causal latent", FWD),
    ("b1 hq4 hkv1 q20 kv90 d32 fp16 window(40,0,bottom_right) latent", FWD),
    ("b1 hq2 hkv1 q40 kv40 d48/32 fp32 full score(s*0.5) latent", FWD),
    ("b1 hq2 hkv1 q40 kv40 d72/64 fp16 dilated(3) latent", FWD),
    ("b2 hq32 hkv1 q1 kv300 d80/64 bf16 full latent", SPLIT),
    ("b1 hq48 hkv1 q3 kv130 d40 fp16 causal(bottom_right) latent", SPLIT),
    ("b1 hq64 hkv1 q5 kv200 d48/32 fp32 causal(bottom_right) latent", SPLIT),
    ("b2 hq32 hkv1 q2 kv300 d72/64 bf16 causal(bottom_right) page16 latent", PAGED),
    ("b1 hq32 hkv1 q1 kv90 d80/64 fp16 full page64 latent", PAGED),
]


@pytest.mark.parametrize("text, configs", CASES, ids=lambda one: one if type(one) is str else "")
def test_results(text: str, configs: dict[str, TileConfig]) -> None:
    require(verify(AttentionProblem.parse(text), configs))


@pytest.mark.parametrize(
    "text, configs",
    [CASES[0], CASES[1], CASES[4], CASES[6], CASES[7]],
    ids=["fwd", "window", "split", "part of a group", "paged"],
)
def test_bytes_equal_the_model(text: str, configs: dict[str, TileConfig]) -> None:
    problem = AttentionProblem.parse(text)
    x = make_inputs(problem)
    assert x.v.data_ptr() == x.k.data_ptr()
    moved = counted(problem, configs)
    assert moved == predicted(problem, configs)
    first = next(iter(configs))
    apart = traffic_of(tiled(first, replace(problem, latent=False), configs[first]))
    assert apart.read_bytes > 1.4 * moved[first][0]


@pytest.mark.slow
@pytest.mark.parametrize("kernel, configs", [("fwd", FWD), ("fwd_split", SPLIT)])
def test_descriptors(kernel: str, configs: dict[str, TileConfig]) -> None:
    problem = AttentionProblem.parse("b2 hq32 hkv1 q2 kv150 d80/64 bf16 causal(bottom_right)")
    problem = replace(problem, latent=True)
    configs = configs | {kernel: replace(configs[kernel], descriptors=True)}
    kernels = {name: render(problem, one, name) for name, one in configs.items()}
    assert "v_desc" not in kernels[kernel].source
    require(check(kernels, make_inputs(problem), mask=problem.mask))


@pytest.mark.slow
def test_the_tuner_runs_and_checks_them() -> None:
    for text, configs in (CASES[0], CASES[4], CASES[7]):
        name = next(iter(configs))
        assert check_config(AttentionProblem.parse(text), name, configs[name]) is None


def test_other_values_are_refused() -> None:
    problem = AttentionProblem.parse(CASES[0][0])
    launch = cpu.load(render(problem, FWD["fwd"], "fwd")).launch
    x = make_inputs(problem)
    with pytest.raises(ValueError, match=r"such as k\[\.\.\., :32\], got others"):
        launch(x.q, x.k, x.v.contiguous(), 0.1)


# --------------------------------------------------------------------------------------------------
# Calls


def problems() -> list[AttentionProblem]:
    """Return the problems of the calls since plans were forgotten."""
    return [key[0] for key in plans.by_problem._values]  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("heads_inside", [False, True])
def test_calls_find_them_by_their_address(heads_inside: bool) -> None:
    plans.forget()
    problem = AttentionProblem.parse("b2 hq4 hkv1 q40 kv60 d48/32 fp32 causal")
    x = make_inputs(problem, heads_inside=heads_inside)
    values = x.k[..., :32]
    out = tilegen.attention(x.q, x.k, values, mask=tilegen.causal())
    apart = tilegen.attention(x.q, x.k, values.clone(), mask=tilegen.causal())
    torch.testing.assert_close(out, apart)
    assert sorted(one.latent for one in problems()) == [False, True]
    expected, _ = attention_reference(
        *(one.double() for one in (x.q, x.k, values)), mask=tilegen.causal(), scale=48**-0.5
    )
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_values_elsewhere_in_the_keys_are_loaded_apart() -> None:
    plans.forget()
    problem = AttentionProblem.parse("b1 hq2 hkv1 q20 kv30 d48/32 fp32")
    x = make_inputs(problem)
    packed = torch.as_strided(x.k, (1, 1, 30, 32), (960, 960, 32, 1))  # the keys' address
    for values in (x.k[..., 16:], x.k[..., :24], packed):
        out = tilegen.attention(x.q, x.k, values)
        expected, _ = attention_reference(
            *(one.double() for one in (x.q, x.k, values)), mask=tilegen.full(), scale=48**-0.5
        )
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    assert not any(one.latent for one in problems())


@pytest.mark.slow
def test_gradients_of_keys_hold_those_of_the_values_in_them() -> None:
    problem = AttentionProblem.parse("b1 hq4 hkv1 q40 kv60 d48/32 fp32")
    x = make_inputs(problem)
    grads: list[torch.Tensor] = []
    for values in (lambda k: k[..., :32], lambda k: k[..., :32].clone()):
        q, k = x.q.clone().requires_grad_(), x.k.clone().requires_grad_()
        out = tilegen.attention(q, k, values(k), mask=tilegen.causal("bottom_right"))
        out.backward(x.dout)
        grads += [one.grad for one in (q, k) if one.grad is not None]
    torch.testing.assert_close(grads[0], grads[2])
    torch.testing.assert_close(grads[1], grads[3])


def test_keys_that_are_copied_share_nothing() -> None:
    """Keys without a dense last dimension are copied for kernels, and their values apart."""
    plans.forget()
    problem = AttentionProblem.parse("b1 hq2 hkv1 q20 kv30 d48/32 fp32")
    x = make_inputs(problem)
    k = x.k.transpose(2, 3).contiguous().transpose(2, 3)
    out = tilegen.attention(x.q, k, k[..., :32])
    torch.testing.assert_close(out, tilegen.attention(x.q, x.k, x.k[..., :32].clone()))
    assert not any(one.latent for one in problems())


@pytest.mark.slow
def test_pages_of_keys_that_hold_values() -> None:
    plans.forget()
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(20, 16, 1, 48, generator=generator)
    table = torch.randperm(20, generator=generator)[:15].view(3, 5)
    q = torch.randn(3, 32, 2, 48, generator=generator)
    given = table, torch.tensor([80, 2, 33])
    mask = tilegen.causal("bottom_right")
    out = tilegen.attention_paged(q, pages, pages[..., :32], *given, mask=mask)
    apart = tilegen.attention_paged(q, pages, pages[..., :32].clone(), *given, mask=mask)
    torch.testing.assert_close(out, apart)
    assert sorted(one.latent for one in problems()) == [False, True]
