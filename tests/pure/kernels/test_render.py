"""Emitted kernels as text: goldens, style, and what may and may not be in them."""

import ast
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import jinja2.meta
import pytest

from tests.support import sliced
from tests.support.problems import DESCRIBED, PROBLEMS
from tilegen import resources
from tilegen.bounded_cache import BoundedCache
from tilegen.emit import identity, kernel_files
from tilegen.emit.render import environment, render
from tilegen.errors import Unsupported
from tilegen.kernels.config import Kernel, TileConfig, head_dim_chunks
from tilegen.kernels.registry import KERNELS, LARGE_CACHE
from tilegen.masks import parse_mask
from tilegen.masks.source import keep_source
from tilegen.problem import AttentionProblem

CONFIG = TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)
LLAMA = AttentionProblem.parse("b4 hq32 hkv8 q4096 d128 bf16 causal")


@pytest.mark.parametrize(
    "kernel, config",
    [
        ("fwd_split", "m8h2n16k128w4s1"),
        ("fwd_paged", "m8h2n16k128w4s1"),
        ("fwd_combine", "m1n16w1s1"),
    ],
)
def test_kernels_that_drop_nothing_refuse_dropout(kernel: Kernel, config: str) -> None:
    problem = AttentionProblem.parse("b2 hq4 hkv2 q256 kv256 d64 bf16 causal")
    tile = TileConfig.parse(config)
    assert render(problem, tile, kernel).source
    with pytest.raises(Unsupported, match=f"{kernel} does not support dropout, .*dropout'"):
        render(replace(problem, dropout=True), tile, kernel)


def test_splits_are_joined_row_by_row() -> None:
    problem = AttentionProblem.parse("b2 hq4 hkv2 q256 kv256 d64 bf16 causal")
    with pytest.raises(Unsupported, match=r"block_m of fwd_combine must be .*\(1,\), got 16"):
        render(problem, TileConfig.parse("m16n16w1s1"), "fwd_combine")


@cache
def all_rendered() -> list[identity.RenderedKernel]:
    problems = [*PROBLEMS, replace(LLAMA, mask=parse_mask("causal&window(4095,0,bottom_right)"))]
    return [
        render(problem, config, kernel, aligned=aligned)
        for problem in problems
        for kernel, config in {**dict.fromkeys(LARGE_CACHE, CONFIG), **sliced.ALL}.items()
        for aligned in (True, False)
    ] + [
        render(problem, replace(CONFIG, descriptors=True), kernel)
        for problem in problems
        for kernel in DESCRIBED
        if problem.dtype != "fp32" and identity.rows_are_aligned(problem)
    ]


@pytest.mark.slow
def test_emitted_files_are_well_formed(tmp_path: Path) -> None:
    for i, kernel in enumerate(all_rendered()):
        text = kernel.source
        tree = ast.parse(text)
        assert max(map(len, text.splitlines())) <= 120, kernel.function
        assert text.endswith("\n")
        assert not text.endswith("\n\n")
        assert "\n\n\n\n" not in text
        nodes = [*ast.walk(tree)]
        imported = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
        assert imported <= {"math", "torch", "triton", "triton.language"}
        others = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        descriptors = {"triton.tools.tensor_descriptor"} if kernel.config.descriptors else set()
        assert others == descriptors
        functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
        assert {kernel.function, "launch"} <= set(functions)
        # What is known when rendering is decided by then: no `if` on a constant inside a kernel.
        # Kernels of scores ask at run time whether their one tile is empty, or partial.
        body = ast.walk(functions[kernel.function])
        asked = {ast.unparse(node.test) for node in body if isinstance(node, (ast.If, ast.IfExp))}
        if kernel.kernel.endswith("_scores"):
            assert asked == {
                "(tile_n < tile_lo) | (tile_n >= tile_hi)",
                "(tile_n < full_lo) | (tile_n >= full_hi)",
            }
        else:
            assert not asked
        (tmp_path / f"kernel_{i}.py").write_text(text)
    pytest.importorskip("ruff", reason="needs ruff; pip install 'tilegen[dev]'")
    subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F,E9,W", str(tmp_path)],
        check=True,
    )


