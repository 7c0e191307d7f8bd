"""Pictures of explanations: curves follow from schedules and bounds, points from the candidates."""

import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.explaining.test_explain import DIRECTIONS, H200, LARGE, SMALL, parse, run
from tests.support.problems import task
from tilegen.choose.families import kernels_of
from tilegen.choose.ranker import propose
from tilegen.errors import Unsupported
from tilegen.explaining.explained import explain_all
from tilegen.explaining.plot import curves, draw, mask_picture
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.spec import Direction
from tilegen.model.visits import visits_of
from tilegen.task import KernelTask
from tilegen.theory import regimes


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_curves_cross_where_the_leading_terms_do(direction: Direction) -> None:
    """Long and unmasked: slopes of -1 and -1/2 where M is small, and above every bound."""
    problem = parse("hq8 q131072 d256 bf16")
    curve = curves(problem, H200, direction)
    for moved in (curve.large_cache, curve.small_cache):
        known = np.isfinite(moved)
        for bound in curve.bounds.values():
            assert np.all(moved[known] >= bound[known])
    cheaper = curve.memory[np.nanargmax(curve.large_cache < curve.small_cache)]
    schedules = regimes.LARGE_CACHE[direction], regimes.SMALL_CACHE[direction]
    dividing = regimes.dividing_bytes(*schedules, head_dim=256, element_bytes=2)
    assert cheaper == pytest.approx(dividing, rel=0.15)
    logs = np.log(curve.memory)
    large, small = np.log(curve.large_cache), np.log(curve.small_cache)
    middle = slice(20, 50)
    assert np.polyfit(logs[middle], large[middle], 1)[0] == pytest.approx(-1, abs=0.1)
    assert -0.5 < np.polyfit(logs[:20], small[:20], 1)[0] < -0.35


def test_real_tiles_lie_above_the_best_ones() -> None:
    for text in (LARGE, "hq8 hkv2 q4096 d128 bf16 window(255,0)"):
        problem = parse(text)
        curve = curves(problem, H200, "forward")
        cost = propose(KernelTask.of("fwd", problem, H200), top=1)[0].estimate
        best = np.interp(H200.on_chip_bytes, curve.memory, curve.large_cache)
        assert cost.read_bytes + cost.write_bytes >= best


def test_curves_count_what_tiles_visit_under_a_mask() -> None:
    """A tile of B_r rows meets B_r + 255 keys of a window, not its share of the kept entries."""
    problem = parse("hq8 hkv2 q8192 d128 bf16 window(255,0)")
    curve = curves(problem, H200, "forward")
    for size in (2**18, 2**19, 2**20):
        block_m = int((size / 2 - 256) / (2 * 1 + 2 * 128 + 2 * 2 + 128))  # at B_c = 1, alpha = 2
        rows = visits_of(task("fwd", problem), block_m, 1).rows
        moved = 8 * (8192 * (256 * 2 + 4) + rows * 256 * 2)
        shown = np.interp(size, curve.memory, curve.large_cache)
        assert shown == pytest.approx(moved, rel=0.05)


