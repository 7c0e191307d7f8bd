"""Ahead of time: the output of `tilegen generate`, and compiling when something fails."""

import hashlib
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.problems import used
from tilegen.bundles.building import BuiltKernel, generate
from tilegen.bundles.folder import NOTES
from tilegen.bundles.manifest import Manifest
from tilegen.bundles.served import Bundle
from tilegen.choose.families import kernels_of
from tilegen.cli.main import main
from tilegen.compiling import workers
from tilegen.compiling.acceptable import first_that_fits, why_not_spilled
from tilegen.compiling.compiler import CompiledKernel
from tilegen.compiling.workers import compile_many
from tilegen.emit import kernel_files
from tilegen.emit.identity import RenderedKernel
from tilegen.emit.render import render
from tilegen.errors import BuildFailed
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import LARGE_CACHE
from tilegen.kernels.spec import Direction
from tilegen.problem import AttentionProblem

PROBLEM = AttentionProblem.parse("hq8 hkv2 q256 d32 fp16 causal")


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.usefixtures("shared_compiler", "small_tiles")
def test_generate_writes_kernels_binaries_and_a_manifest(tmp_path: Path) -> None:
    seen: list[BuiltKernel] = []
    path = generate(
        [PROBLEM, PROBLEM], [gpu("h200"), gpu("mi300x")], tmp_path, on_kernel=seen.append
    )
    manifest = Manifest.from_json(path.read_text())
    binaries = manifest.binaries
    assert [(binary.kernel, binary.arch) for binary in binaries] == [
        (kernel, arch) for arch in ("sm_90", "gfx942") for kernel in LARGE_CACHE
    ]
    assert [binary.binary for binary in seen] == list(binaries)
    assert [binary.problems_done for binary in seen] == [0, 0, 0, 1, 1, 1, 1, 2]
    for binary in binaries:
        assert f"def {binary.function}(" in (tmp_path / binary.source).read_text()
        code = (tmp_path / binary.file).read_bytes()
        assert code[:4] == b"\x7fELF"
        assert binary.function.encode() in code
        spec = gpu("h200" if binary.arch == "sm_90" else "mi300x")
        assert binary.resources.shared_bytes <= spec.smem_per_block
        assert not why_not_spilled(binary.resources.spill_bytes)
        assert binary.threads == binary.config.num_warps * (32 if binary.arch == "sm_90" else 64)
        assert [type_ for _, type_ in binary.arguments].count("i32") >= 8
    assert set(digests(tmp_path)) == {
        "manifest.json",
        *(name for binary in binaries for name in (binary.file, binary.source)),
    }
    for served in manifest.problems:
        assert served.serves == "b1 hq4 hkv1 q1024 kv1024 d32 fp16 causal"
        for direction, pass_ in served.passes.items():
            assert tuple(pass_.binaries) == kernels_of(PROBLEM, gpu(served.gpu), direction)
            assert set(pass_.config_from.values()) == {"model"}


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
def test_the_same_request_gives_the_same_bytes_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / f"cache of {name}"))
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / f"Triton's of {name}"))
        monkeypatch.setattr("tilegen.bundles.building.Pool", partial(workers.Pool, 1))
        kernel_files._modules.clear()
        generate([PROBLEM], [gpu("a100")], tmp_path / name, directions=["forward"])
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


@pytest.mark.slow
@pytest.mark.usefixtures("shared_compiler", "small_tiles")
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from functools import partial
from pathlib import Path
from tests.support.bundles import rank_small_tile
from tilegen.compiling.workers import Pool
from tilegen.bundles import building
from tilegen.bundles.building import generate
from tilegen.gpus.spec import gpu
from tilegen.problem import AttentionProblem
def on_kernel(made):
    if made.binary.kernel == "bwd_dkdv":
        os.kill(os.getpid(), signal.SIGKILL)
