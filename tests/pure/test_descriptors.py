"""Tensor descriptors: the knob, the rule that says where they may be used, and the emitted text."""

from dataclasses import replace

import pytest
import torch

from tests.conftest import CheckGolden
from tests.described import DESCRIBED
from tilegen.emit.render import render
from tilegen.errors import Unsupported
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.descriptors import is_describable, why_not_described
from tilegen.kernels.registry import KERNELS
from tilegen.problem import AttentionProblem
from tilegen.store.fields import parse_json
from tilegen.store.record import config_from

CONFIG = TileConfig(block_m=64, block_n=128, num_warps=8, descriptors=True)
LLAMA = AttentionProblem.parse("b4 hq32 hkv8 q4096 d128 bf16 causal")


def test_the_kernels_that_have_them() -> None:
    assert DESCRIBED == ("fwd", "bwd_dkdv", "bwd_dq")
    for kernel in DESCRIBED:
        spec = KERNELS[kernel]
        assert spec.whole
        assert set(spec.described) <= set(spec.whole.streams)


def test_a_config_says_it_and_others_look_as_before() -> None:
    assert CONFIG.key == "m64n128w8s2t"
    assert TileConfig.parse("m64n128w8s2t") == CONFIG
    plain = replace(CONFIG, descriptors=False)
    assert plain.key == "m64n128w8s2"
    assert "descriptors" not in repr(plain)
    assert eval(repr(CONFIG)) == CONFIG
    with pytest.raises(Unsupported, match="descriptors must be True or False, got 1"):
        TileConfig(block_m=16, block_n=16, descriptors=1)  # type: ignore[arg-type]


def test_a_record_says_it() -> None:
    text = '{"block_m": 64, "block_n": 128, "num_warps": 8, "num_stages": 2, "descriptors": true}'
    assert config_from(parse_json(text), "fwd") == CONFIG


@pytest.mark.parametrize("kernel", DESCRIBED)
def test_rendered(kernel: Kernel, golden: CheckGolden) -> None:
    """Of split head dims, too: a tile is as wide as its descriptor says."""
    d80 = AttentionProblem.parse("b1 hq4 hkv1 q100 d80/64 fp16 window(63,0)")
    golden(render(LLAMA if kernel == "fwd" else d80, CONFIG, kernel).source)


@pytest.mark.parametrize("kernel", DESCRIBED)
def test_only_loads_of_what_passes_differ(kernel: Kernel) -> None:
    plain = render(LLAMA, replace(CONFIG, descriptors=False), kernel).source.splitlines()
    described = render(LLAMA, CONFIG, kernel).source.splitlines()
    for name in KERNELS[kernel].described:
        assert not any(f"{name}_ptr" in line or f"{name}_offs" in line for line in described)
        assert sum(f"{name} = {name}_desc.load(" in line for line in described) == 2
    arithmetic = ("tl.dot(", "tl.exp2(", "keep", "range(", "tl.store(")
    both = [
        [line for line in text if any(one in line for one in arithmetic) and "jit" not in line]
        for text in (plain, described)
    ]
    loads = [line for line in both[0] if line not in both[1]]
    assert both[0] == [line for line in both[0] if line in both[1] or line in loads]
    assert all("tl.load(" in line for line in loads)


def test_where_there_can_be_none() -> None:
    fp32 = replace(LLAMA, dtype="fp32")
    for problem, kernel, aligned, message in (
        (fp32, "fwd", True, "expected no t in m64n128w8s2t: .*IEEE fp32"),
        (LLAMA, "fwd", False, "multiples of 16 bytes"),
        (LLAMA, "bwd_preprocess", True, "bwd_preprocess has no tensor descriptors"),
        (LLAMA, "fwd_scores", True, "fwd_scores has no tensor descriptors"),
    ):
        with pytest.raises(Unsupported, match=message):
            render(problem, CONFIG, kernel, aligned=aligned)


@pytest.mark.parametrize("arch, can", [("sm_80", False), ("sm_90", True), ("sm_100", True)])
def test_gpus_that_have_them(arch: str, can: bool) -> None:
    reason = why_not_described(KERNELS["fwd"], "bf16", aligned=True, arch=arch)
    assert can == (not reason)
    assert can or reason == "sm_80 has no tensor memory accelerator"
    assert why_not_described(KERNELS["fwd"], "bf16", aligned=True, arch="gfx942")


def test_strides_that_a_descriptor_can_hold() -> None:
    dense = torch.empty(2, 3, 40, 64, dtype=torch.bfloat16)
    assert is_describable(dense)
    assert is_describable(dense.transpose(1, 2))
    assert is_describable(dense[:1].as_strided((1, 3, 40, 64), (0, 2560, 64, 1)))  # of size 1
    assert not is_describable(dense[:1].expand(2, 3, 40, 64))
    assert not is_describable(dense[:, :1].expand(2, 3, 40, 64))
    far = torch.empty(0, dtype=torch.bfloat16, device="meta").as_strided(
        (2, 1, 1, 8), (2**39, 8, 8, 1)
    )
    assert not is_describable(far)
