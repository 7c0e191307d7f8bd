"""The manifest of a bundle describes its binaries correctly, for any version of Triton."""

import re
import subprocess
from pathlib import Path

import pytest

from tilegen.bundles.building import generate
from tilegen.bundles.manifest import Manifest
from tilegen.compiling.tools import nvidia_tool
from tilegen.gpus.spec import gpu_for
from tilegen.kernels.spec import Direction
from tilegen.problem import AttentionProblem

PROBLEM = AttentionProblem.parse("hq8 hkv2 q256 d32 fp16 causal")


@pytest.mark.usefixtures("shared_compiler", "small_tiles")
@pytest.mark.parametrize(
    "arch, directions",
    [("sm_80", ["backward"]), ("sm_90", ["forward", "backward"]), ("sm_100", ["forward"])],
    ids=["sm_80", "sm_90", "sm_100"],
)
def test_a_binary_takes_the_arguments_that_the_manifest_lists(
    arch: str, directions: list[Direction], tmp_path: Path
) -> None:
    """Read from the binary itself: number, sizes and places of its parameters."""
    path = generate([PROBLEM], [gpu_for(arch)], tmp_path, directions=directions)
    for binary in Manifest.from_json(path.read_text()).binaries:
        actual = parameters_of(tmp_path / binary.file, binary.function)
        sizes = [8 if type_.startswith("*") else 4 for _, type_ in binary.arguments]
        assert [size for _, size in actual] == sizes
        offset = 0
        for (at, size), expected in zip(actual, sizes, strict=True):
            offset = -(-offset // expected) * expected
            assert (at, size) == (offset, expected)
            offset += expected


def parameters_of(cubin: Path, function: str) -> list[tuple[int, int]]:
    """Return (offset, size) of a kernel's parameters, in order."""
    elf = subprocess.run(
        [nvidia_tool("cuobjdump"), "-elf", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    section = elf[elf.index(f".nv.info.{function}\n") :]
    matches = re.findall(
        r"EIATTR_KPARAM_INFO.*?Ordinal\s*:\s*0x([0-9a-f]+)\s+Offset\s*:\s*0x([0-9a-f]+)\s+"
        r"Size\s*:\s*0x([0-9a-f]+)",
        section,
        re.DOTALL,
    )
    ordered = sorted(
        (int(ordinal, 16), int(at, 16), int(size, 16)) for ordinal, at, size in matches
    )
    assert [ordinal for ordinal, _, _ in ordered] == list(range(len(ordered)))
    return [(at, size) for _, at, size in ordered]