building.rank = rank_small_tile
building.Pool = partial(Pool, 1)  # a second process takes longer to start than kernels to compile
problems = [AttentionProblem.parse(sys.argv[1])]
generate(problems, [gpu("h200")], Path(sys.argv[2]), on_kernel=on_kernel)
"""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    ended = warm.start(script, PROBLEM.key, str(killed))
    _, said = ended.communicate()
    assert ended.returncode == -signal.SIGKILL, said
    assert (killed / NOTES).is_file()
    assert not (killed / "manifest.json").exists()
    with (killed / NOTES).open("a") as notes:
        notes.write('{"file": "sm_90/torn')
    left = {path: path.stat().st_mtime_ns for path in killed.rglob("*.cubin")}
    assert len(left) >= 3

    generate([PROBLEM], [gpu("h200")], killed)
    assert all(path.stat().st_mtime_ns == at for path, at in left.items())
    generate([PROBLEM], [gpu("h200")], whole)
    assert digests(killed) == digests(whole)


@pytest.mark.slow
@pytest.mark.usefixtures("shared_compiler")
def test_existing_binaries_are_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward: list[Direction] = ["forward"]
    path = generate([PROBLEM], [gpu("h200")], tmp_path, directions=forward)
    first = path.read_bytes()
    (binary,) = Manifest.from_json(path.read_text()).binaries
    compiled: list[str] = []
    compile_ = workers.Pool.compile

    def note(self: Any, rendered: RenderedKernel, *rest: Any, **options: Any) -> Any:
        compiled.append(rendered.digest)
        return compile_(self, rendered, *rest, **options)

    monkeypatch.setattr(workers.Pool, "compile", note)
    assert generate([PROBLEM], [gpu("h200")], tmp_path, directions=forward).read_bytes() == first
    assert binary.digest not in compiled  # though a better proposal may be, which spills
    (tmp_path / binary.file).write_bytes(b"damaged")
    assert generate([PROBLEM], [gpu("h200")], tmp_path, directions=forward).read_bytes() == first
    assert binary.digest in compiled
    assert not Bundle(tmp_path).damaged()

    other = AttentionProblem.parse("hq8 hkv2 q256 d32 fp16 full")
    generate([other], [gpu("h200")], tmp_path, directions=forward)
    assert not (tmp_path / binary.file).exists()  # the new manifest does not name it


@pytest.mark.slow
@pytest.mark.usefixtures("shared_compiler", "small_tiles")
def test_a_kernel_that_cannot_be_built_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_ = workers.Pool.compile

    def fail_for_columns(self: Any, rendered: RenderedKernel, *rest: Any, **options: Any) -> Any:
        if rendered.kernel == "bwd_dkdv":
            return BuildFailed("no")
        return compile_(self, rendered, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(workers.Pool, "compile", fail_for_columns)
        with pytest.raises(BuildFailed, match="1 of 4 kernels could not be built: bwd_dkdv of"):
            generate([PROBLEM], [gpu("h200")], tmp_path)
    assert not (tmp_path / "manifest.json").exists()
    assert len(list(tmp_path.rglob("*.cubin"))) == 3
    generate([PROBLEM], [gpu("h200")], tmp_path)
    assert len(list(tmp_path.rglob("*.cubin"))) == 4


@pytest.mark.usefixtures("shared_compiler")
def test_generate_prints_its_bundle_and_bundle_checks_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["tilegen", *arguments])
        try:
            main()
        except SystemExit as error:
            return int(str(error.code)), "".join(capsys.readouterr())
        return 0, "".join(capsys.readouterr())

    models, out = tmp_path / "models.yaml", str(tmp_path / "dist")
    models.write_text(f"ours:\n  - {PROBLEM.key}\n")
    code, said = run(
        *("generate", "--catalog", str(models), "--forward-only", "--out", out),
        *("--arch", "sm_80", "sm_90"),
    )
    assert code == 0
    assert "sm_80       fwd  " in said
    assert "1 problem; binaries: 1 for sm_80, 1 for sm_90; 0.1 MB" in said
    code, said = run("bundle", out, "--json")
    assert code == 0
    assert json.loads(said)["binaries"] == {"sm_80": 1, "sm_90": 1}
    next(Path(out).glob("sm_90/*")).unlink()
    code, said = run("bundle", out)
    assert code == 1
    assert "missing or not what the manifest says: sm_90/attention_fwd_d32_causal" in said
    code, said = run("generate", PROBLEM.key, "--out", out)
    assert (code, said.count("\n")) == (2, 1)
    assert "expected --arch or --gpu" in said


def test_the_first_that_fits_is_taken() -> None:
    good, large = used(), used(shared_bytes=10**6)
    little, spilling, worse = (used(spill_bytes=spilled) for spilled in (120, 136, 160))
    failed, spec = BuildFailed("no"), gpu("h200")
    assert first_that_fits([failed, large, spilling, good], spec) == 3
    assert first_that_fits([failed, large, spilling, little, good], spec) == 3
    assert first_that_fits([worse, spilling, large], spec) == 1
    with pytest.raises(BuildFailed, match="none did; the first: no"):
        first_that_fits([failed, large], spec)


@pytest.mark.slow
def test_a_compiler_that_dies_is_a_value_and_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aborts inside LLVM end the process; the kernels after it still compile."""
    rendered = render(PROBLEM, TileConfig(block_m=16, block_n=16))
    worker = workers.CompileWorker()
    try:
        process = worker._start()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        outcome = worker.compile(rendered, "sm_90")
        assert isinstance(outcome, BuildFailed)
        assert "the compiler died" in str(outcome)
        assert isinstance(worker.compile(rendered, "sm_90"), CompiledKernel)
    finally:
        worker.close()


@pytest.mark.slow
def test_stopping_early_leaves_no_process_behind() -> None:
    rendered = [render(PROBLEM, TileConfig(block_m=16, block_n=n)) for n in (16, 32, 64)]
    before = compilers()
    results = compile_many(rendered, "sm_90", workers=2)
    next(results)
    assert compilers() > before
    results.close()  # type: ignore[attr-defined]
    assert compilers() == before


def compilers() -> set[Path]:
    """Return the processes that compile for this one, whichever of its threads started them."""
    threads = Path("/proc/self/task").glob("*/children")
    children = [Path("/proc") / pid for one in threads for pid in one.read_text().split()]
    return {
        one for one in children if b"tilegen.compiling.workers" in (one / "cmdline").read_bytes()
    }
