"""Folders of files that ship with tilegen: templates and records."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Literal

from tilegen.errors import Unsupported


def data_dir(name: Literal["templates", "cache"]) -> Path:
    """Return the folder of the templates or of the shipped records. Raises Unsupported."""
    package = Path(str(files("tilegen")))
    installed, checkout = package / "_data" / name, package.parent / name
    for folder in (installed, checkout):
        if folder.is_dir():
            return folder
    raise Unsupported(
        f"expected the {name} folder at {installed} or {checkout}, found neither; reinstall tilegen"
    )
