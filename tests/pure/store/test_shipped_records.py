"""The records that ship with the package: in order, and what calls on their GPU take."""

from __future__ import annotations

import pytest

from tilegen import resources
from tilegen.devices import device_named
from tilegen.gpus.spec import gpu
from tilegen.pipeline import choose
from tilegen.problem import AttentionProblem
from tilegen.store import Location, list_records, look_up, places
from tilegen.task import KernelTask

SHIPPED = Location(str(resources.data_dir("cache")), "shipped")


def test_every_file_is_valid_and_found_by_its_fields() -> None:
    listed = list_records([SHIPPED])
    assert listed
    for file in listed:
        assert file.record is not None, file.reason
        assert not file.reason, file.reason
        record = file.record
        task = KernelTask.of(record.kernel, record.problem, device_named(record.gpu))
        entry = look_up(task, where=[SHIPPED], borrow=False)
        assert entry is not None
        assert entry.record == record


def test_calls_take_the_measured_config(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = AttentionProblem.parse("b2 hq64 hkv8 q8192 kv8192 d64 bf16 window(127,0)")
    by_model = choose(problem, gpu("h200"), "backward")["bwd_dkdv"]
    monkeypatch.setattr(places, "data_dir", resources.data_dir)  # as outside of tests
    taken = choose(problem, gpu("h200"), "backward")["bwd_dkdv"]
    assert taken.config.key == "m32n64w4s3"
    assert taken.config != by_model.config
