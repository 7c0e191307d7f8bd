"""A family of kernels is a module, its template and a line that registers it: one that tilegen does
not have is proposed, rendered, explained, tuned, bundled and launched like its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.bundles import StandIn, not_compiled
from tests.support.problems import tiled
from tests.support.records import H200, PROBLEM
from tests.support.replay import Replay, stored
from tests.two_sweeps import FWD_TWO_SWEEPS, registered
from tilegen.bundles.launching import Packed
from tilegen.choose.families import kernels_of, ranked_families
from tilegen.choose.ranker import propose, search_space
from tilegen.emit.launch import launch_of
from tilegen.emit.render import render
from tilegen.errors import Unsupported
from tilegen.explaining.explained import explain_all
from tilegen.explaining.explanation import Explanation
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.launch.launcher import launch_by
from tilegen.masks.score import softcap
from tilegen.model.traffic import traffic_of
from tilegen.task import KernelTask
from tilegen.tuning.tuner import tune

NAME = FWD_TWO_SWEEPS.name
CONFIG = TileConfig(block_m=64, block_n=32)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with registered():
        yield
    assert NAME not in KERNELS


def test_it_is_proposed_within_its_knobs_and_ranked_with_the_others() -> None:
    ranked = propose(KernelTask.of(NAME, PROBLEM, H200), top=5)
    assert len(ranked) == 5
    for item in (
        *(each.config for each in ranked),
        *search_space(KernelTask.of(NAME, PROBLEM, H200)),
    ):
        assert item.block_n in (32, 64)
        assert item.num_stages <= 2
    seconds = dict(ranked_families(PROBLEM, H200, "forward"))
    assert seconds["two_sweeps"] > seconds["q_stationary"], "it reads and multiplies more"
    assert kernels_of(PROBLEM, H200, "forward") == ("fwd",)
    with registered(alone=True):
        assert kernels_of(PROBLEM, H200, "forward") == (NAME,)


def test_a_library_is_not_used_for_unsupported_problems() -> None:
    capped = replace(PROBLEM, score=softcap(20.0).form)
    assert "two_sweeps" not in dict(ranked_families(capped, H200, "forward"))
    with registered(alone=True), pytest.raises(Unsupported, match="two_sweeps does not change"):
        kernels_of(capped, H200, "forward")


def test_it_is_rendered() -> None:
    rendered = render(PROBLEM, CONFIG, NAME)
    names = [name for name, _ in rendered.signature]
    assert names == [name for name, _ in render(PROBLEM, CONFIG, "fwd").signature]


def test_its_traffic_and_its_choice_are_explained() -> None:
    two, left = (traffic_of(tiled(name, PROBLEM, CONFIG)) for name in (NAME, "fwd"))
    rows = PROBLEM.batch * PROBLEM.num_heads_q * PROBLEM.seqlen_q
    assert two.write_bytes == left.write_bytes
    assert left.read_bytes < two.read_bytes < 2 * left.read_bytes + rows
    with registered(alone=True):
        told = explain_all(PROBLEM, H200, [NAME], by_model=True)
        text = Explanation(problem=PROBLEM, gpu=H200, explained=told, with_passes=True).text("all")
    assert NAME in text
    assert "2*H_kv*V_kv*d_qk" in text


def test_it_is_tuned_from_a_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    space = search_space(KernelTask.of(NAME, PROBLEM, H200))
    table: dict[str, float | str] = {c.key: 900.0 + 90 * i for i, c in enumerate(reversed(space))}
    tune(KernelTask.of(NAME, PROBLEM, H200), measure=Replay(table), progress=False)
    actual = stored(tmp_path)
    assert (actual.kernel, actual.config) == (NAME, space[-1])


def test_its_binary_is_launched_as_its_record_says() -> None:
    rendered = render(PROBLEM, CONFIG, NAME)
    binary = not_compiled(rendered)
    seen: list[tuple[int, list[Any]]] = []
    stand_in: Any = StandIn(binary, lambda *one: seen.append(one))
    text, device = launch_of(rendered.source), torch.device("cpu")
    launch = launch_by(Packed(binary, lambda: stand_in).start, text, device, NAME)
    q, k = (torch.zeros(1, h, 300, 128, dtype=torch.bfloat16) for h in (8, 2))
    out, lse = launch(q, k, k, 0.5)
    ((grid, values),) = seen
    assert grid == 5 * 8
    named = dict(zip((name for name, _ in binary.arguments), values, strict=True))
    assert named["out_ptr"] == out.data_ptr()
    assert named["lse_ptr"] == lse.data_ptr()
    assert (named["seqlen_q"], named["num_heads_q"]) == (300, 8)
