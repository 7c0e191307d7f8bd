"""The search with a compiler: what is compiled ahead, and what is never measured for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.problems import STEP, used
from tests.support.records import TASK
from tests.support.replay import (
    SMALL,
    Clock,
    Replay,
    ranking,
    run,
    slowness,
    trial_file,
    trials_on_disk,
)
from tilegen.errors import BuildFailed
from tilegen.kernels.config import TileConfig
from tilegen.model.on_chip import MOST_SPILLED
from tilegen.tuning.measure import Measurement
from tilegen.tuning.tuner import SEEDS, tune

pytestmark = pytest.mark.usefixtures("own_cache")


Built = Iterator[tuple[TileConfig, Any]]


def compiler(usage: dict[str, Any]) -> Callable[[Sequence[TileConfig]], Built]:
    """Return a compiler with these results by config key; it finishes the last config first."""

    def compile_all(configs: Sequence[TileConfig]) -> Built:
        for config in reversed(configs):
            yield config, usage.get(config.key, used())

    return compile_all


def test_hopeless_configs_cost_no_gpu_time(
    own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replay = Replay(SMALL)
    failed, too_large, spilling = replay.space[:3]
    usage = {
        failed.key: BuildFailed("attention_fwd for sm_90: PassManager::run failed"),
        too_large.key: used(shared_bytes=264 * 1024),
        spilling.key: used(spill_bytes=160),
    }
    record = run(replay, compile=compiler(usage))
    assert replay.space[3:] == replay.measured
    assert record.trials == 8
    lines = [json.loads(line) for line in trial_file(own_cache).read_text().splitlines()]
    assert [
        (line["measurement"]["status"], line["measurement"]["message"]) for line in lines[:3]
    ] == [
        ("build_failed", "attention_fwd for sm_90: PassManager::run failed"),
        ("out_of_resources", "264 KiB > 227 KiB"),
        ("declined", "160 bytes of registers spilled per thread; the limit is 128"),
    ]
    assert caplog.messages[1].endswith(f"{too_large!r} out of resources: 264 KiB > 227 KiB")


def test_kernels_that_spill_a_little_are_measured_and_may_win(own_cache: Path) -> None:
    replay = Replay(SMALL)
    usage = {replay.fastest.key: used(spill_bytes=120)}
    assert run(replay, compile=compiler(usage)).config == replay.fastest
    assert replay.measured == replay.space
    lines = [json.loads(line) for line in trial_file(own_cache).read_text().splitlines()]
    (spilling,) = [line for line in lines if line["spill_bytes"]]
    assert (TileConfig(**spilling["config"]), spilling["spill_bytes"]) == (replay.fastest, 120)
    assert spilling["measurement"]["status"] == "ok"


def test_where_everything_spills_much_the_least_is_measured_after_all(own_cache: Path) -> None:
    replay = Replay(SMALL)
    slowest_first = sorted(replay.space, key=slowness, reverse=True)
    usage: dict[str, Any] = {
        config.key: used(spill_bytes=MOST_SPILLED + 8 + 8 * rank)
        for rank, config in enumerate(slowest_first)
    }
    usage[slowest_first[1].key] = BuildFailed("no")
    record = run(replay, compile=compiler(usage))
    expected = [slowest_first[0], *slowest_first[2:]]
    assert expected == replay.measured
    assert record.config == replay.fastest
    again = Replay(SMALL)
    assert run(again, compile=compiler(usage)).config == record.config
    assert again.measured == []


@pytest.mark.parametrize("one_runs", [False, True])
def test_kernels_that_wait_for_each_product_are_measured_if_no_other_runs(one_runs: bool) -> None:
    """On an H200 with Triton 3.6, the first three values kernels of 512 columns all do."""
    waits = used(step_code=replace(STEP, serialized=True, local=0))
    replay = Replay(SMALL)
    usage = {config.key: waits for config in replay.space[one_runs:]}
    run(replay, compile=compiler(usage))
    assert replay.measured == (replay.space[:1] if one_runs else replay.space)


def test_time_is_not_all_spent_on_compiling_spilling_configs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay, clock = Replay(), Clock()

    def compile_all(configs: Sequence[TileConfig]) -> Built:
        for config in configs:
            clock.sleep(0.1)
            yield config, used(spill_bytes=MOST_SPILLED + 8)

    clock.replaces_time_of("tilegen.tuning.tuner", monkeypatch)
    record = run(replay, seconds=0.05, compile=compile_all)
    assert [record.config] == replay.measured


def test_the_next_configs_are_compiled_while_one_is_measured() -> None:
    replay = Replay(SMALL)
    compiled = {config: threading.Event() for config in replay.space}
    second = compiled[replay.space[1]]

    def compile_all(configs: Sequence[TileConfig]) -> Built:
        for config in configs:
            compiled[config].set()
            yield config, used()

    def measure(config: TileConfig) -> Measurement:
        assert second.wait(timeout=20), "nothing was compiled during the first measurement"
        return replay(config)

    tune(
        TASK,
        measure=measure,
        compile=compile_all,
        candidates=ranking(replay.space),
        space=[],
        progress=False,
    )
    assert replay.space == replay.measured


def test_only_configs_to_be_measured_soon_are_compiled() -> None:
    replay = Replay()
    asked: list[int] = []

    def compile_all(configs: Sequence[TileConfig]) -> Built:
        asked.append(len(configs))
        yield from compiler({})(configs)

    run(replay, trials=SEEDS + 5, compile=compile_all)
    assert asked[0] == SEEDS
    assert sum(asked) == SEEDS + 5


def test_a_compiler_that_breaks_is_an_error_not_a_result(own_cache: Path) -> None:
    def compile_all(configs: Sequence[TileConfig]) -> Built:
        yield configs[0], used()
        raise OSError("no space left on device")

    replay = Replay(SMALL)
    with pytest.raises(OSError, match="no space left"):
        run(replay, compile=compile_all)
    assert replay.measured == replay.space[:1] == trials_on_disk(own_cache)


def test_a_compiler_that_forgets_a_config_does_not_hang() -> None:
    def compile_all(configs: Sequence[TileConfig]) -> Built:
        yield from ((config, used()) for config in configs[1:])

    with pytest.raises(BuildFailed, match="gave no result"):
        run(Replay(SMALL), compile=compile_all)


def test_time_runs_out_while_the_compiler_works(own_cache: Path) -> None:
    release = threading.Event()

    def compile_all(configs: Sequence[TileConfig]) -> Built:
        yield configs[0], used()
        release.wait()

    replay = Replay(SMALL)
    record = run(replay, seconds=0.3, compile=compile_all)
    release.set()
    assert replay.measured == [record.config] == replay.space[:1]
