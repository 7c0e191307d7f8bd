"""Devices by name, of both catalogues."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.records import PROBLEM, timed
from tilegen import api
from tilegen.cpus.host import current_cpu
from tilegen.cpus.spec import cpu
from tilegen.device import ONE_THREAD
from tilegen.devices import device_named, device_of
from tilegen.errors import Unsupported
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.store import Location, TuningRecord, Versions, look_up, save
from tilegen.task import KernelTask


def test_names_of_gpus_and_processors() -> None:
    assert device_named("h200") == gpu("h200")
    assert device_named(" Zen5 ") == cpu("zen5")
    assert device_named("cpu") == current_cpu()
    assert device_of(cpu("zen4")) == cpu("zen4")
    with pytest.raises(Unsupported, match="gpu must be one of"):
        device_named("zen17")
    with pytest.raises(Unsupported, match="fast_memory is for GPUs, got the processor zen5"):
        device_of("zen5", "48KiB")
    assert device_of("a100", 65536).name == "a100"
    with pytest.raises(Unsupported, match="tilegen explain PROBLEM --gpu zen5"):
        api.verify("hq2 q64 d64 fp32 full", "zen5")


def test_proposals_for_a_processor() -> None:
    candidates = api.propose("b1 hq2 hkv2 q1024 kv1024 d64 fp32 causal", "zen4", top=3)
    assert len(candidates) == 3
    assert candidates[0].estimate.cost <= candidates[1].estimate.cost
    with pytest.raises(Unsupported, match="leave compile out"):
        api.propose("b1 hq2 hkv2 q1024 kv1024 d64 fp32 causal", "zen4", compile=True)


def test_records_of_processors_are_found_and_borrowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = [Location(str(tmp_path), "own")]
    record = TuningRecord(
        gpu="zen5",
        arch="avx512bf16",
        kernel="fwd",
        problem=PROBLEM,
        policy=ONE_THREAD,
        config=TileConfig.parse("m128n64w4s2"),
        measurement=timed(100.0),
        versions=Versions(),
        date="2026-11-26T12:00:00Z",
    )
    assert save(record, location=where[0]).written
    entry = look_up(KernelTask.of("fwd", PROBLEM, cpu("zen5")), where=where)
    assert entry
    assert (entry.record, entry.borrowed) == (record, False)
    # The same vectors and products: the record serves, with a word about it.
    near = look_up(KernelTask.of("fwd", PROBLEM, cpu("zen4")), where=where)
    assert near
    assert near.borrowed
    assert "no measured record for zen4" in caplog.text
    # Other vectors, or a GPU: it does not.
    for device in (cpu("zen3"), cpu("ice-lake"), gpu("h200")):
        assert look_up(KernelTask.of("fwd", PROBLEM, device), where=where) is None
