"""Bundles without Triton: example.cpp and NVIDIA's Python bindings launch a binary by its manifest.

Both call the stand-in for the CUDA driver, support/stand_in_cuda.c, which notes launches down.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tilegen.bundles.building import generate
from tilegen.bundles.manifest import Binary, Manifest
from tilegen.compiling.workers import Pool
from tilegen.gpus.spec import gpu_for
from tilegen.problem import AttentionProblem

ROOT = Path(__file__).parents[2]
PROBLEM = "b2 hq4 hkv2 q100 kv130 d64/32 bf16 full"
EXPECTED = {  # strides of dense tensors, in units of 8 elements
    **{"stride_qb": 3200, "stride_qh": 800, "stride_qm": 8},
    **{"stride_kb": 2080, "stride_kh": 1040, "stride_kn": 8},
    **{"stride_vb": 1040, "stride_vh": 520, "stride_vn": 4},
    **{"stride_ob": 1600, "stride_oh": 400, "stride_om": 4},
    **{"num_heads_q": 4, "seqlen_q": 100, "seqlen_kv": 130},
    **{"softmax_scale_log2": struct.unpack("f", struct.pack("f", math.log2(math.e) / 8))[0]},
    **{"scratch_0": 0, "scratch_1": 0},
}
POINTERS = ["q_ptr", "k_ptr", "v_ptr", "out_ptr", "lse_ptr"]


# --------------------------------------------------------------------------------------------------
# The driver's stand-in, a bundle, the example


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that the dynamic linker is to find libcuda.so.1 in."""
    _need(shutil.which("cc"), "a C compiler, cc")
    folder = tmp_path_factory.mktemp("stand-in")
    library = folder / "libcuda.so.1"
    source = ROOT / "tests" / "support" / "stand_in_cuda.c"
    warnings = ["-Wall", "-Wextra", "-Werror"]  # prototypes must be those of cuda.h
    _run("cc", "-shared", "-fPIC", *warnings, "-I", _headers(), source, "-o", library)
    (folder / "libcuda.so").symlink_to(library)  # what -lcuda looks for
    return folder


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory, compiler: Pool) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    problem = AttentionProblem.parse(PROBLEM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilegen.bundles.building.Pool", lambda: contextlib.nullcontext(compiler))
        generate([problem], [gpu_for("sm_90")], folder, directions=["forward"])
    return folder


@pytest.fixture(scope="session", params=["g++", "nvcc"])
def example(
    request: pytest.FixtureRequest, stand_in: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return the program that each compiler makes of example.cpp."""
    _need(shutil.which("g++"), "a C++ compiler, g++")  # nvcc calls it
    _need(shutil.which(request.param), request.param)
    has_json = subprocess.run(
        ["g++", "-E", "-x", "c++", "-"],
        input=b"#include <nlohmann/json.hpp>",
        capture_output=True,
        check=False,
    )
    _need(has_json.returncode == 0, "nlohmann/json.hpp (Debian: nlohmann-json3-dev)")
    flags = {
        "g++": ["-Wall", "-Wextra", "-Werror", "-I", _headers()],
        "nvcc": ["-Xcompiler", "-Wall,-Wextra,-Werror"],  # with the headers of its own release
    }[request.param]
    program = tmp_path_factory.mktemp("example") / "example"
    source = ROOT / "tilegen" / "bundles" / "example.cpp"
    _run(request.param, "-std=c++17", *flags, source, "-o", program, "-L", stand_in, "-lcuda")
    return program


# --------------------------------------------------------------------------------------------------
# C++


@pytest.mark.slow
def test_the_example_launches_by_the_manifest(
    example: Path, stand_in: Path, bundle: Path, tmp_path: Path
) -> None:
    binary = _binary(bundle)
    ran = _start(tmp_path, stand_in, binary, [example, "--no-check", bundle, PROBLEM])
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == (
        f"launched {binary.file}: {_programs(binary)} x {binary.threads} threads, "
        f"{binary.resources.shared_bytes} bytes of shared memory; not checked\n"
    )
    (launch,) = _launches(tmp_path)
    _check_launch(launch, binary)


@pytest.mark.slow
def test_the_example_notices_wrong_results(
    example: Path, stand_in: Path, bundle: Path, tmp_path: Path
) -> None:
    """The stand-in runs no kernel, so that `out` keeps what it was filled with."""
    ran = _start(tmp_path, stand_in, _binary(bundle), [example, bundle, PROBLEM])
    assert "; largest error " in ran.stdout
    assert (ran.returncode, ran.stderr) == (1, "example: the results are wrong\n")


@pytest.mark.parametrize(
    "problem,capability,said",
    [
        (PROBLEM, "8.0", f"no '{PROBLEM}' for this device, sm_80; the bundle has sm_90 {PROBLEM}"),
        ("b1", "9.0", f"no 'b1' for this device, sm_90; the bundle has sm_90 {PROBLEM}"),
    ],
    ids=["other-device", "other-problem"],
)
def test_the_example_lists_the_bundle(
    example: Path,
    stand_in: Path,
    bundle: Path,
    tmp_path: Path,
    problem: str,
    capability: str,
    said: str,
) -> None:
    ran = _start(
        tmp_path, stand_in, _binary(bundle), [example, bundle, problem], capability=capability
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "", f"example: {said}\n")
    assert _launches(tmp_path) == []


@pytest.mark.parametrize(
    "written,instead,said",
    [
        ('"k_ptr"', '"t0_ptr"', "cannot fill the argument t0_ptr of type *bf16"),
        ('"seqlen_kv",\n     "type": "i32"', '"seqlen_kv",\n     "type": "fp32"', "seqlen_kv does"),
        ('"schema": 3', '"schema": 4', "not of schema 2 or 3"),
    ],
    ids=["name", "type", "schema"],
)
def test_the_example_stops_at_unknown_arguments(
    example: Path,
    stand_in: Path,
    bundle: Path,
    tmp_path: Path,
    written: str,
    instead: str,
    said: str,
) -> None:
    binary = _binary(bundle)
    changed = shutil.copytree(bundle, tmp_path / "changed")
    text = (changed / "manifest.json").read_text()
    assert written in text
    (changed / "manifest.json").write_text(text.replace(written, instead))
    ran = _start(tmp_path, stand_in, binary, [example, changed, PROBLEM])
    assert (ran.returncode, ran.stdout) == (1, "")
    assert said in ran.stderr
    assert _launches(tmp_path) == []


# --------------------------------------------------------------------------------------------------
# Python

PROGRAM = """
import ctypes, json, sys
from cuda.bindings import driver

code, name, grid, threads, shared, arguments = json.load(sys.stdin)
error = driver.CUresult
done = error.CUDA_SUCCESS
assert not done and error.CUDA_ERROR_INVALID_VALUE  # an int

assert driver.cuInit(0) == (done,)
first, device = driver.cuDeviceGet(0)
assert first == done
options = [], [], 0, [], [], 0
refused = driver.cuLibraryLoadData(b"no ELF", *options)
assert refused == (error.CUDA_ERROR_INVALID_IMAGE, None)
first, library = driver.cuLibraryLoadData(bytes.fromhex(code), *options)
assert first == done
assert driver.cuLibraryGetKernel(library, b"nothing") == (error.CUDA_ERROR_NOT_FOUND, None)
first, kernel = driver.cuLibraryGetKernel(library, name.encode())
assert first == done

# A function belongs to a context, a kernel to none.
assert driver.cuKernelGetFunction(kernel) == (error.CUDA_ERROR_INVALID_CONTEXT, None)
first, context = driver.cuDevicePrimaryCtxRetain(device)
assert first == done
assert driver.cuCtxSetCurrent(context) == (done,)
first, function = driver.cuKernelGetFunction(kernel)
assert first == done

ctypes_of = {"i32": ctypes.c_int32, "fp32": ctypes.c_float}  # all others are pointers
values = [ctypes_of.get(type_, ctypes.c_void_p)(value) for type_, value in arguments]
addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))

