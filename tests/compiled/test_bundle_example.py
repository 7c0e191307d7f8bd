"""The C++ example for processors: compiled, run on this machine, and under an emulator of Arm's."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.bundles import RUNNABLE, needs_processor, write_cpu_bundle
from tilegen.cpu.processors import PROCESSORS

SOURCE = Path(__file__).parents[2] / "tilegen" / "bundles" / "example_cpu.cpp"
JSON = Path("/usr/include/nlohmann")
PROBLEMS = [
    f"b2 hq4 hkv2 q200 kv{kv} d64/32 {dtype} {mask}"
    for kv, dtype, mask in ((200, "bf16", "causal"), (330, "fp32", "full"), (200, "fp16", "causal"))
]
WITHOUT_A_REFERENCE = "b1 hq8 hkv8 q70 kv70 d16 fp32 window(9,0)"
SPLIT = "b1 hq8 hkv2 q1 kv4096 d64 fp32 full"
CPUINFO = "processor : 0\nflags : {}\n\nprocessor : 1\nflags : {}\n"


def _need(value: object, what: str) -> None:
    if not value:
        pytest.skip(f"needs {what}, which is not installed")


def _compiled(compiler: str, program: Path, *options: str) -> Path:
    warnings = ["-Wall", "-Wextra", "-Werror", "-O1", "-std=c++17", "-pthread"]
    command = [compiler, *warnings, *options, str(SOURCE), "-o", str(program), "-ldl"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return program


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program, which reads the processor's features from a file beside it."""
    _need(shutil.which("g++"), "a C++ compiler, g++")
    _need(JSON.is_dir(), "nlohmann/json.hpp (Debian: nlohmann-json3-dev)")
    folder = tmp_path_factory.mktemp("example")
    return _compiled("g++", folder / "example", f'-DCPUINFO="{folder / "cpuinfo"}"')


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundle")
    write_cpu_bundle([*PROBLEMS, WITHOUT_A_REFERENCE, SPLIT], RUNNABLE[:1], out, ["forward"])
    return out


def _run(example: Path, *given: object, lacks: str = "") -> tuple[int, str]:
    features = " ".join(PROCESSORS[RUNNABLE[0]].features).replace(lacks or "?", "")
    (example.parent / "cpuinfo").write_text(CPUINFO.format(features, features))
    command = [str(example), *map(str, given)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.slow
@needs_processor
@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_example_agrees_with_a_plain_loop(problem: str, example: Path, bundle: Path) -> None:
    code, said = _run(example, bundle, RUNNABLE[0], problem)
    launched = rf"launched {RUNNABLE[0]}/attention_fwd_\w+\.so: \d+ programs on \d+ threads; "
    assert code == 0, said
    assert re.fullmatch(rf"{launched}largest error [\de.-]+ of [\de.-]+ allowed\n", said), said
    code, said = _run(example, "--no-check", bundle, RUNNABLE[0], problem)
    assert code == 0
    assert re.fullmatch(rf"{launched}not checked\n", said), said


@needs_processor
def test_the_example_names_unsupported_problems(example: Path, bundle: Path) -> None:
    code, said = _run(example, bundle, RUNNABLE[0], WITHOUT_A_REFERENCE)
    assert code == 0
    assert said.endswith("; not checked, as the mask is window(9,0)\n")
    code, said = _run(example, bundle, RUNNABLE[0], SPLIT)
    assert code == 1
    assert said.endswith("has no forward of one kernel, and this example launches no other\n")
    code, said = _run(example, bundle, "elsewhere", PROBLEMS[0])
    assert code == 1
    assert said.startswith(
        f"example_cpu: no '{PROBLEMS[0]}' for this device, elsewhere; the bundle"
    )


@needs_processor
def test_the_example_opens_nothing_for_another_processor(example: Path, bundle: Path) -> None:
    feature = PROCESSORS[RUNNABLE[0]].features[-1]
    code, said = _run(example, bundle, RUNNABLE[0], PROBLEMS[0], lacks=feature)
    assert code == 1
    assert said == (
        f"example_cpu: this processor lacks {feature}, which code for {RUNNABLE[0]} needs\n"
    )


@needs_processor
def test_the_example_notices_wrong_results(example: Path, bundle: Path, tmp_path: Path) -> None:
    """A grid too small leaves rows of the last head as they were."""
    changed = shutil.copytree(bundle, tmp_path / "changed")
    path = changed / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"size": "num_heads_q",', '"size": "num_heads_kv",'))
    code, said = _run(example, changed, RUNNABLE[0], PROBLEMS[0])
    assert code == 1
    assert said.endswith("example_cpu: the results are wrong\n"), said


@pytest.mark.slow
def test_code_for_arm_agrees_with_a_plain_loop(tmp_path: Path) -> None:
    """On another machine than Arm's, under an emulator."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    _need(compiler, "aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu)")
    _need(emulator, "qemu-aarch64 (Debian: qemu-user)")
    _need(JSON.is_dir(), "nlohmann/json.hpp (Debian: nlohmann-json3-dev)")
    assert compiler
    assert emulator
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "nlohmann").symlink_to(JSON)  # not the other headers of this machine
    features = " ".join(PROCESSORS["neoverse-v2"].features)
    (tmp_path / "cpuinfo").write_text(f"Features : {features}\n")
    write_cpu_bundle(PROBLEMS, ["neoverse-v2"], tmp_path / "bundle", ["forward"])
    options = f'-DCPUINFO="{tmp_path / "cpuinfo"}"', f"-I{tmp_path / 'include'}"
    program = _compiled(compiler, tmp_path / "example", *options)
    for problem in PROBLEMS:
        command = [emulator, "-cpu", "max", "-L", "/usr/aarch64-linux-gnu", str(program)]
        command += [str(tmp_path / "bundle"), "neoverse-v2", problem]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "largest error" in ran.stdout