def test_constants_are_constexpr_with_a_meaning() -> None:
    for kernel in all_rendered():
        lines = re.findall(r"^([A-Z][A-Z0-9_]*) = (.*)$", kernel.source, re.MULTILINE)
        assert lines
        for name, value in lines:
            assert re.fullmatch(r"tl\.constexpr\([\d.]+\)  # .+", value), (kernel.function, name)
            used = len(re.findall(rf"\b{name}\b", kernel.source))
            assert used > 1, f"{name} of {kernel.function} is never used"


def test_a_mask_brings_only_its_own_code() -> None:
    assert "keep &=" not in render(replace(LLAMA, mask=parse_mask("full")), CONFIG).source
    causal = render(LLAMA, CONFIG).source
    assert causal.count("keep &=") == 1
    assert "num_left" not in causal
    window = render(replace(LLAMA, mask=parse_mask("window(9,9)")), CONFIG).source
    assert window.count("keep &=") == 1
    assert "num_left" in window


@pytest.mark.parametrize(
    "mask, forward, backward",
    [
        ("full", ["k_idx < seqlen_kv"], ["k_idx < seqlen_kv"]),
        (
            "causal",
            ["k_idx < seqlen_kv", "k_idx <= q_idx"],
            ["k_idx < tl.minimum(q_idx + 1, seqlen_kv)"],
        ),
        (
            "window(9,4)",
            ["k_idx < tl.minimum(q_idx + 5, seqlen_kv)", "q_idx - 9 <= k_idx"],
            ["k_idx < tl.minimum(q_idx + 5, seqlen_kv)", "q_idx - 9 <= k_idx"],
        ),
        (
            "causal & kv_prefix(7)",
            ["k_idx < 7", "k_idx < seqlen_kv", "k_idx <= q_idx"],
            ["k_idx < tl.minimum(tl.minimum(7, q_idx + 1), seqlen_kv)"],
        ),
        (
            "causal & dilated(2)",
            ["k_idx < tl.minimum(q_idx + 1, seqlen_kv)", "tl.where(m0 < 0, m0 + 2, m0) == 0"],
            ["k_idx < tl.minimum(q_idx + 1, seqlen_kv)", "tl.where(m0 < 0, m0 + 2, m0) == 0"],
        ),
    ],
)
def test_upper_bounds_of_the_column_are_one_comparison(
    mask: str, forward: list[str], backward: list[str]
) -> None:
    given = parse_mask(mask)
    assert list(keep_source(given, "rows", softmax=True).atoms) == forward
    assert list(keep_source(given, "rows").atoms) == backward


class WithoutMask(ast.NodeTransformer):
    """Leaves of a step what a full tile runs."""

    def visit_If(self, node: ast.If) -> list[ast.stmt]:
        assert ast.unparse(node.test) == "MASKED"
        return node.orelse

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        assert ast.unparse(node.test) == "MASKED"
        return node.orelse


@pytest.mark.slow
def test_full_tiles_have_no_mask_code() -> None:
    for kernel in all_rendered():
        if kernel.kernel.endswith("_scores"):  # one tile each: its mask code stands under an `if`
            masked = kernel.source.split("(tile_n >= full_hi):")[1]
            assert kernel.source.count("keep") == masked.count("keep")
            assert all(line.startswith(" " * 8) for line in masked.splitlines() if "keep" in line)
        elif kernel.kernel != "bwd_preprocess":
            loop = kernel.source.split("# Full tiles")[1].split("# Partial tiles")[0]
            assert "MASKED=False" in loop
            assert "tl.where" not in loop
            functions = [n for n in ast.parse(kernel.source).body if isinstance(n, ast.FunctionDef)]
            (step,) = [one for one in functions if one.name == "_step"]
            step.body.pop(0)  # its docstring
            whole = ast.unparse(step)
            full = ast.unparse(WithoutMask().visit(step))
            assert "MASKED" in whole
            assert "tl.where" not in full
            assert "keep" not in full


def test_the_text_does_not_depend_on_batch_heads_or_lengths() -> None:
    other = AttentionProblem.parse("b1 hq4 hkv1 q17 kv99 d128 bf16 causal")
    for kernel in LARGE_CACHE:
        assert render(LLAMA, CONFIG, kernel) == replace(
            render(other, CONFIG, kernel), problem=LLAMA
        )