def launch(function, grid):
    stream, extra = 0, 0
    size = grid, 1, 1, threads, 1, 1, shared
    return driver.cuLaunchKernel(function, *size, stream, ctypes.addressof(addresses), extra)

assert launch(function, grid) == (error.CUDA_ERROR_INVALID_VALUE,)  # that much shared memory
attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
assert driver.cuKernelSetAttribute(attribute, shared, kernel, device) == (done,)
assert launch(function, 0) == (error.CUDA_ERROR_INVALID_VALUE,)
assert launch(function, grid) == (done,)
assert launch(driver.CUfunction(int(kernel)), grid) == (done,)  # in the current context
assert driver.cuStreamSynchronize(0) == (done,)

assert driver.cuGetErrorName(refused[0]) == (done, b"CUDA_ERROR_INVALID_IMAGE")
assert driver.cuGetErrorString(refused[0]) == (done, b"device kernel image is invalid")
"""
"""How Python calls the driver: every function returns a tuple, a CUresult first."""


def test_nvidias_bindings_launch_by_the_manifest(
    stand_in: Path, bundle: Path, tmp_path: Path
) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="needs NVIDIA's package cuda-bindings")
    binary = _binary(bundle)
    assert binary.resources.shared_bytes > 48 * 1024
    pointers = dict(zip(POINTERS, range(4096, 10**6, 256), strict=False))
    arguments = [(type_, (EXPECTED | pointers)[name]) for name, type_ in binary.arguments]
    code = (bundle / binary.file).read_bytes().hex()
    given = [
        code,
        binary.function,
        _programs(binary),
        binary.threads,
        binary.resources.shared_bytes,
    ]
    ran = _start(
        tmp_path, stand_in, binary, [sys.executable, "-c", PROGRAM], json.dumps([*given, arguments])
    )
    assert ran.returncode == 0, ran.stderr
    by_function, by_kernel = _launches(tmp_path)
    _check_launch(by_function, binary)
    assert _values(by_function, binary).items() >= pointers.items()
    assert by_kernel == by_function


SERVED = """
import sys, threading
from pathlib import Path
import torch
from tilegen.bundles.served import Bundle
from tilegen.gpus.spec import gpu
from tilegen.errors import TilegenError
from tilegen.masks.form import Shape
from tilegen.problem import AttentionProblem

