"""Facts that only a fresh process shows: modules that it loads, results equal to another's, and its
output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support import interpreting, warm
from tilegen.check.verification import require, verify
from tilegen.cli.main import app
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem

pytestmark = pytest.mark.oldest

PROBLEM = "hq8 hkv2 q512 d64 bf16 causal"
INTERPRETS = pytest.mark.skipif(bool(interpreting.trouble()), reason=interpreting.trouble())


def test_import_loads_nothing_heavy() -> None:
    """Nor does a mask, a problem or a record: SymPy, Optuna and Jinja belong to single stages."""
    code = """
import sys
import tilegen
others = {"transformers", "diffusers", "kernels", "torchtitan", "vllm", "sglang"}
heavy = {"sympy", "optuna", "jinja2", "torch", "triton", "numpy", *others} & set(sys.modules)
assert not heavy, heavy
tilegen.causal() & tilegen.sliding_window(3, 0)
tilegen.AttentionProblem.parse("hq8 q128 d64 bf16 causal")
tilegen.gpu("h200")
tilegen.attention
heavy = {"sympy", "optuna", "jinja2", *others} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="needs the mmap of Linux")
def test_a_kernel_is_linked_where_free_memory_is_in_pieces(tmp_path: Path) -> None:
    """Between code and constants that are placed apart could lie a tensor of 2 GiB or more, which
    no offset of 32 bits spans."""
    code = """
import ctypes, torch, tilegen
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

def reserve(size):
    nothing, private, anonymous, not_counted = 0, 2, 32, 0x4000
    return libc.mmap(None, size, nothing, private | anonymous | not_counted, -1, 0)

q = torch.randn(1, 2, 40, 16)
tilegen.attention(q, q, q)  # what else is loaded has its place before
for _ in range(60000):  # the system takes the highest gap that is large enough
    reserve(4 * 4096)
pages = [reserve(4096) for _ in range(100000)]
large = reserve(2**33)
for size in (4 * 4096, 2 * 4096):
    while reserve(size) > large:
        pass
for page in pages[-40::2]:
    libc.munmap(page, 4096)
expected = torch.nn.functional.scaled_dot_product_attention(*[q[..., :8].double()] * 3)
out = tilegen.attention(*[q[..., :8].contiguous()] * 3)
assert (out - expected).abs().max() < 1e-5
"""
    own = {**os.environ, "TILEGEN_CACHE_DIR": str(tmp_path), "TILEGEN_CPU": ""}
    subprocess.run([sys.executable, "-c", code], env=own, check=True)


@INTERPRETS
def test_a_kernel_on_disk_is_used_without_rendering(tmp_path: Path) -> None:
    """With a record, the model and SymPy are not loaded; with the emitted file, nor is Jinja."""
    code = """
import sys, torch, tilegen
from tilegen import cpu, disk, store
cpu.serves_calls = lambda: True  # as on a GPU, the kernel is taken as it was emitted
from tilegen.runtime import dispatch, plans
from tilegen.tuning.measure import Measurement
q = torch.randn(300, 1, 16, 16)  # programs enough for an H200: keys need not be split
def record():
    problem = tilegen.AttentionProblem.parse("b300 hq1 q16 d16 fp32 causal").bucket
    config = tilegen.TileConfig(block_m=16, block_n=16)
    store.save(store.TuningRecord(gpu="h200", arch="sm_90", kernel="fwd", problem=problem,
    config=config,
        measurement=Measurement(status="ok", median_us=1.0, p20_us=1.0, p80_us=1.0, repeats=9,
        message=""), versions=store.current_versions(), date=store.now()))
if sys.argv[1] == "first":
    record()
tilegen.attention(q, q, q, mask=tilegen.causal())
print(sorted({"sympy", "optuna", "jinja2"} & set(sys.modules)))
"""
    environment = {
        "TILEGEN_CACHE_DIR": str(tmp_path),
        "TRITON_INTERPRET": "1",
    }
    outputs = [warm.output(code, which, env=environment).strip() for which in ("first", "second")]
    assert outputs == ["['jinja2']", "[]"]


def test_order_is_the_same_each_time() -> None:
    code = (
        "from tilegen.gpus.spec import gpu\n"
        "from tilegen.problem import AttentionProblem\n"
        "from tilegen.choose.ranker import propose\n"
        "from tilegen.task import KernelTask\n"
        f"problem = AttentionProblem.parse({PROBLEM!r})\n"
        "for kernel in ('fwd', 'bwd_dkdv', 'bwd_dq', 'bwd_preprocess'):\n"
        "    print([c.config.key for c in propose(KernelTask.of(kernel, problem, gpu('h200')))])\n"
    )
    runs = {warm.output(code, seed=seed) for seed in (1, 2)}
    assert len(runs) == 1
    assert runs.pop().count("m") >= 32


