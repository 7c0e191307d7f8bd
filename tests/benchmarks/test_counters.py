"""A profiler's counts beside the model's predictions; the profiler's output is a text here."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import counters, rows
from benchmarks.summary import summarise
from tests.benchmarks.cases import PROBLEM, a_workload
from tests.benchmarks.result_files import own_columns
from tests.support.records import H200
from tilegen.choose.choice import Choice, Shortlist
from tilegen.choose.ranker import estimate
from tilegen.emit.render import render
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.model.estimate import CostEstimate
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled

NCU = """\
==PROF== Connected to process 4242 (/usr/bin/python3.12)
==PROF== Profiling "attention_fwd_d16_causal_m64n32": 0%....100% - 4 passes
binary: attention_fwd_d16_causal_m64n32 0123456789ab
==PROF== Disconnected from process 4242
"ID","Process ID","Kernel Name","Context","Metric Name","Metric Unit","Metric Value"
"0","4242","attention_fwd_d16_causal_m64n32","1","dram__bytes_read.sum","byte","1,000"
"0","4242","attention_fwd_d16_causal_m64n32","1","dram__bytes_write.sum","byte","200"
"0","4242","attention_fwd_d16_causal_m64n32","1","l1tex__m_l1tex2xbar_write_bytes.sum","byte","50"
"0","4242","attention_fwd_d16_causal_m64n32","1","l1tex__m_xbar2l1tex_read_bytes.sum","byte","4,500"
"0","4242","attention_fwd_d16_causal_m64n32","1","launch__registers_per_thread","register","100"
"0","4242","attention_fwd_d16_causal_m64n32","1","launch__shared_mem_per_block_dynamic","byte","2,048"
"1","4242","attention_bwd_dq_d16_causal_m64n32","1","launch__registers_per_thread","register","7"
"""


def test_counters_are_parsed_and_compared() -> None:
    forward, backward = counters.parse(NCU)
    assert forward.function == "attention_fwd_d16_causal_m64n32"
    assert backward.values == {counters.REGISTERS: 7.0}
    predicted = CostEstimate(
        kernel="fwd",
        config=TileConfig(block_m=64, block_n=32),
        read_bytes=3000,
        write_bytes=50,
        dram_bytes=1000,
        lower_bound_bytes=500,
        smem_bytes=0,
        registers=80,
        flops=1,
        seconds=1e-6,
        limit="dram",
        terms=(("dram", 1e-6),),
        waves=1.0,
        cost=1e-6,
    )
    row = counters.compare(a_workload("w"), predicted, forward)
    assert (row.predicted_read_bytes, row.counted_read_bytes, row.read_ratio) == (3000, 4500, 1.5)
    assert (row.write_ratio, row.dram_ratio, row.registers_ratio) == (1.0, 1.2, 1.25)
    assert (row.counted_smem_bytes, row.smem_ratio) == (2048, None)
    assert (row.digest, backward.digest) == ("0123456789ab", "")


def fake_ncu(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "ncu"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def chosen(config: TileConfig) -> Choice:
    return Choice(
        config=config,
        ranked=Shortlist(
            KernelTask.of("fwd", PROBLEM, gpu("h200")), (config,), "agreement", "a test"
        ),
    )


def test_profiled_kernels_become_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TileConfig(block_m=64, block_n=32)
    fake_ncu(tmp_path, NCU, monkeypatch)
    monkeypatch.setattr(counters, "choose", lambda *_, **__: {"fwd": chosen(config)})
    (row,) = counters.measure(a_workload("w"), H200, timeout=30)
    assert (row.kernel, row.config, row.counted_registers) == ("fwd", config.key, 100)
    assert row.predicted_read_bytes == estimate(Tiled.of("fwd", PROBLEM, H200, config)).read_bytes


def test_splits_that_are_joined_are_those_that_were_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record may have other splits than the model, and with them other partial results."""
    problem = AttentionProblem.parse("b1 hq8 hkv1 q16 kv16384 d64 bf16")
    workload = replace(a_workload("w"), problem=problem)
    read: list[int] = []
    for split_kv in (1024, 4096):
        configs: dict[Kernel, TileConfig] = {
            "fwd_split": TileConfig(block_m=16, block_n=64, heads=8, split_kv=split_kv),
            "fwd_combine": TileConfig(block_m=1, block_n=16, num_stages=1),
        }
        lines = ['"ID","Kernel Name","Metric Name","Metric Value"']
        for index, (kernel, config) in enumerate(configs.items()):
            function = render(problem, config, kernel).function
            lines += [f'"{index}","{function}","{metric}","64"' for metric in counters.METRICS]
        fake_ncu(tmp_path, "\n".join(lines), monkeypatch)
        named = {name: chosen(config) for name, config in configs.items()}
        monkeypatch.setattr(counters, "choose", lambda *_, named=named, **__: named)
        _, combined = counters.measure(workload, H200, timeout=30)
        read.append(combined.predicted_read_bytes)
    assert read[0] == pytest.approx(4 * read[1], rel=0.01)


