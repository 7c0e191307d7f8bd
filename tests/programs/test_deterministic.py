"""Ranks that must agree: no clock has a say, and rank 0 may choose for all of them."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.records import (
    A100,
    H200,
    PROBLEM,
    RECORD,
    TASK,
    UNMEASURED,
    own,
    place,
    record,
    timed,
)
from tilegen import pipeline
from tilegen.calls import ranks
from tilegen.choose import records
from tilegen.errors import Unsupported
from tilegen.kernels.config import TileConfig
from tilegen.store import Unreachable, save
from tilegen.task import KernelTask
from tilegen.tuning import tuner as tune_module

KEY = PROBLEM.key

# A process whose clocks run wild: they jump, and no two processes have them alike.
CHOOSES = """
import random, sys, time
seed = int(sys.argv[1])
wild, offset = random.Random(seed), 1e6 * seed
for name in ("time", "monotonic", "perf_counter"):
    setattr(time, name, lambda real=getattr(time, name): real() + offset + wild.uniform(-9, 9))
from tilegen.gpus.spec import gpu
from tilegen.pipeline import choose_kernel
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask
for text, kernel in (("{key}", "fwd"), ("{key}", "bwd_dq"), ("hq8 q512 d64 bf16 causal", "fwd")):
    problem = AttentionProblem.parse(text)
    print(choose_kernel(KernelTask.of(kernel, problem, gpu("h200")), may_tune=True).config.key)
"""


def environment(cache: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "TILEGEN_CACHE_DIR": str(cache), **more}


def test_processes_in_any_order_with_any_clock_make_the_same_choice(tmp_path: Path) -> None:
    tied = [TileConfig.parse(text) for text in ("m128n64w8s3", "m64n64w4s2", "m64n128w4s3")]
    shared = tmp_path / "shared"
    for n, config in enumerate(tied):  # equal measurements of three machines
        finding = record(config=config, measurement=timed(400.0 + 0.1 * n, 0.01), source=f"{n:02x}")
        save(finding, location=own(shared))
    for n in range(4):  # every machine has the same file, but by a way of its own
        for m in range(3):
            other = (n + m) % 3
            finding = record(
                kernel="bwd_dq",
                config=tied[other],
                measurement=timed(400.0 + 0.1 * other, 0.01),
                source=f"{other:02x}",
            )
            save(finding, location=own(tmp_path / f"own{n}"))
    processes = [
        warm.start(
            CHOOSES.format(key=KEY),
            str(n),
            env=environment(
                tmp_path / f"own{n}",
                TILEGEN_CACHE_PATH=str(shared),
                TILEGEN_DETERMINISTIC="1",
                TILEGEN_TUNE="1",
            ),
            seed=1 + n % 2,
        )
        for n in (3, 0, 1, 2)
    ]
    chosen = {process.communicate(timeout=120)[0] for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    (one_choice,) = chosen
    # Votes are equal, too: the first in the order of configs, not the fastest by a hair.
    assert one_choice.splitlines()[:2] == [min(tied).key] * 2
    assert len(one_choice.splitlines()) == 3


def test_it_never_tunes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TILEGEN_TUNE", "1")
    asked: list[str] = []

    def tune(*_: object, **__: object) -> object:
        asked.append("tune")
        raise Unsupported("no GPU")

    monkeypatch.setattr(tune_module, "tune", tune)
    pipeline.choose_kernel(TASK, may_tune=True, deterministic=True)
    monkeypatch.setenv("TILEGEN_DETERMINISTIC", "1")
    pipeline.choose_kernel(TASK, may_tune=True)
    assert asked == []
    pipeline.choose_kernel(TASK, may_tune=True, deterministic=False)
    assert asked == ["tune"], "the argument counts more than the environment"


def test_a_borrowed_record_or_a_guess_does_not_keep_a_call_from_tuning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TILEGEN_TUNE", "1")
    place(tmp_path, record(gpu="h100"))
    place(tmp_path, record(kernel="bwd_dq", measurement=UNMEASURED))
    asked: list[str] = []

    def tune(task: KernelTask, **_: object) -> object:
        asked.append(task.kernel)
        raise Unsupported("no GPU")

    monkeypatch.setattr(tune_module, "tune", tune)
    chosen = pipeline.choose_kernel(TASK, may_tune=True)
    assert (chosen.config, asked) == (RECORD.config, ["fwd"])
    assert chosen.source.endswith(", borrowed from h100")
    pipeline.choose_kernel(KernelTask.of("bwd_dq", PROBLEM, H200), may_tune=True)
    assert asked == ["fwd", "bwd_dq"]


def test_a_location_that_does_not_answer_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TILEGEN_CACHE_PATH", str(tmp_path / "not-mounted"))
    assert pipeline.choose_kernel(TASK, deterministic=False)
    with pytest.raises(
        Unreachable, match=r"not-mounted' to answer, since all ranks .* not a folder"
    ):
        pipeline.choose_kernel(TASK, deterministic=True)


# --------------------------------------------------------------------------------------------------
# Rank 0 chooses

AGREES = """
import json, sys
import torch.distributed as dist
from tilegen import agree, pipeline
from tilegen.gpus import spec
from tilegen.gpus.spec import gpu
from tilegen.errors import TilegenError
rank, world, port, which, *problems = sys.argv[1:]
spec.current_gpu = lambda: gpu(which)
dist.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=int(world)
)
try:
    chosen = agree(problems)
    told = {f"{kernel} {key}": config.key for (kernel, key), config in chosen.items()}
    for (kernel, key), config in chosen.items():
        from tilegen.problem import AttentionProblem
        from tilegen.task import KernelTask
        task = KernelTask.of(kernel, AttentionProblem.parse(key), gpu(which))
        used = pipeline.choose_kernel(task)
        assert (used.config, used.source) == (config, "all ranks agreed"), used