def test_records_load_no_sympy() -> None:
    code = "import sys, tilegen.gpus.spec, tilegen.model.estimate; print('sympy' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "False"


SEEDED = """
import hashlib
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import LARGE_CACHE
from tilegen.problem import AttentionProblem
from tilegen.emit.render import render
for mask in ("causal&(global(20)|window(7,0))", "documents(@bq:64)&prefix_lm(@b:9)",
             "window(@h:5,3)|~kv_prefix(@:7)", "neighborhood(70,13)", "dilated(3)&global(4)",
             "keep((t0[q,h]<k)&(k<=q+t1[k]),@:9int,@:9int)"):
    problem = AttentionProblem.parse(
        f"hq4 hkv2 q64 d32 bf16 {mask} score(tanh(s)*t0[h]+t1[k-q]*s,float32+,bfloat16,sinks)"
    )
    for kernel in LARGE_CACHE:
        source = render(problem, TileConfig(block_m=32, block_n=32), kernel).source
        print(mask, kernel, hashlib.sha256(source.encode()).hexdigest())

from tilegen.masks.language.texts import from_text, to_text
from tilegen.masks.language.loads import Loads
from tilegen.masks.language.triton_source import Writer
from tilegen.masks.language.expr import B, H, K, Q, S
e = from_text("max(s,exp(t0[h]),3*q)*min(s,k,abs(q-k))+max(k,tanh(s),t0[q]*t0[k])"
    "+where((q<k)&(h<2)|(b<3)&(k<5)|(t0[h]<s),max(s,q),min(t0[h],s))", ["float"])
print(to_text(e))
writer = Writer({B: "b", H: "h", Q: "q", K: "k", S: "s"}, Loads(["float32"], letter="t"))
print(writer.sources({"out": e, "again": e * e}), writer.statements)
"""


def test_hash_seeds_change_no_byte() -> None:
    """Sets are in the order of hashes, which differ from process to process."""
    outputs = {warm.output(SEEDED, seed=seed) for seed in (1, 2)}
    assert len(outputs) == 1
    assert len(outputs.pop().splitlines()) == 24 + 2


def test_without_a_gpu_kernels_compiled_for_the_cpu_answer() -> None:
    problem = AttentionProblem.parse("hq1 q20 d16 fp32 causal")
    checks = verify(problem, {"fwd": TileConfig(block_m=16, block_n=16)})
    assert [check.tensor for check in checks] == ["out", "lse"]
    require(checks)


@pytest.mark.slow
def test_scores_that_read_tensors_are_verified() -> None:
    """Typical tensors stand for those of a call."""
    problem = "hq2 hkv1 q20 d16 fp32 causal score((k-q)*t0[h]+s,float32+,sinks)"
    result = CliRunner().invoke(app, ["verify", problem, "--gpu", "h200", "--json"])
    checks = json.loads(result.stdout)
    assert [check["tensor"] for check in checks] == [
        *("out", "lse", "dq", "dk", "dv"),
        *("dt0", "dsinks"),
    ]
    assert all(check["ok"] for check in checks)


@pytest.mark.slow
def test_log_lines_in_a_file_name_the_gpu_of_a_plan() -> None:
    """Without a GPU `tune --dry-run` plans for another's; a file has no width to fold lines at."""
    code = "from tilegen.cli.main import main; main()"
    asked = ["tune", PROBLEM, "--kernel", "bwd_preprocess", "--dry-run"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "COLUMNS": "30"}
    result = subprocess.run(
        [sys.executable, "-c", code, *asked], env=environment, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    (line,) = result.stderr.splitlines()
    assert line == "no GPU that PyTorch can use here: this is the plan for h200"


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "tilegen", "bundle", "--help"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (1, b"")


def test_nothing_but_plots_needs_matplotlib() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import tilegen\n"
        "from tilegen.cli.main import main\n"
        f"sys.argv = ['tilegen', 'explain', '{PROBLEM}', '--gpu', 'h200', '--kernel', 'fwd']\n"
        "main()\n"
    )
    assert warm.output(code).startswith("problem  b1 hq8 ")
