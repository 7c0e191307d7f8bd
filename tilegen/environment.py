"""The settings of tilegen, which only this module reads from the environment, once.

A call reads one frozen object, `current()`, whose identity is among the facts of the call. Equal
settings are one object, so that calls after a change and back find their plans again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tilegen.errors import Unsupported

CACHE_DIR = "TILEGEN_CACHE_DIR"
CACHE_PATH = "TILEGEN_CACHE_PATH"
TUNE = "TILEGEN_TUNE"
DETERMINISTIC = "TILEGEN_DETERMINISTIC"
CHECK = "TILEGEN_CHECK"
LIBRARIES = "TILEGEN_LIBRARIES"
HOPPER = "TILEGEN_HOPPER"
BATCH_INVARIANT = "TILEGEN_BATCH_INVARIANT"
CPU = "TILEGEN_CPU"
BOUNDS = "bounds"


@dataclass(frozen=True, kw_only=True, eq=False)  # `_only` makes equal settings one object
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
    hopper: bool
    """TILEGEN_HOPPER: kernels whose warpgroups have roles are used where they can be, without
    measured times."""


def settings(**changes: Any) -> AbstractContextManager[Settings]:
    """Change settings from now on, or for a `with` block, after which the former ones return.

    A setting is named as its environment variable, without `TILEGEN_` and in lower case:
    `settings(batch_invariant=True)`, `settings(cpu="torch")`, `settings(check="bounds")`. Values
    are those of the variables; True and False are 1 and 0. `cache_path` may be a list. Settings
    that are not named keep their values.

    The change is that of the calling thread, or of the asyncio task; all other threads keep theirs.
    A thread begins with the settings of the environment, which is read once, at the first use. A
    backward uses the settings of its forward, and a compiled graph those of the thread that runs
    it. Raises Unsupported.
    """
    known = {name.removeprefix("TILEGEN_").lower(): name for name in VARIABLES}
    if unknown := [name for name in changes if name not in known]:
        raise Unsupported(
            f"settings are {', '.join(known)}; got {', '.join(unknown)}, "
            "for example tilegen.settings(batch_invariant=True)"
        )
    read = read_from({known[name]: _text(value) for name, value in changes.items()})
    names = {*changes, *(["check_bounds"] if "check" in changes else [])}
    return _Chosen(_only(replace(current(), **{name: getattr(read, name) for name in names})))


VARIABLES = (
    *(CACHE_DIR, CACHE_PATH, TUNE, DETERMINISTIC, CHECK),
    *(CPU, BATCH_INVARIANT, LIBRARIES, HOPPER),
)
"""The environment variables that are read."""


def current() -> Settings:
    """Return the settings of this thread: those that `settings` chose, or else those of the
    environment when it was first read. Raises Unsupported, with the variable's name."""
    return chosen() or of_process or _read()


def of_environment() -> Settings:
    """Return the settings of the environment, whatever was chosen. Raises Unsupported."""
    return of_process or _read()


def using(given: Settings) -> AbstractContextManager[Settings]:
    """Use given settings in a `with` block, such as those of a forward in its backward, which may
    run in another thread."""
    return _Chosen(given)


def reread() -> None:
    """Read the environment again at the next use, for tests and for programs that change it."""
    global of_process
    of_process = None


class _Chosen(AbstractContextManager[Settings]):
    """Settings that hold from the creation of this object to the end of its `with` block."""

    def __init__(self, given: Settings) -> None:
        self._settings, self._before = given, chosen()
        _chosen.set(given)

    def __enter__(self) -> Settings:
        _chosen.set(self._settings)  # for the second block of one object
        return self._settings

    def __exit__(self, *_: object) -> None:
        _chosen.set(self._before)


_chosen: ContextVar[Settings | None] = ContextVar("tilegen settings", default=None)
chosen = _chosen.get
"""Return the settings that `settings` chose in this thread, or None."""
of_process: Settings | None = None
"""The settings of the environment, once it was read."""
_made: dict[tuple[Any, ...], Settings] = {}


def _read() -> Settings:
    global of_process
    read = of_process = read_from(os.environ)
    return read


def read_from(env: Mapping[str, str]) -> Settings:
    """Read settings from environment variables. Raises Unsupported, with the variable's name."""
    return _only(
        Settings(
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
            hopper=_switch(HOPPER, env.get(HOPPER, "")),
        )
    )


def _only(read: Settings) -> Settings:
    """Return the one object of these settings."""
    return _made.setdefault(tuple(getattr(read, field.name) for field in fields(read)), read)


def _text(value: Any) -> str:
    """Return the text that an environment variable would have for a value."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ";".join(map(str, value))
    return str(int(value)) if isinstance(value, bool) else str(value)


def _checks(text: str) -> bool:
    if text not in ("", "0", "1", BOUNDS):
        raise Unsupported(f"{CHECK} must be 0, 1 or {BOUNDS}, got {text!r}")
    return text == "1"


def _cpu(text: str) -> str:
    if text not in ("", "torch", "kernels"):
        raise Unsupported(f"{CPU} must be torch or kernels, got {text!r}")
    return text


def place(text: str) -> str:
    """Return a URL unchanged, and a folder as an absolute path. Raises Unsupported."""
    return text if "://" in text else str(_directory(text))


def _default_directory(env: Mapping[str, str]) -> Path:
    base = Path(env.get("XDG_CACHE_HOME", ""))
    # By the XDG specification, relative paths are ignored.
    try:
        return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "tilegen"
    except RuntimeError:  # no home: nothing can be written below a device, and calls do without
        return Path(os.devnull) / "no-home" / "tilegen"


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
