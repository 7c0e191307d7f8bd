"""Shared objects of bundles agree with the reference, without LLVM, Triton or a compiler, and only
on processors that they are for."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import tilegen
from tests.support import warm
from tests.support.bundles import RUNNABLE, needs_processor, write_cpu_bundle
from tilegen import bundles, cpu
from tilegen.bundles import on_cpu
from tilegen.bundles.manifest import MANIFEST, Manifest
from tilegen.bundles.served import Bundle, load_bundle
from tilegen.check.reference import TORCH_DTYPES, attention_reference
from tilegen.cpu import processors, shared_objects
from tilegen.cpu.processors import PROCESSORS
from tilegen.errors import BuildFailed, InvalidRecord, Unsupported
from tilegen.integrations import hub
from tilegen.launch.changes import Changes
from tilegen.problem import AttentionProblem
from tilegen.runtime.call import problem_of
from tilegen.version import __version__

pytestmark = needs_processor
PROBLEM = "b2 hq4 hkv2 q70 kv133 d40/24 {} causal(bottom_right)"
MASK = tilegen.causal("bottom_right")
GOLDEN = Path(__file__).parents[1] / "golden"
BEST = RUNNABLE[0] if RUNNABLE else ""


@pytest.fixture(autouse=True)
def _unload() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    for bundle in [*bundles.loaded]:
        bundle.unload()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundle")
    write_cpu_bundle([PROBLEM.format("fp32")], [BEST], out)
    return out


@pytest.fixture
def only_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every kernel come from a bundle: compiling one here is a failure."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("not from the bundle")

    monkeypatch.setattr(cpu, "load", refuse)


def leaves_of(problem: AttentionProblem) -> tuple[torch.Tensor, ...]:
    shapes = (
        (problem.num_heads_q, problem.seqlen_q, problem.head_dim_qk),
        (problem.num_heads_kv, problem.seqlen_kv, problem.head_dim_qk),
        (problem.num_heads_kv, problem.seqlen_kv, problem.head_dim_v),
    )
    drawn = torch.Generator().manual_seed(0)
    dtype = TORCH_DTYPES[problem.dtype]
    return tuple(
        torch.randn((problem.batch, *shape), generator=drawn).to(dtype).requires_grad_()
        for shape in shapes
    )


def results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """Return out and gradients of a call with PROBLEM's mask."""
    out = tilegen.attention(q, k, v, mask=tilegen.causal("bottom_right"))
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    return [out.detach(), *torch.autograd.grad((out.float() * weight).sum(), (q, k, v))]


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, _ = attention_reference(*exact, mask=tilegen.causal("bottom_right"))
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), exact)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch,dtype", [*((arch, "bf16") for arch in RUNNABLE), (BEST, "fp32"), (BEST, "fp16")]
)
@pytest.mark.usefixtures("only_bundles")
def test_a_bundle_agrees_with_the_reference(arch: str, dtype: str, tmp_path: Path) -> None:
    text = PROBLEM.format(dtype)
    write_cpu_bundle([text], [arch], tmp_path)
    bundle = load_bundle(tmp_path)
    leaves = leaves_of(AttentionProblem.parse(text))
    tolerance = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 3e-2}[dtype]
    ours, theirs = results(*leaves), expected(*leaves)
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=2 * tolerance)
    assert bundle._on_cpu.keys() == bundle.manifest.by_file.keys()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert all(map(torch.equal, results(*leaves), ours))


