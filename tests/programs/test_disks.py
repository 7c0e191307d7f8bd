"""Calls do without a disk: one warning, right results. Commands that exist to write fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tilegen
from tilegen.cli.main import app
from tilegen.compiling import triton_cache
from tilegen.errors import Unsupported

CALLS = """
import logging, os, pwd, resource, stat, sys
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
import torch, tilegen
from tilegen import disk

def call(length):
    q, k, v = torch.randn(3, 1, 2, length, 16).double().requires_grad_().unbind()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    if kind != "full":
        out = tilegen.attention(q.float().detach(), k.float().detach(), v.float().detach())
        return torch.testing.assert_close(out, expected.float())
    wanted = torch.autograd.grad(expected.sum(), [q, k, v])
    given = [x.float().detach().requires_grad_() for x in (q, k, v)]
    out = tilegen.attention(*given)
    torch.testing.assert_close(out, expected.float())
    for grad, right in zip(torch.autograd.grad(out.sum(), given), wanted):
        torch.testing.assert_close(grad, right.float())

def nobody(uid):
    raise KeyError(uid)

kind = sys.argv[1]
if kind == "no user":
    pwd.getpwuid = nobody
call(40)
if kind == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    call(400)
folder = disk.own_folder()
print("folder", folder, folder and oct(stat.S_IMODE(folder.stat().st_mode)))
"""


def ran(kind: str, drop: tuple[str, ...] = (), **environment: str) -> list[str]:
    """Return the lines that calls in a process print; `drop` names variables to unset."""
    kept = {name: value for name, value in os.environ.items() if name not in drop}
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:tilegen", "-c", CALLS, kind],
        env=kept | {"TILEGEN_CPU": "kernels"} | environment,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_warm_process_whose_disk_fills_up_serves_new_lengths(tmp_path: Path) -> None:
    """With a limit of 0 bytes for a file nothing can be written, whoever runs the test."""
    warning, folder = ran("full", TILEGEN_CACHE_DIR=str(tmp_path / "cache"))
    assert re.match(r"WARNING the cache '.*/cache' cannot be written \(File too large\), ", warning)
    assert "kernels stay in memory; set TILEGEN_CACHE_DIR" in warning
    assert folder == "folder None None"


@pytest.mark.slow
def test_kernels_go_to_a_private_folder_where_the_cache_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    below = {"TILEGEN_CACHE_DIR": f"{tmp_path}/file/c", "TRITON_CACHE_DIR": f"{tmp_path}/file/t"}
    warning, folder = ran("", TMPDIR=str(tmp_path / "tmp"), **below)
    assert "cannot be written (Not a directory); kernels go to " in warning
    assert folder.endswith(" 0o700")
    assert folder.split()[1] in warning
    assert list((tmp_path / "tmp").glob("tilegen-*")) == []  # removed at the end of the process


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["no home", "no user"])
def test_a_process_without_a_home_computes(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    drop = "TILEGEN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"
    home = {"HOME": f"{tmp_path}/file/home"} if kind == "no home" else {}
    warning, _ = ran(kind, drop, **home)
    assert "set TILEGEN_CACHE_DIR to a folder you can write to" in warning


@pytest.mark.slow
def test_a_folder_that_is_not_ascii_holds_the_cache_under_any_locale(tmp_path: Path) -> None:
    cache = tmp_path / "Grüße"
    (folder,) = ran("", TILEGEN_CACHE_DIR=str(cache), LC_ALL="C", PYTHONUTF8="0")
    assert folder.startswith("folder ")
    assert list(cache.glob("kernels/*/fwd*.py"))
    assert list(cache.glob("kernels/*/*.o"))


@pytest.mark.slow
def test_a_call_that_may_tune_computes_without_a_disk(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    *warnings, _ = ran("", TILEGEN_CACHE_DIR=f"{tmp_path}/file/c", TILEGEN_TUNE="1")
    assert any(line.startswith("WARNING tuning failed, using the best") for line in warnings)


def test_commands_that_write_fail_and_name_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with tilegen.settings(cache_dir=tmp_path / "file" / "c", cpu="kernels"):
        tuned = CliRunner().invoke(app, ["tune", "hq1 q16 d16 fp32", "--trials", "1"])
    out = str(tmp_path / "file" / "dist")
    made = CliRunner().invoke(app, ["generate", "hq1 q16 d16 fp32", "--gpu", "h200", "--out", out])
    for result in (tuned, made):
        assert result.exit_code
        assert f"cannot write '{tmp_path}/file" in str(result.exception)


# --------------------------------------------------------------------------------------------------
# Triton's cache


def test_triton_compiles_into_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(triton_cache, "own_folder", lambda: tmp_path / "own")

    def compile() -> str:
        return FileCacheManager("key").put("text", "kernel.ptx", binary=False)

    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path / "file" / "triton")
        with pytest.raises(NotADirectoryError):
            compile()
        made = Path(triton_cache.written(compile))
        assert made.read_text() == "text"
        assert made.is_relative_to(tmp_path / "own" / "triton")
        assert Path(triton_cache.written(compile)) == made
    assert len([one for one in caplog.records if "set TRITON_CACHE_DIR" in one.message]) == 1


def test_no_folder_at_all_for_triton_is_one_error_that_names_both_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    (tmp_path / "file").write_text("")
    for folder in (None, tmp_path / "file" / "own"):
        monkeypatch.setattr(triton_cache, "own_folder", lambda it=folder: it)
        with knobs.cache.scope():
            knobs.cache.dir = before = str(tmp_path / "file" / "triton")
            with pytest.raises(Unsupported, match="set TILEGEN_CACHE_DIR and TRITON_CACHE_DIR"):
                triton_cache.written(lambda: FileCacheManager("key").put("text", "a", binary=False))
            assert knobs.cache.dir == before
