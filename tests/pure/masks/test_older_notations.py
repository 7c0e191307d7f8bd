"""Looking up: records under an older notation of the mask."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.records import (
    H200,
    PROBLEM,
    own,
    place,
    record,
    written,
)
from tilegen.kernels.config import TileConfig
from tilegen.masks.notation import parse_mask
from tilegen.store import (
    TuningRecord,
    list_records,
    look_up,
)
from tilegen.store.record import path_of_key
from tilegen.store.transfer import merge
from tilegen.task import KernelTask

OLD, NEW = "causal&window(15,0)", "window(15,0)"


def _spelt_older(root: Path, finding: TuningRecord, older: str, newer: str = NEW) -> Path:
    """Write a record as an earlier tilegen did, which had another notation of the mask."""
    text = finding.to_json().replace(newer, older)
    assert json.loads(text)["problem"].split()[7] == older
    file = root / path_of_key(
        finding.gpu, finding.kernel, json.loads(text)["problem"], finding.policy
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("us, winner", [(300.0, OLD), (500.0, NEW)])
def test_records_under_an_older_notation_of_the_mask_are_found(
    tmp_path: Path, us: float, winner: str
) -> None:
    """The better of two spellings wins, and a join leaves one file."""
    problem = replace(PROBLEM, mask=parse_mask(OLD))
    assert problem.mask.notation == NEW
    task = KernelTask.of("fwd", problem, H200)
    older = record(
        problem=problem,
        us=us,
        config=TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=2),
        source="0" * 12,
    )
    file = _spelt_older(tmp_path, older, OLD)
    used = look_up(task, where=[own(tmp_path)])
    assert used is not None
    assert (used.record.config, Path(used.file)) == (older.config, file)
    newer = record(problem=problem, us=400.0, source="1" * 12)
    place(tmp_path, newer)
    used = look_up(task, where=[own(tmp_path)])
    assert used is not None
    assert used.record.config == (older if winner == OLD else newer).config
    assert [listed.reason for listed in list_records([own(tmp_path)])] == ["", ""]
    target = tmp_path / "target"
    moved = list(merge([own(tmp_path)], own(target)))
    assert [one.action for one in moved].count("refused") == 0
    assert [file.relative_to(target) for file in written(target)] == [Path(newer.path)]


@pytest.mark.parametrize(
    "mask, older",
    [
        ("causal", "keep(k<=q)"),
        ("window(7,0)", "causal&window(7,-1)"),
        ("window(7,0)", "keep((k<=q)&(q-k<=7))"),
        ("documents(@q:64)&window(7,0)", "causal&documents(@q:64)&window(7,0)"),
    ],
)
def test_older_notations_are_of_the_same_mask(mask: str, older: str, tmp_path: Path) -> None:
    problem = replace(PROBLEM, mask=parse_mask(mask))
    assert parse_mask(older) == problem.mask
    _spelt_older(tmp_path, record(problem=problem), older, mask)
    assert look_up(KernelTask.of("fwd", problem, H200), where=[own(tmp_path)]) is not None
