"""Settings come from the environment; shipped files are found wherever tilegen is installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tilegen import resources
from tilegen.errors import Unsupported
from tilegen.settings import Settings, checks, settings

pytestmark = pytest.mark.oldest


def test_defaults() -> None:
    expected = Settings(
        cache_dir=Path("~/.cache/tilegen").expanduser(),
        cache_path=(),
        tune=False,
        deterministic=False,
        check=False,
        check_bounds=False,
        cpu="",
        libraries=False,
        batch_invariant=False,
    )
    assert expected == settings({})


def test_all_set(tmp_path: Path) -> None:
    urls = ("s3://bucket/team", "https://host:8080/tilegen", "file:///mnt/team")
    options = settings(
        {
            "TILEGEN_CACHE_DIR": str(tmp_path),
            "TILEGEN_CACHE_PATH": f"{tmp_path}/a;; {tmp_path}/b:c ;{';'.join(urls)}",
            "TILEGEN_TUNE": "1",
            "TILEGEN_DETERMINISTIC": "1",
            "TILEGEN_CHECK": "1",
            "TILEGEN_CPU": "kernels",
            "TILEGEN_LIBRARIES": "1",
            "TILEGEN_BATCH_INVARIANT": "1",
        }
    )
    expected = Settings(
        cache_dir=tmp_path,
        cache_path=(str(tmp_path / "a"), str(tmp_path / "b:c"), *urls),
        tune=True,
        deterministic=True,
        check=True,
        check_bounds=False,
        cpu="kernels",
        libraries=True,
        batch_invariant=True,
    )
    assert expected == options


def test_bounds_are_checked_instead_of_values() -> None:
    options = settings({"TILEGEN_CHECK": "bounds"})
    assert options.check_bounds
    assert not options.check
    with pytest.raises(Unsupported, match="TILEGEN_CPU must be torch or kernels, got 'gpu'"):
        settings({"TILEGEN_CPU": "gpu"})


def test_reads_the_process_environment_at_every_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "one"))
    assert tmp_path / "one" == settings().cache_dir
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "two"))
    assert tmp_path / "two" == settings().cache_dir


def test_whether_to_check_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEGEN_CHECK", raising=False)
    assert not checks()
    for text, expected in (("1", True), ("0", False), ("", False), ("1", True)):
        monkeypatch.setenv("TILEGEN_CHECK", text)
        assert checks() is expected
    monkeypatch.setenv("TILEGEN_CHECK", "yes")
    with pytest.raises(Unsupported, match="TILEGEN_CHECK must be 0, 1 or bounds, got 'yes'"):
        checks()
    monkeypatch.delenv("TILEGEN_CHECK")
    assert not checks()
    monkeypatch.setattr(os, "environ", {"TILEGEN_CHECK": "1"})
    assert checks()


def test_xdg_cache_home_is_honoured_unless_relative(tmp_path: Path) -> None:
    assert tmp_path / "tilegen" == settings({"XDG_CACHE_HOME": str(tmp_path)}).cache_dir
    assert settings({}).cache_dir == settings({"XDG_CACHE_HOME": "cache"}).cache_dir


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert tmp_path / "here" == settings({"TILEGEN_CACHE_DIR": "here"}).cache_dir
    assert Path.home() / "there" == settings({"TILEGEN_CACHE_DIR": "~/there"}).cache_dir


def test_no_home_directory_names_the_variable_to_set() -> None:
    with pytest.raises(Unsupported, match=r"nobody-has-this-name.*set TILEGEN_CACHE_DIR"):
        settings({"TILEGEN_CACHE_DIR": "~nobody-has-this-name/cache"})


@pytest.mark.parametrize("name", ["TILEGEN_TUNE", "TILEGEN_DETERMINISTIC", "TILEGEN_CHECK"])
@pytest.mark.parametrize("text", ["yes", "2", "true", " 1"])
def test_switch_that_is_neither_0_nor_1(name: str, text: str) -> None:
    expected = "0, 1 or bounds" if name == "TILEGEN_CHECK" else "0 or 1"
    with pytest.raises(Unsupported, match=f"{name} must be {expected}, got"):
        settings({name: text})


def package_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = folder / "tilegen"
    package.mkdir()
    monkeypatch.setattr(resources, "files", lambda name: package if name == "tilegen" else None)
    return package


def test_data_is_beside_the_package_in_a_checkout() -> None:
    assert Path(__file__).parents[2] / "cache" == resources.data_dir("cache")


def test_installed_data_comes_before_a_folder_beside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = package_at(tmp_path, monkeypatch)
    (tmp_path / "templates").mkdir()  # in site-packages this may be anybody's
    assert tmp_path / "templates" == resources.data_dir("templates")
    (package / "_data" / "templates").mkdir(parents=True)
    assert package / "_data" / "templates" == resources.data_dir("templates")


def test_missing_data_names_both_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = package_at(tmp_path, monkeypatch)
    with pytest.raises(Unsupported) as caught:
        resources.data_dir("cache")
    assert str(package / "_data" / "cache") in str(caught.value)
    assert str(tmp_path / "cache") in str(caught.value)