@pytest.mark.slow
@pytest.mark.usefixtures("only_bundles")
def test_a_trained_table_has_the_same_bits_for_any_threads(tmp_path: Path) -> None:
    table = torch.linspace(-1, 1, 4 * 61).reshape(4, 61).requires_grad_()
    score = tilegen.relative_bias(table)
    q = torch.randn(1, 4, 300, 16, generator=torch.Generator().manual_seed(1))
    problem = problem_of(q, q, q, Changes(tilegen.causal(), score))
    write_cpu_bundle([problem], [BEST], tmp_path)
    bundle = load_bundle(tmp_path)
    added = {name for one in bundle.manifest.binaries if one.on_cpu for name in one.on_cpu.added}
    assert added == {"dc0_ptr"}
    results: list[torch.Tensor] = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out = tilegen.attention(q, q, q, mask=tilegen.causal(), score=score)
        results += torch.autograd.grad(out.square().sum(), table)
    assert all(torch.equal(one, results[0]) for one in results)
    exact = q.double()
    wanted = table.detach().double().requires_grad_()
    out, _ = attention_reference(
        *(exact,) * 3, mask=tilegen.causal(), score=tilegen.relative_bias(wanted)
    )
    (gradient,) = torch.autograd.grad(out.square().sum(), wanted)
    torch.testing.assert_close(results[0].double(), gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("only_bundles")
def test_pages_and_split_keys_come_from_a_bundle(tmp_path: Path) -> None:
    problem = AttentionProblem.parse("b3 hq4 hkv2 q2 kv48 d16 fp32 full page16")
    write_cpu_bundle([problem, "hq8 hkv2 q1 kv4096 d16 fp32"], [BEST], tmp_path)
    bundle = load_bundle(tmp_path)
    q, pages = torch.randn(3, 4, 2, 16), torch.randn(9, 16, 2, 16)
    table, lengths = torch.randperm(9).view(3, 3), torch.tensor([40, 2, 33])
    for integers in ((table, lengths), (table.int(), lengths.int())):
        out = tilegen.attention_paged(q, pages, pages, *integers, mask=problem.mask)
        for i, length in enumerate(lengths.tolist()):
            keys = pages[table[i]].flatten(0, 1)[:length].transpose(0, 1)[None]
            wanted, _ = attention_reference(q[i : i + 1], keys, keys, mask=problem.mask)
            torch.testing.assert_close(out[i : i + 1], wanted, rtol=1e-5, atol=1e-5)
    q, k = torch.randn(1, 8, 1, 16), torch.randn(1, 2, 4096, 16)
    wanted, _ = attention_reference(q, k, k, mask=problem.mask)
    torch.testing.assert_close(tilegen.attention(q, k, k), wanted, rtol=1e-5, atol=1e-5)
    kernels = {bundle.manifest.by_file[file].kernel for file in bundle._on_cpu}
    assert kernels == {"fwd_paged", "fwd_split", "fwd_combine"}


SERVE = """
import os, sys
for name in ("llvmlite", "llvmlite.binding", "triton", "jinja2", "optuna"):
    sys.modules[name] = None  # as if it were not installed
os.environ["PATH"] = ""
os.environ.pop("TILEGEN_CPU", None)
import torch
import tilegen
tilegen.load_bundle(sys.argv[1])
q, k, v = (
    torch.randn(2, h, n, d, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for h, n, d in ((4, 70, 40), (2, 133, 40), (2, 133, 24))
)
out = tilegen.attention(q, k, v, mask=tilegen.causal("bottom_right"))
out.sum().backward()
print(tuple(out.shape), "sympy" in sys.modules, *tilegen.load_bundle(sys.argv[1])._on_cpu)
keys = torch.randn(2, 2, 133, 48)
print(tuple(tilegen.attention(torch.randn(2, 4, 70, 48), keys, keys).shape))
"""


@pytest.mark.slow
def test_serving_needs_no_llvm_no_triton_and_no_algebra(folder: Path) -> None:
    """PyTorch computes calls that the bundle lacks."""
    assert warm.output(SERVE, str(folder)).splitlines() == [
        "(2, 4, 70, 24) False",
        "(2, 4, 70, 48)",
    ]


@pytest.mark.slow
def test_a_forward_without_a_backward_serves_calls_without_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cpu_bundle([PROBLEM.format("fp32")], [BEST], tmp_path, ["forward"])
    monkeypatch.setattr(cpu, "why_not_compiled", lambda: "llvmlite is not installed")
    monkeypatch.setattr("tilegen.runtime.dispatch.torch_run", by_torch := _Counted())
    bundle = load_bundle(tmp_path)
    q, k, v = leaves_of(AttentionProblem.parse(PROBLEM.format("fp32")))
    with torch.no_grad():
        tilegen.attention(q, k, v, mask=tilegen.causal("bottom_right"))
    assert len(bundle._on_cpu) == 1
    assert by_torch.calls == 0
    results(q, k, v)
    assert by_torch.calls == 1


class _Counted:
    calls = 0

    def __call__(self, *given: object) -> object:
        from tilegen.launch.autograd import torch_run

        self.calls += 1
        return torch_run(*given)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------
# Objects


@pytest.mark.slow
def test_objects_are_for_every_processor_and_need_no_other_library(tmp_path: Path) -> None:
    """The kernel with the most to link: it clears copies, and calls products."""
    text = "hq4 q70 d16 bf16 causal score(s+t0[h,k-q+512],float32+)"
    path = write_cpu_bundle([text], [*PROCESSORS], tmp_path)
    manifest = Manifest.from_json(path.read_text())
    assert manifest.architectures == tuple(PROCESSORS)
    if not (nm := shutil.which("nm")):
        pytest.skip("needs nm, which binutils has")
    for binary in manifest.binaries:
        command = [nm, "--dynamic", "--portability", tmp_path / binary.file]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        symbols = {tuple(line.split()[:2]) for line in ran.stdout.splitlines()}
        assert symbols == {(binary.function, "T"), (binary.function + "_launch", "T")}


def test_an_undefined_symbol_is_an_error() -> None:
    from tilegen.cpu import build, jit
    from tilegen.emit.render import render
    from tilegen.kernels.config import TileConfig

    problem = AttentionProblem.parse("hq1 q16 d16 fp32 full")
    source = build.source_of(render(problem, TileConfig.parse("m16n16w4s1")))
    target = PROCESSORS[BEST].target
    driver = jit.driver
    with pytest.MonkeyPatch.context() as patch:
        calls = (
            "declare void @elsewhere()\ndefine void @caller() { call void @elsewhere() ret void }"
        )
        patch.setattr(jit, "driver", lambda *given: driver(*given) + calls)
        made = build.compiled(source, target, symbol="f")
    linker = shared_objects.linker_of(PROCESSORS[BEST])
    with pytest.raises(BuildFailed, match=f"f for {BEST}: .* failed: .*elsewhere"):
        shared_objects._linked(made.binary, PROCESSORS[BEST], linker, "f")


@pytest.mark.slow
def test_the_same_request_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    write_cpu_bundle([PROBLEM.format("fp32")], [BEST], tmp_path)
    files = [path.relative_to(folder) for path in folder.rglob("*.*")]
    assert len(files) > 8
    assert all((folder / file).read_bytes() == (tmp_path / file).read_bytes() for file in files)


def test_without_a_linker_the_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_objects.shutil, "which", lambda _: None)
    monkeypatch.setattr(shared_objects.platform, "machine", lambda: "x86_64")
    shared_objects.linker_of.cache_clear()
    said = r"no linker for neoverse-v2: looked for aarch64-linux-gnu-ld, ld\.lld; install one"
    with pytest.raises(Unsupported, match=said):
        tilegen.generate(PROBLEM.format("fp32"), arch="neoverse-v2", out=tmp_path)
    assert not (tmp_path / MANIFEST).exists()
    shared_objects.linker_of.cache_clear()