@pytest.mark.parametrize(
    "text, message",
    [
        ("==ERROR== ERR_NVGPUCTRPERM", "ERR_NVGPUCTRPERM"),
        (NCU.replace("attention_fwd", "other"), "saw no launch of attention_fwd"),
        (NCU.replace('"4,500"', '"n/a"'), "no value of l1tex__m_xbar2l1tex_read_bytes"),
    ],
)
def test_a_profiler_that_cannot_count_is_an_error(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ncu(tmp_path, text, monkeypatch)
    config = TileConfig(block_m=64, block_n=32)
    monkeypatch.setattr(counters, "choose", lambda *_, **__: {"fwd": chosen(config)})
    with pytest.raises(RuntimeError, match=message):
        list(counters.measure(a_workload("w"), H200, timeout=30))


def test_a_program_that_takes_too_long_is_ended_with_the_profiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ncu(tmp_path, "", monkeypatch)
    (tmp_path / "ncu").write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {tmp_path}/pid\nwait\n")
    with pytest.raises(RuntimeError, match="took longer than 1 s"):
        counters.ncu(["program"], timeout=1)
    state = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    until = time.monotonic() + 30  # the program ends when a busy machine comes to it
    with contextlib.suppress(FileNotFoundError):  # or nobody has asked for its exit code yet
        while (actual := state.read_text().split()[2]) != "Z" and time.monotonic() < until:
            time.sleep(0.01)
        assert actual == "Z"


def test_a_run_replaces_the_rows_of_the_run_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, _ = counters.parse(NCU)
    predicted = estimate(Tiled.of("fwd", PROBLEM, H200, TileConfig(block_m=64, block_n=32)))
    monkeypatch.setattr(counters, "gpu_at_hand", lambda _: H200)
    monkeypatch.setattr(counters.shutil, "which", lambda _: "ncu")
    monkeypatch.setattr(counters, "head", lambda: [a_workload("a"), a_workload("b")])
    monkeypatch.setattr(
        counters, "measure", lambda w, *_, **__: [counters.compare(w, predicted, forward)]
    )
    for _ in range(2):
        counters.main(csv=tmp_path / "counters.csv", minutes=1.0, launch_only=None)
        rows = own_columns(tmp_path / "counters.csv", counters.CounterRow)
        assert [row[0] for row in rows] == ["workload", "a", "b"]


def test_counted_rows_are_summarised(tmp_path: Path) -> None:
    (forward, _) = counters.parse(NCU)
    predicted = estimate(Tiled.of("fwd", PROBLEM, H200, TileConfig(block_m=64, block_n=32)))
    rows.append(tmp_path / "counters.csv", counters.compare(a_workload("w"), predicted, forward))
    text = summarise(tmp_path, [])
    assert "| workload | kernel | config | read | write | dram | registers | smem |" in text
    assert "| w | fwd | m64n32w4s2 |" in text
