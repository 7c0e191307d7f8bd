"""Bundles at run time: calls that they serve, refuse, or leave to the compiler."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tilegen
from tests.support import warm
from tests.support.bundles import PROBLEMS, copy, write_bundle
from tilegen import bundles, cpu
from tilegen.bundles.folder import NOTES, Folder
from tilegen.bundles.manifest import MANIFEST, Manifest
from tilegen.bundles.served import Bundle, load_bundle, runs_on
from tilegen.cli.main import app
from tilegen.errors import Unsupported
from tilegen.gpus.spec import GpuSpec, gpu
from tilegen.kernels.spec import Direction
from tilegen.problem import AttentionProblem

H200 = gpu("h200")


@pytest.fixture(autouse=True)
def nothing_stays_loaded() -> Any:
    yield
    bundles.loaded.clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundle")
    write_bundle([AttentionProblem.parse(text) for text in PROBLEMS], [gpu("a100"), H200], out)
    return out


def found(
    bundle: Bundle,
    text: str,
    direction: Direction = "forward",
    spec: GpuSpec = H200,
    aligned: bool = True,
) -> list[str] | None:
    """Return the files that serve a problem."""
    binaries = bundle.find(AttentionProblem.parse(text), spec, direction, aligned=aligned)
    return binaries and [one.file for one in binaries]


def test_two_runs_into_one_folder_may_both_finish(tmp_path: Path) -> None:
    manifest = Manifest(versions={}, problems=(), binaries=())
    runs = [Folder(tmp_path, {}) for _ in range(2)]
    assert {one.finish(manifest) for one in runs} == {tmp_path / MANIFEST}
    assert [file.name for file in tmp_path.iterdir()] == [MANIFEST]


@pytest.mark.slow
def test_any_batch_heads_and_lengths_are_served_by_the_nearest(folder: Path) -> None:
    bundle = Bundle(folder)
    short, long = (
        next(s for s in bundle.manifest.problems if s.problem == key and s.arch == "sm_90")
        for key in (AttentionProblem.parse(text).key for text in PROBLEMS[:2])
    )
    of_short, of_long = (list(s.passes["backward"].binaries.values()) for s in (short, long))
    assert of_short != of_long
    for text, sizes in (
        ("b1 hq8 hkv2 q512 d64 bf16 causal", of_short),
        ("b3 hq16 hkv4 q100 kv700 d64 bf16 causal", of_short),
        ("b1 hq4 hkv1 q30000 d64 bf16 causal", of_long),
    ):
        assert found(bundle, text, "backward") == sizes


@pytest.mark.parametrize(
    "text",
    [
        "hq8 hkv2 q512 d128 bf16 causal",
        "hq8 hkv2 q512 d64 fp16 causal",
        "hq8 hkv4 q512 d64 bf16 causal",
        "hq8 hkv2 q512 d64 bf16 full",
        "hq8 hkv2 q512 d64 bf16 causal score(20.0*tanh(0.05*s))",
    ],
)
def test_calls_without_a_binary_are_compiled(text: str, folder: Path) -> None:
    assert found(Bundle(folder), text) is None


def test_addresses_that_are_not_aligned_are_left_to_the_usual_way(folder: Path) -> None:
    assert found(Bundle(folder), PROBLEMS[0], aligned=False) is None


def test_a_forward_does_not_depend_on_trained_tensors(folder: Path) -> None:
    bundle, fixed = Bundle(folder), PROBLEMS[3].replace("float32+", "float32")
    assert found(bundle, PROBLEMS[3])
    assert found(bundle, fixed) == found(bundle, PROBLEMS[3])
    assert found(bundle, PROBLEMS[3], "backward")
    assert found(bundle, fixed, "backward") is None


def test_all_kernels_of_a_family_come_together(folder: Path) -> None:
    bundle, problem = Bundle(folder), AttentionProblem.parse(PROBLEMS[2])
    binaries = bundle.find(problem, H200, "backward", aligned=True)
    assert binaries
    assert [one.kernel for one in binaries] == [
        *("bwd_preprocess", "bwd_scores", "bwd_columns", "bwd_rows")
    ]


def test_a_gpu_with_less_shared_memory_gets_no_binary_that_does_not_fit(folder: Path) -> None:
    bundle = Bundle(folder)
    files = found(bundle, PROBLEMS[0], spec=gpu("a100"))
    assert files
    assert files[0].startswith("sm_80/")
    needs = bundle.manifest.by_file[files[0]].resources.shared_bytes
    small = replace(gpu("rtx3090"), smem_per_block=needs)
    assert found(bundle, PROBLEMS[0], spec=small) == files
    assert found(bundle, PROBLEMS[0], spec=replace(small, smem_per_block=needs - 1)) is None


@pytest.mark.slow
def test_binaries_for_this_architecture_come_first(tmp_path: Path) -> None:
    far, near = (AttentionProblem.parse(f"hq8 q{n} d64 bf16 causal") for n in (65536, 512))
    for gpus in (("a100", "rtx3090"), ("rtx3090", "a100")):
        write_bundle([far, near], [gpu(name) for name in gpus], tmp_path)
        bundle = Bundle(tmp_path)
        for spec in (gpu("a100"), gpu("rtx3090")):
            files = found(bundle, "hq8 q512 d64 bf16 causal", spec=spec)
            assert files
            assert files[0].startswith(spec.arch)


@pytest.mark.parametrize(
    "arch, on, runs",
    [
        ("sm_80", "sm_80", True),
        ("sm_80", "sm_86", True),
        ("sm_80", "sm_89", True),
        ("sm_86", "sm_80", False),
        ("sm_80", "sm_90", False),
        ("sm_90", "sm_90", True),
        ("sm_90", "sm_100", False),
        ("sm_100", "sm_103", False),
        ("sm_100", "sm_120", False),
        ("gfx942", "gfx942", True),
        ("gfx942", "sm_90", False),
    ],
)
def test_where_binaries_run(arch: str, on: str, runs: bool) -> None:
    assert runs_on(arch, on) is runs


def seeing(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Have PyTorch see these GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr("tilegen.gpus.spec.detect", lambda index: gpu(names[index]))


def test_loading_needs_binaries_for_the_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilegen.bundles.driver.driver", lambda: None)
    seeing(monkeypatch, "b200", "h200")
    bundle = load_bundle(folder)
    assert bundles.loaded == [bundle]
    seeing(monkeypatch, "b200")
    with pytest.raises(Unsupported) as error:
        load_bundle(folder)
    assert str(error.value) == (
        f"{folder} has binaries for sm_80, sm_90, and this GPU is an sm_100 (NVIDIA B200): "
        "generate with --arch sm_100"
    )


def test_kernels_that_nothing_gives_are_refused_by_what_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGEN_CPU", "kernels")
    monkeypatch.setattr(
        cpu, "why_not_compiled", lambda: "llvmlite is not installed; run pip install it"
    )
    q = torch.randn(1, 2, 24, 16)
    none = "none can be compiled here: llvmlite is not installed; run pip install it; without"
    with pytest.raises(Unsupported, match=f"no kernels for 'b1 hq2 .* full': {none}"):
        tilegen.attention(q, q, q)
    load_bundle(folder)
    lacking = "no loaded bundle has its forward for this processor, and "
    with pytest.raises(Unsupported, match=f"no kernels for 'b1 hq2 .* full': {lacking}{none}"):
        tilegen.attention(q, q, q)


def test_on_amd_a_bundle_is_not_served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeing(monkeypatch, "mi300x")
    with pytest.raises(Unsupported, match=r"expected an NVIDIA GPU .* got AMD Instinct MI300X"):
        load_bundle(folder)
    assert bundles.loaded == []


def test_without_a_gpu_a_bundle_is_checked_and_loads(folder: Path) -> None:
    first, again = load_bundle(folder), load_bundle(folder)
    assert bundles.loaded == [again]
    assert repr(again).startswith(f"Bundle({str(folder)!r}: 4 problems, ")
    printed = CliRunner().invoke(app, ["bundle", str(folder)]).stdout.splitlines()[-1]
    counted = json.loads(CliRunner().invoke(app, ["bundle", str(folder), "--json"]).stdout)
    assert len({served.problem for served in again.manifest.problems}) == 4
    assert printed.startswith(f"{counted['problems']} problems; "), "sm_80 and sm_90 count once"
    assert counted["problems"] == 4
    again.unload()
    first.unload()
    assert bundles.loaded == []


def test_without_nvidias_bindings_it_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilegen.bundles.driver import driver

    seeing(monkeypatch, "h200")
    driver.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(Unsupported, match=r"pip install 'tilegen\[bundle\]'"):
        load_bundle(folder)
    driver.cache_clear()


def test_damage_is_refused_with_the_name_of_the_file(folder: Path, tmp_path: Path) -> None:
    copy(folder, tmp_path)
    bundle = load_bundle(tmp_path)
    binary = bundle.manifest.binaries[0]
    path = tmp_path / binary.file
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"?")
    with pytest.raises(Unsupported, match=f"^{binary.file} in .* not what the manifest says"):
        load_bundle(tmp_path)
    with pytest.raises(Unsupported, match=f"^{binary.file} in .* not what the manifest says"):
        bundle.function(binary)  # damaged since it was loaded
    path.unlink()
    (tmp_path / bundle.manifest.binaries[1].file).unlink()
    with pytest.raises(Unsupported, match=f"^{binary.file} and 1 more in .* is missing"):
        load_bundle(tmp_path)


def test_a_folder_that_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"expected a bundle in .* make one with: tilegen gen"):
        load_bundle(tmp_path)
    (tmp_path / MANIFEST).mkdir()
    with pytest.raises(Unsupported, match="expected a regular file"):
        load_bundle(tmp_path)


def test_a_manifest_says_the_same_after_reading(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    assert Manifest.from_json(text).to_json() == text


def test_kernels_with_the_same_code_have_binaries_of_their_own(tmp_path: Path) -> None:
    """A preprocess kernel does not depend on the mask, and each mask's has a digest of its own."""
    problems = [AttentionProblem.parse(f"hq8 q512 d64 bf16 {mask}") for mask in ("causal", "full")]
    write_bundle(problems, [H200], tmp_path)
    binaries = load_bundle(tmp_path).manifest.binaries
    results = [one for one in binaries if one.kernel == "bwd_preprocess"]
    assert len({one.file for one in results}) == len({one.digest for one in results}) == 2


