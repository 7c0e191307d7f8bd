"""Tuning by a real Ray cluster on loopback, whose workers, nodes and drivers come to harm."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.recordings import Recorder, new_session
from tests.programs.ray_nodes import Nodes, lines_of, needs_ray
from tests.support.records import H200, PROBLEM
from tests.support.replay import Replay
from tilegen.kernels.config import TileConfig
from tilegen.store import TuningRecord
from tilegen.store.trials import Trial

pytestmark = needs_ray
PROBLEMS = [
    "b1 hq2 hkv2 q64 kv64 d32 fp32 causal",
    "b1 hq2 hkv1 q64 kv64 d64 fp32 full",
    "b1 hq2 hkv2 q128 kv128 d32 bf16 causal",
    "b1 hq2 hkv2 q128 kv128 d32 fp32 window(15,0)",
]
SPACE = [config for config, one in Replay().timings.items() if one.median_us][:24]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with Nodes(tmp_path) as nodes:
        yield nodes


@pytest.fixture
def replay(tmp_path: Path) -> Path:
    """Recordings of 24 configs, whose seconds outlast the delays of a busy machine."""
    return recorded(tmp_path / "recordings", 1.5)


def recorded(folder: Path, seconds: float) -> Path:
    recorder = Recorder(folder / "one.jsonl", new_session(H200, "fwd", PROBLEM, len(SPACE)))
    for config in SPACE:
        recorder.append(Trial(config=config, measurement=Replay().timings[config], seconds=seconds))
    return folder


def record_in(cache: Path) -> TuningRecord:
    (file,) = (cache / "h200").rglob("*.json")
    return TuningRecord.from_json(file.read_text(encoding="utf-8"))


def fastest() -> TileConfig:
    return min(SPACE, key=lambda config: (Replay().timings[config].median_us, config))


def test_two_nodes_tune_a_processor(nodes: Nodes, tmp_path: Path) -> None:
    """One of them has a full disk: a file stands where its folder should be."""
    catalogue, full = tmp_path / "models.txt", tmp_path / "full"
    catalogue.write_text("\n".join(PROBLEMS), encoding="utf-8")
    full.write_text("")
    nodes.start(2)
    nodes.start(2, cache=full)
    words = ["--catalog", str(catalogue), "--kernel", "fwd", "--trials", "3"]
    driver = nodes.drive(*words, "--json")
    code, out = driver.end()
    assert code == 0, driver.said
    outcome = json.loads(out)
    assert {record["problem"] for record in outcome["records"]} == set(PROBLEMS)
    trials = lines_of(tmp_path / "driver")
    keys = [(trial["conditions"]["problem"], json.dumps(trial["config"])) for trial in trials]
    assert len(keys) == len(set(keys)) == outcome["measured"]
    assert {trial["measurement"]["status"] for trial in trials} == {"ok"}
    assert not list(tmp_path.glob("node-*/trials")), "nodes store nothing"
    code, out = nodes.drive(*words).end()
    assert (code, out) == (0, "0 configs measured, 4 winners\n")


def test_a_killed_worker_and_a_lost_node_lose_no_trial(nodes: Nodes, tmp_path: Path) -> None:
    nodes.start(0)
    replay = recorded(tmp_path / "recordings", 3.0)
    driver = nodes.drive("--catalog", PROBLEM.key, "--replay", str(replay))
    nodes.start(2, gpus=2, h200=2)  # nodes may join at any time
    driver.wait_for("has h200, for 2 at once")
    driver.wait_for(" begins ", 3)
    os.kill(nodes.workers(1)[0], signal.SIGKILL)
    driver.wait_for("what it measured is kept")
    nodes.start(1, gpus=1, h200=1)
    driver.wait_for("has h200, for 1 at once")
    nodes.end(1)
    code, out = driver.end()
    assert code == 0, driver.said
    assert "left, with h200" in driver.said
    assert out == "24 configs measured, 1 winner\n"
    times = Counter(json.dumps(trial["config"]) for trial in lines_of(tmp_path / "driver"))
    assert len(times) == 24
    assert set(times.values()) == {1}
    assert record_in(tmp_path / "driver").config == fastest()


def test_an_interrupted_driver_goes_on(nodes: Nodes, replay: Path, tmp_path: Path) -> None:
    nodes.start(2, gpus=2, h200=2)
    words = ["--catalog", PROBLEM.key, "--replay", str(replay)]
    driver = nodes.drive(*words)
    driver.wait_for(" begins ", 3)
    driver.process.send_signal(signal.SIGINT)
    assert driver.end()[0] == 130
    assert driver.said.endswith("interrupted; what is done is kept: the same command goes on\n")
    kept = len(lines_of(tmp_path / "driver"))
    assert 0 < kept < 24
    code, out = nodes.drive(*words).end()
    assert (code, out) == (0, f"{24 - kept} configs measured, 1 winner\n")
    assert len(lines_of(tmp_path / "driver")) == 24
    assert record_in(tmp_path / "driver").config == fastest()


def test_a_config_that_ends_two_workers_is_recorded_as_failed(
    nodes: Nodes, replay: Path, tmp_path: Path
) -> None:
    nodes.start(1, gpus=1, h200=1)
    guilty = SPACE[5].key
    driver = nodes.drive("--catalog", PROBLEM.key, "--replay", str(replay))
    for times in (1, 2):
        driver.wait_for(f" begins {guilty}\n", times)
        (worker,) = nodes.workers(0)
        os.kill(worker, signal.SIGKILL)
    code, out = driver.end()
    assert (code, out) == (0, "23 configs measured, 1 winner\n"), driver.said
    (failed,) = [t for t in lines_of(tmp_path / "driver") if t["measurement"]["status"] != "ok"]
    assert TileConfig(**failed["config"]).key == guilty
    assert failed["measurement"]["message"].startswith("twice its worker ended: ")


def test_a_device_that_no_node_has_is_named_and_the_rest_is_done(
    nodes: Nodes, replay: Path, tmp_path: Path
) -> None:
    nodes.start(2, gpus=2, h200=2)
    words = ["--catalog", PROBLEM.key, "--replay", str(replay), "--gpu", "h200", "--gpu", "a100"]
    driver = nodes.drive(*words, "--json", grace=5.0)
    code, out = driver.end()
    assert code == 1, driver.said
    assert "no node has a100, for which work waits; the rest goes on" in driver.said
    assert json.loads(out)["missing"] == ["a100"]
    assert record_in(tmp_path / "driver").config == fastest()