def test_the_header_says_how_to_render_again() -> None:
    for kernel in LARGE_CACHE:
        rendered = render(LLAMA, CONFIG, kernel, aligned=False)
        match = re.search(
            r'rerender  tilegen show "(.*)"\n +--kernel (\w+) --config (\w+) --unaligned\n',
            rendered.source,
        )
        assert match
        again = render(
            AttentionProblem.parse(match[1]),
            TileConfig.parse(match[3]),
            match[2],
            aligned=False,  # type: ignore[arg-type]
        )
        assert again.source == rendered.source


def test_integers_are_not_specialised_on() -> None:
    """Every integer argument is inside `do_not_specialize`, and no pointer or float is."""
    for kernel in all_rendered():
        match = re.search(r"do_not_specialize=range\((\d+), (\d+)\)", kernel.source)
        assert match
        inside = [t for _, t in kernel.signature[int(match[1]) : int(match[2])]]
        assert inside == [t for _, t in kernel.signature if t == "i32"]


def test_template_digest_covers_imported_templates() -> None:
    env = environment(resources.data_dir("templates"))
    for kernel in LARGE_CACHE:
        text = (resources.data_dir("templates") / KERNELS[kernel].template).read_text()
        reached = set(jinja2.meta.find_referenced_templates(env.parse(text)))
        matches = set(re.findall(r'{%-?\s*(?:import|from|include|extends)\s+"([^"]+)"', text))
        assert matches == reached >= {"_partials.jinja"}
        assert identity.template_digest(kernel) in render(LLAMA, CONFIG, kernel).source


def test_templates_follow_their_rules() -> None:
    for path in resources.data_dir("templates").rglob("*.jinja"):
        lines = path.read_text().splitlines()
        assert len(lines) <= 200, path.name
        for line in lines:
            if re.match(r"\s*{%(?!-)", line):  # control tags stand alone
                assert re.fullmatch(r"\s*({%.*?%})\s*", line), (path.name, line)
            assert "| trim" not in line  # whole lines need none


def test_a_misspelt_name_raises() -> None:
    with pytest.raises(jinja2.UndefinedError):
        environment(resources.data_dir("templates")).from_string("{{ no_such_name }}").render()


@pytest.mark.parametrize(
    "head_dim, chunks",
    [
        (8, (16,)),
        (16, (16,)),
        (60, (64,)),
        (64, (64,)),
        (72, (64, 16)),
        (80, (64, 16)),
        (96, (64, 32)),
        (100, (128,)),
        (128, (128,)),
        (160, (128, 32)),
        (192, (128, 64)),
        (200, (256,)),
        (256, (256,)),
    ],
)
def test_head_dims_are_split_where_that_wastes_less(head_dim: int, chunks: tuple[int, ...]) -> None:
    assert head_dim_chunks(head_dim) == chunks


def test_emitted_files_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    rendered = render(LLAMA, CONFIG)
    path = kernel_files.write(rendered)
    assert path == tmp_path / "kernels" / rendered.digest / "fwd.py"
    assert path.read_text() == rendered.source
    path.write_text("half")
    assert kernel_files.write(rendered).read_text() == rendered.source
    assert [p.name for p in path.parent.iterdir()] == ["fwd.py"]


def test_a_damaged_file_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        kernel_files, "_modules", BoundedCache(9)
    )  # what other tests loaded is not read again
    for i, damage in enumerate(("", "x = 1\n", "def launch(", "raise RuntimeError('no')\n")):
        config = replace(CONFIG, num_stages=1 + i)
        path = kernel_files.write(render(LLAMA, config))
        path.write_text(damage)
        emitted = kernel_files.emitted(LLAMA, config, "fwd", aligned=True)
        assert emitted == render(LLAMA, config)
        assert path.read_text() == render(LLAMA, config).source
    assert len([r for r in caplog.records if "damaged" in r.message]) == 4


def test_a_cache_that_cannot_be_written_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(Unsupported, match=r"cannot write .*TILEGEN_CACHE_DIR"):
        kernel_files.write(render(LLAMA, CONFIG))


def test_a_digest_tells_kernels_apart() -> None:
    requests = {
        identity.kernel_digest(problem, config, kernel, aligned)
        for problem in (LLAMA, replace(LLAMA, dtype="fp16"), replace(LLAMA, head_dim_v=64))
        for config in (CONFIG, replace(CONFIG, num_stages=2))
        for kernel in LARGE_CACHE
        for aligned in (True, False)
    }
    assert len(requests) == 3 * 2 * 4 * 2
