"""The settings of tilegen, which only this module reads from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilegen.errors import Unsupported

CACHE_DIR = "TILEGEN_CACHE_DIR"
CACHE_PATH = "TILEGEN_CACHE_PATH"
TUNE = "TILEGEN_TUNE"
DETERMINISTIC = "TILEGEN_DETERMINISTIC"
CHECK = "TILEGEN_CHECK"
LIBRARIES = "TILEGEN_LIBRARIES"
BATCH_INVARIANT = "TILEGEN_BATCH_INVARIANT"
CPU = "TILEGEN_CPU"
BOUNDS = "bounds"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings, each from an environment variable."""

    cache_dir: Path
    """TILEGEN_CACHE_DIR: the local cache, with records, trials, emitted kernels and results of the
    compiler."""
    cache_path: tuple[str, ...]
    """TILEGEN_CACHE_PATH: more locations of records, folders or URLs, in search order."""
    tune: bool
    """TILEGEN_TUNE: `attention` tunes a problem that has no measured record."""
    deterministic: bool
    """TILEGEN_DETERMINISTIC: choose by records and model only, so that all ranks agree."""
    check: bool
    """TILEGEN_CHECK=1: check values of tensors on a GPU at every call, which waits for the GPU."""
    check_bounds: bool
    """TILEGEN_CHECK=bounds: kernels compiled for the CPU compare each address with its tensor."""
    cpu: str
    """TILEGEN_CPU: `kernels` computes calls on CPU tensors with kernels compiled for the CPU,
    `torch` with PyTorch. Empty: with kernels, or with PyTorch if they cannot be compiled."""
    batch_invariant: bool
    """TILEGEN_BATCH_INVARIANT: a request's forward gives the same bits, whatever else is in the
    batch, however its prompt is cut into chunks, and wherever its keys are stored."""
    libraries: bool
    """TILEGEN_LIBRARIES: PyTorch's own kernels are tuned too, and used for a pass if they were
    measured to be faster."""


def settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from the environment. Raises Unsupported, with the variable's name."""
    env = os.environ if environ is None else environ
    return Settings(
        cache_dir=_directory(env[CACHE_DIR]) if env.get(CACHE_DIR) else _default_directory(env),
        cache_path=tuple(
            place(part.strip()) for part in env.get(CACHE_PATH, "").split(";") if part.strip()
        ),
        tune=_switch(TUNE, env.get(TUNE, "")),
        deterministic=_switch(DETERMINISTIC, env.get(DETERMINISTIC, "")),
        check=_checks(env.get(CHECK, "")),
        check_bounds=env.get(CHECK) == BOUNDS,
        cpu=_cpu(env.get(CPU, "")),
        batch_invariant=_switch(BATCH_INVARIANT, env.get(BATCH_INVARIANT, "")),
        libraries=_switch(LIBRARIES, env.get(LIBRARIES, "")),
    )


def checks() -> bool:
    """Read `settings().check` alone, fast enough for every call. Raises Unsupported."""
    # For a variable that is not set, `os.environ.get` raises and catches an error, which takes
    # twenty times as long as a look-up in its undocumented dict. Without that dict, use `get`.
    encoded = getattr(os.environ, "_data", None)
    if encoded is not None and _CHECK_KEY not in encoded:
        return False
    return _checks(os.environ.get(CHECK, ""))


def _checks(text: str) -> bool:
    if text not in ("", "0", "1", BOUNDS):
        raise Unsupported(f"{CHECK} must be 0, 1 or {BOUNDS}, got {text!r}")
    return text == "1"


def _cpu(text: str) -> str:
    if text not in ("", "torch", "kernels"):
        raise Unsupported(f"{CPU} must be torch or kernels, got {text!r}")
    return text


_CHECK_KEY: Any = getattr(os.environ, "encodekey", str)(CHECK)
"""TILEGEN_CHECK in the encoding of `os.environ`."""


def place(text: str) -> str:
    """Return a URL unchanged, and a folder as an absolute path. Raises Unsupported."""
    return text if "://" in text else str(_directory(text))


def _default_directory(env: Mapping[str, str]) -> Path:
    base = Path(env.get("XDG_CACHE_HOME", ""))
    # By the XDG specification, relative paths are ignored.
    return (base if base.is_absolute() else _directory("~/.cache")) / "tilegen"


def _directory(text: str) -> Path:
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:  # no home directory, or no such user
        raise Unsupported(
            f"cannot expand {text!r} ({error}); set {CACHE_DIR} to a folder you can write to"
        ) from None


def _switch(name: str, text: str) -> bool:
    if text not in ("", "0", "1"):
        raise Unsupported(f"{name} must be 0 or 1, got {text!r}")
    return text == "1"
