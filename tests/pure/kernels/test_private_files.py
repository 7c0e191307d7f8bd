"""Code is imported only from files that no other user can have written."""

from __future__ import annotations

import importlib.util
import inspect
import os
import py_compile
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tilegen import disk, private_files
from tilegen.bounded_cache import BoundedCache
from tilegen.cli import doctor
from tilegen.emit import kernel_files
from tilegen.emit.render import render
from tilegen.kernels.config import TileConfig
from tilegen.private_files import NotPrivate, check_private, read_private
from tilegen.problem import AttentionProblem

PROBLEM = AttentionProblem.parse("hq2 hkv2 q64 d16 fp32 causal")
CONFIG = TileConfig(block_m=32, block_n=16)
PLANTED = "planted = True\n"
SOMEBODY = 54_321


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of an emitted kernel, with other text in it: who runs that has imported the file."""
    examine = Path.lstat

    def open_above(path: Path) -> os.stat_result:
        """Let others into the folders of the tests, which are closed to them."""
        mode, *others = examine(path)
        return os.stat_result((mode | 0o055 if tmp_path.is_relative_to(path) else mode, *others))

    monkeypatch.setattr(Path, "lstat", open_above)
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_files, "_modules", BoundedCache(9))
    disk.say_once.cache_clear()
    path = kernel_files.write(render(PROBLEM, CONFIG))
    path.write_text(path.read_text() + PLANTED)
    return path


def imports_the_file() -> bool:
    kernel_files._modules.clear()
    module = kernel_files.load(kernel_files.emitted(PROBLEM, CONFIG, "fwd", aligned=True))
    if hasattr(module, "planted"):
        return True
    rendered = render(PROBLEM, CONFIG)
    function = getattr(module, rendered.function)
    assert rendered.source == inspect.getsource(module)
    assert inspect.getsource(function.fn) in rendered.source
    return False


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a path, or for who may not do that all paths, belong to another user."""
    if os.geteuid() == 0:
        os.chown(path, SOMEBODY, -1)
    else:
        monkeypatch.setattr(private_files.os, "geteuid", lambda: SOMEBODY)


def test_kernels_that_only_this_user_can_write_are_imported(
    kernel: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert imports_the_file()
    assert not caplog.records
    assert stat.S_IMODE(kernel.parent.parent.stat().st_mode) == 0o700


OPEN: dict[str, tuple[int, int, str]] = {
    "own directory, to all": (3, 0o777, "anybody"),
    "own directory, to a group": (3, 0o775, "group"),
    "kernels, to all": (2, 0o757, "anybody"),
    "one kernel's folder": (1, 0o777, "anybody"),
    "the file": (0, 0o666, "anybody"),
}


@pytest.mark.parametrize("name", OPEN)
def test_kernels_that_others_can_write_are_not_imported(
    name: str, kernel: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    up, mode, who = OPEN[name]
    monkeypatch.setattr(private_files, "_is_own_group", lambda gid: False)
    kernel.parent.parent.chmod(0o755)
    path = (kernel, *kernel.parents)[up]
    path.chmod(mode)
    assert not imports_the_file()
    assert not imports_the_file()
    assert kernel.read_text().endswith(PLANTED)
    (said,) = (record.message for record in caplog.records)
    assert f"'{path}' can be written to by {who}" in said
    assert "TILEGEN_CACHE_PATH" in said
    assert "\n" not in said


@pytest.mark.parametrize("up", range(4))
def test_kernels_of_others_are_not_imported(
    up: int, kernel: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    give_away((kernel, *kernel.parents)[up], monkeypatch)
    assert not imports_the_file()
    (said,) = (record.message for record in caplog.records)
    assert "belongs to" in said


def test_links_lead_to_no_open_folder(kernel: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.rename(tmp_path / "elsewhere")
    cache.symlink_to(tmp_path / "elsewhere")
    assert imports_the_file()
    (tmp_path / "elsewhere").chmod(0o777)
    assert not imports_the_file()


def test_byte_code_is_not_read(kernel: Path) -> None:
    """Python takes byte code for valid by the time and size of the source that it notes."""
    source = render(PROBLEM, CONFIG).source
    kernel.write_text(PLANTED + "#" * (len(source.encode()) - len(PLANTED) - 1) + "\n")
    os.utime(kernel, (1e9, 1e9))
    py_compile.compile(str(kernel), cfile=importlib.util.cache_from_source(str(kernel)))
    kernel.write_text(source)
    os.utime(kernel, (1e9, 1e9))
    assert not imports_the_file()


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("put", [a_pipe, a_folder])
def test_pipes_and_devices_do_not_block(kernel: Path, put: Callable[[Path], None]) -> None:
    put(kernel)
    with pytest.raises(NotPrivate, match="not a regular file"):
        read_private(kernel)


def test_folders_where_only_owners_rename_are_in_order(kernel: Path) -> None:
    kernel.parents[2].chmod(0o1777)
    assert imports_the_file()


def test_below_a_closed_folder_no_other_user_can_write(kernel: Path) -> None:
    kernel.parents[0].chmod(0o777)
    kernel.parents[1].chmod(0o700)
    assert imports_the_file()


def test_the_group_of_one_user_alone_is_in_order(
    kernel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.parents[2].chmod(0o775)
    gid = kernel.parents[2].stat().st_gid
    user = private_files.pwd.struct_passwd(("ann", "x", os.geteuid(), gid, "", "", ""))
    monkeypatch.setattr(private_files.pwd, "getpwuid", lambda uid: user)
    for group, is_own in (
        (("ann", "x", gid, []), True),
        (("ann", "x", gid, ["ann"]), True),
        (("ann", "x", gid, ["ann", "bob"]), False),
        (("users", "x", gid, []), False),
        (("ann", "x", gid + 1, []), False),
    ):
        monkeypatch.setattr(
            private_files.grp, "getgrgid", lambda _, it=group: private_files.grp.struct_group(it)
        )
        assert imports_the_file() == is_own


def test_missing_files_are_accepted(tmp_path: Path) -> None:
    check_private(tmp_path / "a" / "b" / "c")
    assert read_private(tmp_path / "a" / "b" / "c") is None


def test_doctor_names_a_folder_that_others_can_write(kernel: Path) -> None:
    kernel.parents[2].chmod(0o777)
    (said,) = (one.value for one in doctor.examine() if "no kernel is imported" in one.value)
    assert "can be written to by anybody" in said


def test_doctor_names_an_own_directory_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", f"/{'x' * 300}")
    (said,) = (one.value for one in doctor.examine() if one.name == "own directory")
    assert "cannot be written (File name too long); set TILEGEN_CACHE_DIR" in said