def test_an_unknown_architecture_is_answered_with_all(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"sm_90.*for CPUs one of neoverse-v2, znver4, x86-64-v4"):
        tilegen.generate(PROBLEM.format("fp32"), arch="x86-64-v5", out=tmp_path)


# --------------------------------------------------------------------------------------------------
# What is refused


def test_another_processor_is_refused_before_anything_is_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = load_bundle(folder)
    binary = bundle.manifest.binaries[0]
    assert binary.on_cpu
    lacking = binary.on_cpu.features[0]
    rest = processors.host_features() - {lacking}
    monkeypatch.setattr(processors, "host_features", lambda: rest)
    monkeypatch.setattr(shared_objects.ctypes, "CDLL", None)
    with pytest.raises(Unsupported, match=f"has binaries for {BEST}, .* for {BEST}: {lacking}; "):
        load_bundle(folder)
    problem = AttentionProblem.parse(PROBLEM.format("fp32"))
    assert bundle.find(problem, None, "forward", aligned=True) is None
    with pytest.raises(Unsupported, match=f"is for {BEST}, and this processor lacks {lacking}; "):
        on_cpu.opened(folder, binary, problem)


@pytest.mark.slow
def test_the_best_object_that_runs_here_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(RUNNABLE) < 2:
        pytest.skip("one --arch is for this processor")
    write_cpu_bundle([PROBLEM.format("fp32")], RUNNABLE[:2][::-1], tmp_path, ["forward"])
    bundle = load_bundle(tmp_path)
    problem = AttentionProblem.parse(PROBLEM.format("fp32"))
    (best,) = bundle.find(problem, None, "forward", aligned=True) or []
    assert best.arch == BEST
    rest = processors.host_features() - set(PROCESSORS[BEST].features)
    rest |= set(PROCESSORS[RUNNABLE[1]].features)
    monkeypatch.setattr(processors, "host_features", lambda: rest)
    (second,) = bundle.find(problem, None, "forward", aligned=True) or []
    assert second.arch == RUNNABLE[1]


def test_a_changed_object_is_not_opened(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "copied")
    bundle = load_bundle(copied)
    binary = bundle.manifest.binaries[0]
    file = copied / binary.file
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(Unsupported, match="is missing or not what the manifest says"):
        on_cpu.opened(copied, binary, AttentionProblem.parse(PROBLEM.format("fp32")))
    with pytest.raises(Unsupported, match="is missing or not what the manifest says"):
        load_bundle(copied)


