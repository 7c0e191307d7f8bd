"""Tensor descriptors: the knob, the rule that says where they may be used, and the emitted text."""

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tilegen
from tests.support.problems import DESCRIBED, tiled
from tests.support.records import RECORD, timed
from tilegen import cpu, pipeline
from tilegen.bundles import building
from tilegen.choose.choice import Choice, Shortlist
from tilegen.choose.ranker import by_lower_bound, propose, search_space
from tilegen.choose.records import Records
from tilegen.emit.render import render
from tilegen.errors import Unsupported
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.descriptors import is_describable, why_not_described, without
from tilegen.kernels.registry import KERNELS
from tilegen.model.footprint import footprint
from tilegen.problem import AttentionProblem
from tilegen.runtime import plans
from tilegen.store import save
from tilegen.store.fields import parse_json
from tilegen.store.record import config_from
from tilegen.task import KernelTask

CONFIG = TileConfig(block_m=64, block_n=128, num_warps=8, descriptors=True)
LLAMA = AttentionProblem.parse("b4 hq32 hkv8 q4096 d128 bf16 causal")


def test_the_kernels_that_have_them() -> None:
    assert DESCRIBED == ("fwd", "bwd_dkdv", "bwd_dq")
    for kernel in DESCRIBED:
        spec = KERNELS[kernel]
        assert spec.whole
        assert set(spec.described) <= {one.name for one in spec.streamed}


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
def test_only_loads_of_streamed_tiles_differ(kernel: Kernel) -> None:
    plain = render(LLAMA, replace(CONFIG, descriptors=False), kernel).source.splitlines()
    described = render(LLAMA, CONFIG, kernel).source.splitlines()
    for name in KERNELS[kernel].described:
        assert not any(f"{name}_ptr" in line or f"{name}_offs" in line for line in described)
        assert sum(f"{name} = {name}_desc.load(" in line for line in described) == 1
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
        (fp32, "fwd", True, "remove t from m64n128w8s2t: .*IEEE fp32"),
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


def recorded(name: str, arch: str) -> None:
    record = replace(RECORD, problem=LLAMA.bucket, kernel="fwd", gpu=name, arch=arch)
    save(replace(record, config=CONFIG, measurement=timed(1e4), estimate=None))


def test_a_record_is_used_without_them_where_they_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tensors that a descriptor cannot hold, and of a GPU that cannot load by one."""
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    recorded("h200", "sm_90")
    recorded("a100", "sm_80")
    plain = replace(CONFIG, descriptors=False)

    def chosen(name: str, **how: bool) -> Choice:
        return pipeline.choose(LLAMA, gpu(name), "forward", **how)["fwd"]

    assert chosen("h200").config == CONFIG
    assert "by addresses" not in chosen("h200").source
    for aligned, describable in ((True, False), (False, True)):
        choice = chosen("h200", aligned=aligned, describable=describable)
        assert choice.config == plain
        assert choice.source.endswith("addresses and strides that are multiples of 16 bytes")
    assert chosen("a100").config == plain
    assert chosen("a100").source.endswith("sm_80 has no tensor memory accelerator")


@pytest.mark.parametrize("kernel", DESCRIBED)
def test_they_are_proposed_for_tiles_that_would_spill_without(kernel: Kernel) -> None:
    h200 = gpu("h200")
    results = [item.config for item in by_lower_bound(KernelTask.of(kernel, LLAMA, h200), top=20)]
    described = [item for item in results if item.descriptors]
    assert results[0] == described[0]
    for item in described:
        plain = without(item)
        spilled = [
            footprint(tiled(kernel, LLAMA, each, "sm_90")).spill_bytes for each in (plain, item)
        ]
        assert spilled[0] > spilled[1]
        assert plain not in results or results.index(item) < results.index(plain)
    space = search_space(KernelTask.of(kernel, LLAMA, h200))
    assert TileConfig.parse("m64n64w4s3t") in space
    for problem, name, describable in (
        (LLAMA, "h200", False),
        (LLAMA, "a100", True),
        (replace(LLAMA, dtype="fp32"), "h200", True),
        (AttentionProblem.parse("b4 hq32 hkv8 q4096 d100 bf16 causal"), "h200", True),
    ):
        every = propose(
            KernelTask.of(kernel, problem, gpu(name)), top=2000, describable=describable
        )
        assert not any(item.config.descriptors for item in every)


def test_calls_that_cannot_use_descriptors_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", "/nowhere")
    assert pipeline.choose(LLAMA, gpu("h200"), "forward")["fwd"].config.descriptors
    for how in ({"aligned": False}, {"describable": False}):
        assert not pipeline.choose(LLAMA, gpu("h200"), "forward", **how)["fwd"].config.descriptors


def test_explain_says_how_tiles_are_loaded() -> None:
    def loads(text: str, name: str, kernel: str, config: str) -> list[str]:
        told = tilegen.explain(text, name, kernel=kernel, config=config).text("tile")
        return re.findall(r"^  loads      (.*)$", told, re.MULTILINE)

    causal = "b1 hq8 hkv2 q1024 d64 bf16 causal"
    assert loads(causal, "h200", "bwd_dkdv", "m64n64w4s2t") == [
        "q and dout through tensor descriptors"
    ]
    assert loads(causal, "h200", "fwd", "m64n64w4s2") == [
        "k and v by addresses; by TMA with m64n64w4s2t"
    ]
    assert loads(causal, "a100", "fwd", "m64n64w4s2") == [
        "k and v by addresses: sm_80 has no tensor memory accelerator"
    ]
    assert loads(causal, "h200", "bwd_preprocess", "m64n16w4s1") == []
    assert loads(causal.replace("d64", "d100"), "h200", "fwd", "m64n64w4s2")[0].endswith(
        "strides that are multiples of 16 bytes"
    )


def test_bundles_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def rank(
        records: Records, task: KernelTask, *, describable: bool, may_compile: bool
    ) -> Shortlist:
        asked.append(describable)
        raise Unsupported("enough")

    monkeypatch.setattr(building, "rank", rank)
    monkeypatch.setattr(building, "Pool", lambda: nullcontext(SimpleNamespace(size=1)))
    with pytest.raises(Unsupported, match="enough"):
        building.generate([LLAMA], [gpu("h200")], tmp_path, directions=["forward"])
    assert asked == [False]


def test_calls_name_strides_that_descriptors_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expanded keys are another kind of call, with kernels of its own."""
    asked: list[bool] = []

    def choose(*_: object, describable: bool, **__: object) -> dict[Kernel, Choice]:
        asked.append(describable)
        raise Unsupported("enough")

    monkeypatch.setattr(cpu, "serves_calls", lambda: True)
    monkeypatch.setattr(cpu, "is_interpreting", lambda: True)  # which compiles nothing
    monkeypatch.setattr(pipeline, "choose", choose)
    plans.forget()
    dense = torch.zeros(2, 2, 8, 32, dtype=torch.float16)
    odd = torch.zeros(2 * 2 * 8 * 32 + 1, dtype=torch.float16)[1:].view(2, 2, 8, 32)
    for k in (dense, dense[:1].expand_as(dense), dense[:, :1].expand_as(dense), odd):
        with pytest.raises(Unsupported, match="enough"):
            tilegen.attention(dense, k, dense)
    plans.forget()
    assert asked == [True, False, False, False]
