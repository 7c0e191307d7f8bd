"""Pytest configuration: the tiers, the golden fixture, a cache directory that is not the user's.

Folders are spread over all cores by pytest-xdist, where it is installed.

| folder       | needs            | runs with plain `pytest`                            |
| ------------ | ---------------- | --------------------------------------------------- |
| pure         | nothing          | yes                                                 |
| traced       | PyTorch compiles | yes                                                 |
| programs     | other processes  | yes                                                 |
| compile_only | Triton, no GPU   | yes                                                 |
| gluon        | Triton, no GPU   | yes                                                 |
| compiler     | Triton, LLVM     | yes                                                 |
| compiled     | Triton, LLVM     | yes                                                 |
| interpret    | Triton, no GPU   | no: TRITON_INTERPRET=1 pytest tests/interpret       |
| gpu          | a CUDA device    | yes; if there is none, rehearsed by rehearsal.py |

explaining, theory and benchmarks are as pure, and about one thing each.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import pytest

from tilegen.environment import reread

TESTS = Path(__file__).parent
MOST_WORKERS = 8
"""Each holds PyTorch and SymPy, half a gigabyte; the slowest tests would not end any sooner."""
SHARES = {"sampled": 10, "slow": 5}
"""One in this many of the tests with a marker runs."""
SLOW = ("compile_only", "compiled", "compiler", "explaining", "gluon", "traced")
"""Folders of slow tests, with long lists of cases."""
FEW = 3
"""Longest list of cases that always runs whole."""
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

# --------------------------------------------------------------------------------------------------
# Hooks


def _reading_again(change: Callable[..., Any]) -> Callable[..., Any]:
    """Have tilegen read the environment again after pytest changes it."""

    @functools.wraps(change)
    def changed(*given: Any, **options: Any) -> Any:
        change(*given, **options)
        reread()

    return changed


for _name in ("setenv", "delenv", "undo"):
    setattr(pytest.MonkeyPatch, _name, _reading_again(getattr(pytest.MonkeyPatch, _name)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="accept what the tests produce: write it to tests/golden/ instead of comparing",
    )
    parser.addoption(
        "--all",
        action="store_true",
        help="run all cases of long lists and all slow tests, not a fifth or a tenth of them",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Whatever is set: workers and programs of tests would compile the same modules again and again.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if has_gpu_device() and hasattr(config, "workerinput"):
        # With its own share of the cores, a worker compiles in its process. Else each worker would
        # start as many compilers as there are cores.
        cores, number = sorted(os.sched_getaffinity(0)), int(config.workerinput["workerid"][2:])
        os.sched_setaffinity(0, cores[number :: config.workerinput["workercount"]] or cores)
    if find_spec("hypothesis"):  # a busy machine is not a failure
        from hypothesis import HealthCheck, settings

        slow = [HealthCheck.too_slow]
        settings.register_profile("any machine", deadline=None, suppress_health_check=slow)
        settings.load_profile("any machine")
    asked_for = (Path(arg.split("::")[0]).resolve() for arg in config.args)
    if not INTERPRETING and any(path.is_relative_to(TESTS / "interpret") for path in asked_for):
        raise pytest.UsageError(
            "tests/interpret needs TRITON_INTERPRET=1 before triton is first imported; "
            "run TRITON_INTERPRET=1 pytest tests/interpret"
        )


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist's own, which acts on what is set here
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Spread folders over the cores, if pytest-xdist is installed and no other option is given."""
    options = config.option
    if not config.pluginmanager.hasplugin("xdist") or hasattr(config, "workerinput"):
        return
    asked_for = options.numprocesses is not None or options.tx or options.dist != "no"
    # Single files are done before workers have started; who watches wants to see one process.
    watched = options.usepdb or options.capture == "no" or options.collectonly
    folders = any(Path(arg).is_dir() for arg in config.args)
    # Tests on a GPU have it to themselves: some measure time, some fill its memory.
    if folders and not (asked_for or watched or has_gpu_device()):
        options.numprocesses = min(os.cpu_count() or 1, MOST_WORKERS)
        options.dist = "worksteal"  # neighbours stay together, and share what their module set up
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # else threads of all workers wait for cores


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Keep the interpreter apart: a process that interprets kernels cannot compile any."""
    if not collection_path.is_relative_to(TESTS) or collection_path == TESTS:
        return None
    is_rehearsal = config.pluginmanager.hasplugin("tests.rehearsal")
    tier = TESTS / ("gpu" if is_rehearsal else "interpret")
    is_interpreted = collection_path.is_relative_to(tier)
    return None if is_interpreted == INTERPRETING else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _sample(config, items)
    on_gpu = [item for item in items if item.path.is_relative_to(TESTS / "gpu")]
    reason = _why_no_gpu() if on_gpu else None
    for item in on_gpu:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep some of the tests of long lists, others for each commit, unless tests are named.

    Of those marked `sampled` a tenth: they break the code, or vary one thing, and most faults turn
    many of them red. Of those marked `slow` a fifth: they are one in ten, and take three quarters
    of the time. Of the slow folders a fifth of each list (see `_beyond`).
    """
    keyword = config.option.keyword
    named = any("::" in arg for arg in config.args) or (keyword and not keyword.startswith("not "))
    if config.getoption("--all") or named:
        return
    commit = seed()
    dropped: set[pytest.Item] = set()
    lists: dict[object, list[Any]] = {}
    for item in items:
        number = zlib.crc32(f"{commit}:{item.nodeid}".encode())
        share = max((n for name, n in SHARES.items() if item.get_closest_marker(name)), default=1)
        if share > 1:
            dropped |= {item} if number % share else set()
        elif item.path.parent.name in SLOW and hasattr(item, "callspec"):
            lists.setdefault((item.path, getattr(item, "function", None)), []).append(
                (number, item)
            )
    for cases in lists.values():
        dropped.update(_beyond([case for _, case in sorted(cases, key=lambda case: case[0])]))
    if dropped:
        config.hook.pytest_deselected(items=list(dropped))
        items[:] = [item for item in items if item not in dropped]