def test_an_object_that_another_user_could_write_is_not_opened(folder: Path) -> None:
    said = "since another user could have written it: .* can be written to by anybody"
    with tempfile.TemporaryDirectory() as own:  # pytest's folders are closed to others
        Path(own).chmod(0o755)
        copied = shutil.copytree(folder, Path(own, "copied"))
        copied.chmod(0o755)
        bundle = load_bundle(copied)
        binary = bundle.manifest.binaries[0]
        (copied / binary.file).chmod(0o666)
        with pytest.raises(Unsupported, match=said):
            on_cpu.opened(copied, binary, AttentionProblem.parse(PROBLEM.format("fp32")))
        with pytest.raises(Unsupported, match=said):
            load_bundle(copied)


@pytest.mark.parametrize(
    "written,instead,said",
    [
        ('"scratch_bytes": ', '"scratch_bytes": -', "on_cpu.scratch_bytes must be an int"),
        ('"written": [\n', '"written": [\n     1,\n', "on_cpu.written.0 must be printable text"),
        ('"on_cpu"', '"on_gpu"', "expected the field binaries"),
        ('"threads": 1,', '"threads": 32,', "threads must be 1, got 32"),
    ],
)
def test_a_manifest_that_was_edited_is_refused(
    written: str, instead: str, said: str, folder: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(folder, tmp_path / "copied")
    text = (copied / MANIFEST).read_text()
    assert written in text
    (copied / MANIFEST).write_text(text.replace(written, instead, 1))
    with pytest.raises((Unsupported, InvalidRecord), match=said):
        load_bundle(copied)


def test_another_feature_list_is_refused(folder: Path, tmp_path: Path) -> None:
    """Code compiled for more features than in the manifest would crash the process."""
    copied = shutil.copytree(folder, tmp_path / "copied")
    first = PROCESSORS[BEST].features[0]
    path = copied / MANIFEST
    path.write_text(path.read_text().replace(f'"{first}"', '"other"', 1))
    with pytest.raises(Unsupported, match="features must be"):
        load_bundle(copied)


def test_a_manifest_reads_as_written(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    assert Manifest.from_json(text).to_json() == text


def test_no_repository_of_kernels_is_made_of_objects(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="has no binaries for GPUs"):
        hub.lay_out(folder, tmp_path)


@pytest.mark.slow
def test_bounds_are_checked_by_kernels_compiled_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = load_bundle(folder)
    monkeypatch.setenv("TILEGEN_CHECK", "bounds")
    results(*leaves_of(AttentionProblem.parse(PROBLEM.format("fp32"))))
    assert not bundle._on_cpu
    assert Bundle(folder).why_not_ours() == ""


# --------------------------------------------------------------------------------------------------
# The format before: its manifest has no digest of a launch


@pytest.fixture
def of_schema_2(tmp_path: Path) -> Path:
    """Return a copy of a bundle for every 64-bit x86 processor, as if this version had made it."""
    if "x86-64" not in RUNNABLE:
        pytest.skip("the bundle is for x86")
    copied = shutil.copytree(GOLDEN / "bundle_of_schema_2", tmp_path / "copied")
    path = copied / MANIFEST
    path.write_text(re.sub(r'"tilegen": "[^"]+"', f'"tilegen": "{__version__}"', path.read_text()))
    return copied


@pytest.mark.usefixtures("only_bundles")
def test_a_bundle_of_the_format_before_is_served(of_schema_2: Path) -> None:
    bundle = load_bundle(of_schema_2)
    (binary,) = bundle.manifest.binaries
    q, k, v = leaves_of(AttentionProblem.parse("b3 hq4 hkv2 q41 d16 fp32 causal"))
    out = tilegen.attention(q.detach(), k.detach(), v.detach(), mask=tilegen.causal())
    assert binary.file in bundle._on_cpu
    wide = (x.detach().double() for x in (q, k, v))
    exact = scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    assert (out - exact).abs().max() < 1e-5


def test_a_bundle_of_the_format_before_with_other_arguments_is_refused(of_schema_2: Path) -> None:
    path = of_schema_2 / MANIFEST
    text = path.read_text().replace('"stride_qb"', '"other"').replace('"stride_qh"', '"stride_qb"')
    path.write_text(text.replace('"other"', '"stride_qh"'))
    with pytest.raises(Unsupported, match="argument 5 must be stride_qb of i32, got stride_qh"):
        load_bundle(of_schema_2)


def test_a_launch_that_was_changed_is_refused(folder: Path, tmp_path: Path) -> None:
    """Even where the digest of its file fits."""
    copied = shutil.copytree(folder, tmp_path / "copied")
    text = (copied / MANIFEST).read_text()
    launches = re.findall(r'"launch_sha256": "([0-9a-f]{64})"', text)
    for digest in launches:
        text = text.replace(digest, digest[::-1])
    (copied / MANIFEST).write_text(text)
    load_bundle(copied)
    with pytest.raises(Unsupported, match="not what the manifest says"):
        tilegen.attention(*leaves_of(AttentionProblem.parse(PROBLEM.format("fp32"))), mask=MASK)
