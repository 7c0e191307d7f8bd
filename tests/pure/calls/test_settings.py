"""Settings come from the environment; shipped files are found wherever tilegen is installed."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import tilegen
from tilegen import resources
from tilegen.environment import Settings, current, read_from, reread
from tilegen.errors import Unsupported

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
        hopper=False,
    )
    assert asdict(expected) == asdict(read_from({}))


def test_all_set(tmp_path: Path) -> None:
    urls = ("s3://bucket/team", "https://host:8080/tilegen", "file:///mnt/team")
    options = read_from(
        {
            "TILEGEN_CACHE_DIR": str(tmp_path),
            "TILEGEN_CACHE_PATH": f"{tmp_path}/a;; {tmp_path}/b:c ;{';'.join(urls)}",
            "TILEGEN_TUNE": "1",
            "TILEGEN_DETERMINISTIC": "1",
            "TILEGEN_CHECK": "1",
            "TILEGEN_CPU": "kernels",
            "TILEGEN_LIBRARIES": "1",
            "TILEGEN_BATCH_INVARIANT": "1",
            "TILEGEN_HOPPER": "1",
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
        hopper=True,
    )
    assert asdict(expected) == asdict(options)


def test_bounds_are_checked_instead_of_values() -> None:
    options = read_from({"TILEGEN_CHECK": "bounds"})
    assert options.check_bounds
    assert not options.check
    with pytest.raises(Unsupported, match="TILEGEN_CPU must be torch or kernels, got 'gpu'"):
        read_from({"TILEGEN_CPU": "gpu"})


def test_the_environment_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "one"))
    assert tmp_path / "one" == current().cache_dir
    monkeypatch.setitem(os.environ, "TILEGEN_CACHE_DIR", str(tmp_path / "two"))
    assert tmp_path / "one" == current().cache_dir
    reread()
    assert tmp_path / "two" == current().cache_dir


def test_an_invalid_variable_is_named_at_every_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_CHECK", "yes")
    for _ in range(2):
        with pytest.raises(Unsupported, match="TILEGEN_CHECK must be 0, 1 or bounds, got 'yes'"):
            current()


# --------------------------------------------------------------------------------------------------
# Changes of a program


def test_a_block_changes_only_what_it_names_and_changes_it_back() -> None:
    before = current()
    with tilegen.settings(batch_invariant=True, cpu="kernels") as inside:
        assert inside is current()
        assert asdict(replace(before, batch_invariant=True, cpu="kernels")) == asdict(inside)
        with tilegen.settings(check="bounds"):
            assert (current().check, current().check_bounds) == (False, True)
            assert current().batch_invariant
        assert current() is inside
    assert current() is before


def test_a_function_call_changes_settings_for_good_and_equal_settings_are_one() -> None:
    before = current()
    with tilegen.settings():  # what the test changes ends here
        tilegen.settings(tune=True)
        assert current().tune
        tilegen.settings(tune=False)
        assert current() is before
        tilegen.settings(tune=True)
    assert current() is before


def test_values_are_those_of_the_variables(tmp_path: Path) -> None:
    with tilegen.settings(cache_dir=tmp_path, cache_path=[tmp_path / "a", "s3://team/b"], check=1):
        assert current().cache_dir == tmp_path
        assert current().cache_path == (str(tmp_path / "a"), "s3://team/b")
        assert current().check


def test_unknown_names_and_values_are_refused() -> None:
    before = current()
    with pytest.raises(Unsupported, match=r"cache_dir, .*batch_invariant.*; got invariant"):
        tilegen.settings(invariant=True)
    with pytest.raises(Unsupported, match="TILEGEN_CPU must be torch or kernels, got 'gpu'"):
        tilegen.settings(cpu="gpu")
    with pytest.raises(Unsupported, match="TILEGEN_TUNE must be 0 or 1, got 'yes'"):
        tilegen.settings(tune="yes")
    assert current() is before


def test_threads_do_not_disturb_each_other() -> None:
    before = current()
    with ThreadPoolExecutor(1) as pool, tilegen.settings(tune=True) as here:
        assert pool.submit(current).result() is before
        pool.submit(lambda: tilegen.settings(deterministic=True)).result()
        assert pool.submit(current).result().deterministic
        assert current() is here


def test_xdg_cache_home_is_honoured_unless_relative(tmp_path: Path) -> None:
    assert tmp_path / "tilegen" == read_from({"XDG_CACHE_HOME": str(tmp_path)}).cache_dir
    assert read_from({}).cache_dir == read_from({"XDG_CACHE_HOME": "cache"}).cache_dir


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert tmp_path / "here" == read_from({"TILEGEN_CACHE_DIR": "here"}).cache_dir
    assert Path.home() / "there" == read_from({"TILEGEN_CACHE_DIR": "~/there"}).cache_dir


def test_no_home_directory_names_the_variable_to_set() -> None:
    with pytest.raises(Unsupported, match=r"nobody-has-this-name.*set TILEGEN_CACHE_DIR"):
        read_from({"TILEGEN_CACHE_DIR": "~nobody-has-this-name/cache"})


@pytest.mark.parametrize("name", ["TILEGEN_TUNE", "TILEGEN_DETERMINISTIC", "TILEGEN_CHECK"])
@pytest.mark.parametrize("text", ["yes", "2", "true", " 1"])
def test_switch_that_is_neither_0_nor_1(name: str, text: str) -> None:
    expected = "0, 1 or bounds" if name == "TILEGEN_CHECK" else "0 or 1"
    with pytest.raises(Unsupported, match=f"{name} must be {expected}, got"):
        read_from({name: text})


def package_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = folder / "tilegen"
    package.mkdir()
    monkeypatch.setattr(resources, "files", lambda name: package if name == "tilegen" else None)
    return package


def test_data_is_beside_the_package_in_a_checkout() -> None:
    assert Path(__file__).parents[3] / "cache" == resources.data_dir("cache")


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