@pytest.mark.parametrize("which", ["manifest", "binary", "source"])
def test_pipes_in_a_bundle_are_not_waited_for(which: str, folder: Path, tmp_path: Path) -> None:
    copy(folder, tmp_path)
    binary = Bundle(folder).manifest.binaries[0]
    name = {"manifest": MANIFEST, "binary": binary.file, "source": binary.source}[which]
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(Unsupported, match=r"a regular file|is missing or not what"):
        load_bundle(tmp_path)


def test_pipes_where_a_bundle_is_made_are_not_waited_for(tmp_path: Path) -> None:
    for name in (MANIFEST, NOTES):
        os.mkfifo(tmp_path / name)
    problem = AttentionProblem.parse("hq8 q512 d64 bf16 causal")
    write_bundle([problem], [H200], tmp_path, ["forward"])
    assert load_bundle(tmp_path)


SERVE = """
import sys
from pathlib import Path
import torch
import tilegen
from tests.support.bundles import StandIn
from tilegen import cpu
from tilegen.bundles.served import Bundle
from tilegen.gpus.spec import gpu

launched = []
Bundle.function = lambda self, one: StandIn(one, lambda *_: launched.append(one.kernel))
cpu.serves_calls = cpu.is_interpreting = lambda: True  # CPU tensors go the way of a GPU's
tilegen.load_bundle(sys.argv[1])
q, k, v = (torch.zeros(1, h, 700, 64, dtype=torch.bfloat16, requires_grad=True) for h in (8, 2, 2))
out = tilegen.attention(q, k, v, mask=tilegen.causal())
out.sum().backward()
print(*launched)
print(*sorted({"triton", "jinja2", "sympy", "optuna"} & set(sys.modules)))
"""


def test_serving_loads_no_compiler_no_templates_and_no_algebra(folder: Path) -> None:
    said = warm.output(SERVE, str(folder))
    assert said.splitlines() == ["fwd bwd_preprocess bwd_dq bwd_dkdv_split bwd_dkdv_sum", ""]


def test_calls_go_back_to_the_usual_way_when_it_is_unloaded(folder: Path) -> None:
    from tilegen.runtime import plans

    plans.by_call.get("a call", lambda: None)  # type: ignore[arg-type, return-value]
    bundle = tilegen.load_bundle(folder)
    assert not len(plans.by_call)
    plans.by_call.get("a call", lambda: None)  # type: ignore[arg-type, return-value]
    bundle.unload()
    assert not len(plans.by_call)