def _beyond(cases: list[Any]) -> list[Any]:
    """Return the cases of a test that are left out: of more than FEW all but a fifth, and all but
    those that have the first of a parameter's values, if there are several parameters."""
    several = sum(1 for _ in cases[0].iter_markers("parametrize")) > 1
    seen: set[tuple[str, int]] = set()
    repeated: list[Any] = []
    for case in cases:
        params = case.callspec.params.items() if several else ()
        values = {(name, id(value)) for name, value in params}
        if values <= seen:
            repeated.append(case)
        seen |= values
    least = max(FEW, -(-len(cases) // SHARES["slow"]))
    return repeated[max(0, least - (len(cases) - len(repeated))) :]


@functools.cache
def seed() -> str:
    """Return the seed of samples: `TESTS_SEED`, or else the commit of the checkout."""
    git = ("git", "-C", str(TESTS), "rev-parse", "--short=12", "HEAD")
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        commit = ""
    return os.environ.get("TESTS_SEED") or commit or "0"


def pytest_collection_finish() -> None:
    """Look for garbage in what tests make alone, and less often than every 700 objects.

    What was imported stays, and is a million objects; interpreted kernels and formulas make many
    that nothing refers to later anyway.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_report_header() -> str:
    mode = "interpreting" if INTERPRETING else "compiling"
    return (
        f"torch {version('torch')}, triton {version('triton')} ({mode}), "
        f"numpy {version('numpy')}; a sample of the tests by TESTS_SEED={seed()}, or --all"
    )


# --------------------------------------------------------------------------------------------------
# Fixtures


class CheckGolden(Protocol):
    def __call__(self, text: str, suffix: str = ".txt") -> None: ...


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> CheckGolden:
    """Return a function that compares a text with the golden file named after the running test."""
    update: bool = request.config.getoption("--update-golden")

    def check(text: str, suffix: str = ".txt") -> None:
        path = golden_path(request.node, suffix)
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        shown = path.relative_to(TESTS.parent)
        if not path.exists():
            pytest.fail(
                f"no golden file {shown}; read what the test produced (below), "
                f"then accept it with --update-golden\n\n{text}",
                pytrace=False,
            )
        expected = path.read_text(encoding="utf-8")
        assert expected == text, f"{shown} differs; if the change is right, run --update-golden"

    return check


@pytest.fixture(autouse=True, scope="session")
def _own_cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's and the shipped records out of the tests, and the tests' out of the cache."""
    from tilegen.store import places

    ships_nothing = tmp_path_factory.mktemp("shipped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEGEN_CACHE_DIR", str(tmp_path_factory.mktemp("tilegen-cache")))
        # The records of a release must not decide what tests of the model and of the store see.
        patch.setattr(places, "data_dir", lambda _: ships_nothing)
        patch.delenv("TILEGEN_CACHE_PATH", raising=False)
        patch.delenv("TILEGEN_TUNE", raising=False)
        patch.delenv("TILEGEN_DETERMINISTIC", raising=False)
        # Compiling would take most of the time. tests/compiled and tests/traced run the kernels.
        patch.setenv("TILEGEN_CPU", "torch")
        yield


# --------------------------------------------------------------------------------------------------
# Implementation


def golden_path(node: pytest.Item, suffix: str) -> Path:
    """Return golden/render/kernel-fwd-causal.txt for test_render.py::test_kernel[fwd-causal]."""
    name = re.sub(r"[^\w.]+", "-", node.name.removeprefix("test_")).strip("-")
    return TESTS / "golden" / node.path.stem.removeprefix("test_") / f"{name}{suffix}"


def has_gpu_device() -> bool:
    """Return True if this machine has a GPU of NVIDIA's or AMD's; loads nothing."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))


def _why_no_gpu() -> str | None:
    import torch  # here, because tests that do not need it should not wait for it

    return None if torch.cuda.is_available() else "no CUDA device on this machine"
