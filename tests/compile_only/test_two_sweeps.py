"""A family that only tests know compiles, and is bundled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.two_sweeps import FWD_TWO_SWEEPS, registered
from tilegen import gpu
from tilegen.bundles.building import generate
from tilegen.bundles.expected import why_not_ours
from tilegen.bundles.manifest import Manifest
from tilegen.problem import AttentionProblem


@pytest.mark.usefixtures("shared_compiler")
def test_it_is_compiled_and_bundled(tmp_path: Path) -> None:
    problem = AttentionProblem.parse("b1 hq8 hkv2 q512 kv512 d64 bf16 causal")
    with registered(alone=True):
        path = generate([problem], [gpu("h200")], tmp_path, directions=["forward"])
        manifest = Manifest.from_json(path.read_text())
        (binary,) = manifest.binaries
        assert binary.kernel == FWD_TWO_SWEEPS.name
        assert (tmp_path / binary.file).read_bytes()[:4] == b"\x7fELF"
        assert why_not_ours(tmp_path, manifest) == ""
