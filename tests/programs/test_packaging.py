"""The installed files, for any kind of installation: the package, templates and cache."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_INSTALLED = {"__pycache__"}
DATA_FOLDERS = ("templates", "cache")

# Run where only the installed package is importable: what an installation says about itself.
ASK_INSTALLATION = """
import site, sys
sys.path.insert(0, sys.argv[1])
site.addsitedir(sys.argv[1])  # follows the path file of an editable install
import tilegen
from tilegen.resources import data_dir
print(tilegen.__file__)
for name in ("templates", "cache"):
    found = data_dir(name)
    print(name, *sorted(str(p.relative_to(found)) for p in found.rglob("*") if p.is_file()))
"""


def files_under(folder: Path) -> set[str]:
    """Return the files that belong to a folder of the checkout, relative to it."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not NOT_INSTALLED & set(path.parts)
    }


def hatchling(*arguments: str) -> None:
    pytest.importorskip("hatchling", reason="needs hatchling; pip install 'tilegen[dev]'")
    subprocess.run([sys.executable, "-m", "hatchling", *arguments], cwd=ROOT, check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    hatchling("build", "-t", "wheel", "-d", str(folder))
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    hatchling("build", "-t", "sdist", "-d", str(folder))
    return next(folder.glob("*.tar.gz"))


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def expected_in_wheel() -> set[str]:
    package = {f"tilegen/{name}" for name in files_under(ROOT / "tilegen")}
    data = {
        f"tilegen/_data/{folder}/{name}"
        for folder in DATA_FOLDERS
        for name in files_under(ROOT / folder)
    }
    return package | data


def test_data_folders_hold_files_and_no_python() -> None:
    for folder in DATA_FOLDERS:
        names = files_under(ROOT / folder)
        assert names, f"{folder}/ is empty: hatchling would leave it out without a word"
        assert not [name for name in names if name.endswith(".py")], "breaks editable installs"


def test_wheel_holds_package_templates_and_cache(wheel: Path) -> None:
    assert names_in(wheel) == expected_in_wheel()


@pytest.mark.slow
def test_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")],
        cwd=source,
        check=True,
    )
    assert names_in(next((tmp_path / "dist").glob("*.whl"))) == names_in(wheel)


def ask(installation: Path) -> list[str]:
    """Run ASK_INSTALLATION outside the checkout, for an unpacked wheel; return its output."""
    result = subprocess.run(
        [sys.executable, "-c", ASK_INSTALLATION, str(installation)],
        cwd=installation,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.splitlines()


def data_listing() -> list[str]:
    return [" ".join([name, *sorted(files_under(ROOT / name))]) for name in DATA_FOLDERS]


def test_installed_wheel_finds_its_data(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    where, *data = ask(tmp_path)
    assert where == str(tmp_path / "tilegen" / "__init__.py")
    assert data == data_listing()


def test_editable_install_finds_its_data(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    built = next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["editable"]))
    with zipfile.ZipFile(built) as archive:
        archive.extractall(tmp_path)
    where, *data = ask(tmp_path)
    assert where == str(ROOT / "tilegen" / "__init__.py")
    assert data == data_listing()


def test_metadata_states_the_requirements(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = HeaderParser().parsestr(archive.read(name).decode())
        (scripts,) = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
        entries = archive.read(scripts).decode()
    assert "tilegen = tilegen.cli.main:main" in entries
    for group, module in (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")):
        assert f"[{group}]\ntilegen = tilegen.integrations.{module}:register\n" in f"{entries}\n"
    requirements = metadata.get_all("Requires-Dist") or []
    assert metadata["Requires-Python"] == ">=3.11"
    assert "torch>=2.11" in requirements
    assert "triton>=3.6" in requirements