except TilegenError as error:
    told = str(error)
print(json.dumps(told))
dist.destroy_process_group()
"""


def ranks_say(folder: Path, jobs: list[list[str]], **more: str) -> list[object]:
    """Run one process per job (GPU and problems), each with an own directory; return what each
    says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        warm.start(
            AGREES,
            *(str(rank), str(len(jobs)), str(port), *job),
            env=environment(folder / f"own{rank}", **more),
        )
        for rank, job in enumerate(jobs)
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(jobs)
    return [json.loads(text.splitlines()[-1]) for text in said]


def test_all_ranks_use_the_configs_of_rank_0(tmp_path: Path) -> None:
    for rank, text in enumerate(("m64n64w4s2", "m128n64w8s3", "m128n128w8s2")):
        place(tmp_path / f"own{rank}", record(config=TileConfig.parse(text)))
    ragged = KEY.replace("q4096", "q4000")
    first, *others = ranks_say(tmp_path, [["h200", ragged, "hq8 q512 d64 bf16 causal"]] * 3)
    assert isinstance(first, dict)
    assert first[f"fwd {KEY}"] == "m64n64w4s2"
    assert len(first) == 8, "all kernels of both problems"
    assert others == [first, first]


def test_different_ranks_fail_on_all_of_them(tmp_path: Path) -> None:
    jobs = [["h200", KEY], ["a100", KEY], ["h200", "hq8 q512 d64 bf16"]]
    said = ranks_say(tmp_path, jobs)
    assert all("expected one tilegen version, GPU model and list" in str(one) for one in said)


def test_an_error_on_rank_0_stops_all_ranks(tmp_path: Path) -> None:
    said = ranks_say(tmp_path, [["h200", KEY]] * 2, TILEGEN_CACHE_PATH=str(tmp_path / "none"))
    assert said[0] == said[1]
    assert "rank 0 could not choose: expected record location" in str(said[0])


def test_without_a_process_group_it_says_what_to_do() -> None:
    with pytest.raises(Unsupported, match=r"call torch\.distributed\.init_process_group first"):
        ranks.agree([PROBLEM])


def test_agreement_is_about_one_gpu_and_one_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TileConfig.parse("m16n16w4s1")
    monkeypatch.setattr(records, "_agreed", {("h200", "fwd", KEY): config})
    chosen = pipeline.choose_kernel(TASK)
    assert (chosen.config, chosen.source) == (config, "all ranks agreed")
    assert records.Records(PROBLEM, H200).agreed("fwd") == config
    assert records.Records(PROBLEM, A100).agreed("fwd") is None
    assert records.Records(PROBLEM, H200).agreed("bwd_dq") is None
