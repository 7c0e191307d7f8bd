"""Compiled kernels on disk: read again, never from where others can write, never damaged ones."""

import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.compiler import kernels
from tilegen.cpu import build, objects
from tilegen.cpu.direct import DirectFunction
from tilegen.cpu.target import host
from tilegen.emit.identity import RenderedKernel
from tilegen.emit.render import render
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem
from tilegen.store.listing import prune
from tilegen.store.places import Location


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield an own directory that others can read, as pytest's folders cannot be."""
    with tempfile.TemporaryDirectory() as own:
        Path(own).chmod(0o755)
        monkeypatch.setenv("TILEGEN_CACHE_DIR", own)
        yield Path(own)


def _total() -> float:
    out = torch.empty(1)
    DirectFunction(kernels.total)[(1,)](torch.arange(100.0), out, 100, 64)
    return float(out)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the functions that are compiled from now on."""
    names: list[str] = []
    compiled = build.compiled

    def noting(source, *given):  # noqa: ANN001, ANN002, ANN202
        names.append(source.name)
        return compiled(source, *given)

    monkeypatch.setattr(build, "compiled", noting)
    return names


def _file(folder: Path) -> Path:
    (path,) = folder.rglob("*.o")
    return path


def test_an_object_is_compiled_once(folder: Path, compilations: list[str]) -> None:
    assert _total() == _total() == 4950
    assert compilations == ["total"]
    assert _file(folder).stat().st_mode & 0o022 == 0


@pytest.mark.parametrize("damage", ["cut", "flipped", "no header", "empty", "other fields"])
def test_a_damaged_object_is_compiled_again(
    damage: str, folder: Path, compilations: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    _total()
    path = _file(folder)
    data = path.read_bytes()
    head, _, binary = data.partition(b"\n")
    path.write_bytes(
        {
            "cut": data[:-100],
            "flipped": data[:-1] + bytes([data[-1] ^ 1]),
            "no header": binary,
            "empty": b"",
            "other fields": head.replace(b'"name"', b'"title"') + b"\n" + binary,
        }[damage]
    )
    with caplog.at_level(logging.WARNING):
        assert _total() == 4950
    assert compilations == ["total", "total"]
    assert "damaged" in caplog.text
    assert path.read_bytes().partition(b"\n")[2] == binary


def test_an_object_that_others_can_write_is_not_linked(
    folder: Path, compilations: list[str]
) -> None:
    _total()
    for inner in folder.rglob("*"):
        inner.chmod(0o755 if inner.is_dir() else 0o666)
    assert _total() == 4950
    assert compilations == ["total", "total"]


def test_a_folder_for_reading_only_is_no_error(
    folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", refuse)
    assert _total() == _total() == 4950
    assert compilations == ["total", "total"]
    assert not list(folder.rglob("*.o"))


def test_prune_removes_objects_of_other_compilers(folder: Path) -> None:
    _total()
    path = _file(folder)
    parts = path.name.split(".")
    stale = path.with_name(".".join([*parts[:-2], "0123456789ab", "o"]))
    stale.write_bytes(path.read_bytes())
    os.utime(stale, (1e9, 1e9))
    assert objects.is_stale(stale)
    assert not objects.is_stale(path)
    pruned = prune(Location(str(folder), "own"))
    assert [one.file for one in pruned] == [str(stale)]
    assert path.exists()


def test_kernels_that_differ_in_the_docstring_share_an_object() -> None:
    """delta = rowsum(out * dout) has no mask; the text of its kernel has no dtype."""

    def rendered(problem: str) -> RenderedKernel:
        tile = TileConfig(block_m=32, block_n=32)
        return render(AttentionProblem.parse(problem), tile, "bwd_preprocess", aligned=False)

    def path(problem: str) -> Path:
        kernel = rendered(problem)
        return build.path_of_object(build.source_of(kernel), build.code_of(kernel), host())

    shape = "b1 hq2 hkv1 q70 kv97 d32"
    causal = path(f"{shape} fp16 causal")
    assert rendered(f"{shape} fp16 causal").source != rendered(f"{shape} fp16 full").source
    assert path(f"{shape} fp16 full") == causal
    assert path(f"{shape} bf16 causal") != causal
    assert path("b1 hq2 hkv1 q70 kv97 d64 fp16 causal") != causal