STARTS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.mark.slow
@pytest.mark.parametrize("suffix", STARTS)
def test_plots_are_files_of_their_kind(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plot.{suffix}"
    text = run("hq2 q256 d64 bf16", "--gpu", "h200", "--kernel", "fwd", "--plot", str(file))
    assert text.startswith("problem  b1 hq2 ")
    assert text.endswith(f"drawn to {file}\n")
    assert file.read_bytes().startswith(STARTS[suffix])


@pytest.mark.slow
def test_a_plot_has_traffic_roofline_and_mask_for_each_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    saved: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: saved.append(self))
    problem = parse(SMALL)
    draw(
        problem,
        H200,
        explain_all(problem, H200, kernels_of(problem, H200), by_model=True),
        tmp_path / "a.png",
    )
    (drawn,) = saved
    assert len(drawn.axes) == 6
    traffic, roofline = drawn.axes[:2]
    labels = " ".join(text.get_text() for text in traffic.get_legend().get_texts())
    for what in ("LB2", "floor", "M of h200", "cross", "small_cache, chosen"):
        assert what in labels
    (mark,) = (line for line in traffic.lines if "M of h200" in str(line.get_label()))
    assert set(mark.get_xdata()) == {H200.on_chip_bytes}
    labels = " ".join(text.get_text() for text in roofline.get_legend().get_texts())
    assert "L2 9.37 TB/s" in labels
    best = propose(KernelTask.of("fwd_scores", problem, H200), top=1)[0]
    assert best.config.key in labels
    (points,) = (line for line in roofline.lines if line.get_label() == "fwd_scores, L2")
    cost = best.estimate
    assert points.get_ydata()[0] == pytest.approx(1e-12 * cost.flops / cost.seconds)
    assert max(points.get_ydata()) <= 1e-12 * H200.tensor_flops_16
    for at, speed in zip(points.get_xdata(), points.get_ydata(), strict=True):
        assert math.isfinite(at)
        assert 1e12 * speed <= at * H200.l2_bandwidth


@pytest.mark.parametrize("kernels", [("bwd_preprocess", "bwd_dkdv"), ("bwd_preprocess",)])
def test_the_mask_has_tiles_of_a_kernel_that_visits_them(
    kernels: tuple[Kernel, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of delta reads rows of results: its tile says nothing about the mask."""
    figure = pytest.importorskip("matplotlib.figure")
    saved: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: saved.append(self))
    problem = parse("hq2 q256 d64 bf16 causal")
    told = explain_all(problem, H200, kernels, by_model=True)
    draw(problem, H200, told, tmp_path / "a.png")
    axes = saved[0].axes[2]
    if len(kernels) == 1:
        assert [text.get_text() for text in axes.texts] == [
            "bwd_preprocess visits no tile of the mask"
        ]
        return
    config = told[1].config
    assert f"tiles {config.block_m} x {config.block_n} of bwd_dkdv" in axes.get_title()
    assert axes.get_yticks()[1] == config.block_m != told[0].config.block_m


def test_a_plot_that_is_cut_short_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    file, problem = tmp_path / "plot.png", parse(LARGE)
    file.write_bytes(b"the one before")

    def cut_short(self: Any, out: Any, **_: Any) -> None:
        with Path(out).open("wb") if isinstance(out, Path) else nullcontext(out) as opened:
            opened.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(figure.Figure, "savefig", cut_short)
    with pytest.raises(KeyboardInterrupt):
        draw(problem, H200, explain_all(problem, H200, ("fwd",), by_model=True), file)
    assert file.read_bytes() == b"the one before"


def test_plot_errors_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = parse(LARGE)
    explained = explain_all(problem, H200, ("fwd",), by_model=True)
    with pytest.raises(Unsupported, match=r"end in \.png, \.svg, \.pdf"):
        draw(problem, H200, explained, tmp_path / "plot.gif")
    with pytest.raises(Unsupported, match="no folder"):
        draw(problem, H200, explained, tmp_path / "none" / "plot.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(Unsupported, match=r"pip install 'tilegen\[plot\]'"):
        draw(problem, H200, explained, tmp_path / "plot.png")


def test_a_long_mask_has_one_shade_for_each_tile() -> None:
    """Tiles of 128 under a window of 300 in 1000 rows, judged pair by pair."""
    problem = parse("hq2 q1000 d64 bf16 window(299,0)")
    config = TileConfig(block_m=128, block_n=64)
    picture = mask_picture(problem, config, 1000, 1000)
    q, k = np.ogrid[:1000, :1000]
    keep = (k <= q) & (q - k <= 299)
    assert picture.shape == (8, 16)
    for i, row in enumerate(picture):
        for j, shade in enumerate(row):
            tile = keep[128 * i : 128 * (i + 1), 64 * j : 64 * (j + 1)]
            assert shade == (3 if tile.all() else 2 * tile.any())