problem, bundle = AttentionProblem.parse(sys.argv[2]), Bundle(Path(sys.argv[1]))
device = torch.device("cpu")
(bound,) = bundle.launches(problem, gpu("h200"), "forward", device, aligned=True).values()
shape = Shape(problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_kv)
launch = bound.given(problem.mask, shape, device)
q, k, v = (
    torch.zeros(problem.batch, heads, rows, dim, dtype=torch.bfloat16)
    for heads, rows, dim in (
        (problem.num_heads_q, problem.seqlen_q, problem.head_dim_qk),
        (problem.num_heads_kv, problem.seqlen_kv, problem.head_dim_qk),
        (problem.num_heads_kv, problem.seqlen_kv, problem.head_dim_v),
    )
)

def call():
    try:
        launch(q, k, v, problem.head_dim_qk**-0.5)
    except TilegenError as error:
        sys.exit(f"{type(error).__name__}: {error}")

call()
thread = threading.Thread(target=call)  # has no context of its own
thread.start()
thread.join()
"""


@pytest.mark.slow
def test_a_served_kernel_is_launched_on_any_thread(
    stand_in: Path, bundle: Path, tmp_path: Path
) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="needs NVIDIA's package cuda-bindings")
    binary = _binary(bundle)
    ran = _start(tmp_path, stand_in, binary, [sys.executable, "-c", SERVED, str(bundle), PROBLEM])
    assert ran.returncode == 0, ran.stderr
    first, second = _launches(tmp_path)
    _check_launch(first, binary)
    _check_launch(second, binary)


@pytest.mark.slow
def test_errors_of_the_driver_are_one_line(stand_in: Path, bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="needs NVIDIA's package cuda-bindings")
    binary = _binary(bundle)
    shutil.copytree(bundle, tmp_path / "bundle")
    path = tmp_path / "bundle" / "manifest.json"
    path.write_text(path.read_text().replace(f'"{binary.function}"', '"another"'))
    command = [sys.executable, "-c", SERVED, str(path.parent), PROBLEM]
    ran = _start(tmp_path, stand_in, binary, command)
    assert ran.returncode == 1
    assert ran.stderr.startswith("BuildFailed: cuLibraryGetKernel failed: CUDA_ERROR_NOT_FOUND")
    ran = _start(tmp_path, tmp_path, binary, command)
    assert ran.returncode == 1
    assert ran.stderr.startswith("Unsupported: expected NVIDIA's driver: ")
    assert ran.stderr.count("\n") == 1


# --------------------------------------------------------------------------------------------------
# Implementation


def _need(value: object, what: str) -> None:
    if not value:
        pytest.skip(f"needs {what}, which is not installed")


def _headers() -> Path:
    """Return the folder of the cuda.h that Triton's wheel brings."""
    import triton.backends.nvidia as backend

    return Path(next(iter(backend.__path__))) / "include"


def _run(*command: str | Path) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def _binary(bundle: Path) -> Binary:
    (binary,) = Manifest.from_json((bundle / "manifest.json").read_text()).binaries
    return binary


def _programs(binary: Binary) -> int:
    """Return the size of the grid: a batch of 2, 4 heads, tiles of 100 rows."""
    return 2 * 4 * math.ceil(100 / binary.config.block_m)


def _start(
    folder: Path,
    stand_in: Path,
    binary: Binary,
    command: list[str | Path],
    given: str = "",
    capability: str = "9.0",
) -> subprocess.CompletedProcess[str]:
    """Run a program with the stand-in for the driver, its log in `folder`."""
    environment = {
        "LD_LIBRARY_PATH": str(stand_in),
        "STAND_IN_CUDA_CAPABILITY": capability,
        "STAND_IN_CUDA_LOG": str(folder / "launches.jsonl"),
        "STAND_IN_CUDA_PARAMETERS": "".join(
            "8" if type_.startswith("*") else "4" for _, type_ in binary.arguments
        ),
    }
    return subprocess.run(
        command,
        input=given,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )


def _launches(folder: Path) -> list[dict[str, Any]]:
    log = folder / "launches.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def _values(launch: dict[str, Any], binary: Binary) -> dict[str, float]:
    """Return the value of every parameter by its name in the manifest."""
    formats = {"i32": "<i", "fp32": "<f"}
    return {
        name: struct.unpack(formats.get(type_, "<Q"), bytes.fromhex(digits))[0]
        for (name, type_), digits in zip(binary.arguments, launch["parameters"], strict=True)
    }


def _check_launch(launch: dict[str, Any], binary: Binary) -> None:
    values = _values(launch, binary)
    pointers = [values.pop(name) for name in POINTERS]
    assert all(address and address % 16 == 0 for address in pointers)
    assert len(set(pointers)) == len(pointers)
    assert values == EXPECTED
    assert (launch["function"], launch["stream"]) == (binary.function, 0)
    assert (launch["grid"], launch["block"]) == ([_programs(binary), 1, 1], [binary.threads, 1, 1])
    assert launch["shared_bytes"] == binary.resources.shared_bytes
