"""The digest of a measurement: of the timed machine code, whatever its name and file."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
import torch

import tilegen
from benchmarks import counters
from benchmarks.call_cost import as_on_a_gpu
from benchmarks.stand_in import stand_in
from benchmarks.workloads import Workload
from tilegen.check import verification
from tilegen.check.reference import make_inputs
from tilegen.compiling.compiler import compile_for
from tilegen.compiling.digests import digest_of, instructions, noting_launches
from tilegen.emit.identity import RenderedKernel
from tilegen.emit.kernel_files import load
from tilegen.emit.render import render
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask
from tilegen.tuning.bench import Timed
from tilegen.tuning.measure import Measurement, measure

PROBLEM = AttentionProblem.parse("hq2 q64 d16 bf16 causal")
SMALL = TileConfig(block_m=16, block_n=16)
WIDE = TileConfig(block_m=16, block_n=32)


def compiled_digest(rendered: RenderedKernel) -> str:
    built = compile_for(rendered, "sm_90")
    warps = rendered.config.num_warps
    return digest_of(built.binary, num_warps=warps, shared_bytes=built.reported.shared_bytes)


def timer(launch: Callable[[], object], repeats: int) -> list[float]:
    for _ in range(repeats):
        launch()
    return [10.0] * repeats


def timed(config: TileConfig) -> Measurement:
    with stand_in():
        run = Timed.of(KernelTask.of("fwd", PROBLEM, gpu("h200")), "cpu").runs(config)
        return measure(run, timer=timer, seconds=0.0)


@pytest.mark.slow
def test_a_timing_carries_the_digest_of_the_binary_that_was_launched() -> None:
    results = [timed(config).digest for config in (SMALL, WIDE)]
    assert results == [compiled_digest(render(PROBLEM, config)) for config in (SMALL, WIDE)]
    assert results[0] != results[1]


@pytest.mark.slow
def test_a_call_has_the_digests_of_its_kernels_in_order() -> None:
    q = torch.zeros(1, 2, 32, 16, dtype=torch.bfloat16, requires_grad=True)

    def both() -> None:
        tilegen.attention(q, q, q).sum().backward()

    with as_on_a_gpu():
        both()  # from here on without Triton's binder
        measurement = measure(both, timer=timer, seconds=0.0).digest.split()
        forward = measure(lambda: tilegen.attention(q, q, q), timer=timer, seconds=0.0).digest
    assert len(measurement) == len(set(measurement)) == 4
    assert forward == measurement[0]


def test_the_program_that_is_watched_names_its_binaries(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `benchmarks.counters` reads them among the lines of the profiler."""
    inputs = make_inputs(PROBLEM)
    monkeypatch.setattr("benchmarks.check.make_inputs", lambda _: inputs)
    monkeypatch.setattr(verification, "run_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(counters, "kernels_of", lambda *_: {"fwd": SMALL})
    with stand_in():
        counters.launch(Workload(name="w", problem=PROBLEM, source="test"), gpu("h200"))
    rendered = render(PROBLEM, SMALL)
    row = f'"ID","Kernel Name","Metric Name","Metric Value"\n"0","{rendered.function}","a","1"\n'
    (actual,) = counters.parse(capsys.readouterr().out + row)
    assert actual.digest == compiled_digest(rendered)


def test_launches_are_noted_only_meanwhile() -> None:
    from triton import knobs
    from triton.compiler import CompiledKernel

    ask = CompiledKernel.launch_metadata

    def fail() -> None:
        assert CompiledKernel.launch_metadata is not ask
        raise ValueError("a launch may raise")

    with pytest.raises(ValueError, match="a launch"), noting_launches():
        fail()
    assert CompiledKernel.launch_metadata is ask
    assert knobs.runtime.launch_enter_hook.calls == []


def test_the_same_instructions_in_another_file_are_the_same_binary() -> None:
    rendered = render(PROBLEM, SMALL)
    source = rendered.source.replace(rendered.function, "another_name")
    module = load(RenderedKernel(**{**vars(rendered), "source": source, "digest": "0" * 16}))
    tensors = [torch.zeros(1, 2, 64, 16, dtype=torch.bfloat16) for _ in "qkv"]
    with stand_in():
        module.launch(*tensors, 0.25)
    (another,) = module.another_name.device_caches[0][0].values()
    built = compile_for(rendered, "sm_90")
    assert another.kernel != built.binary
    assert instructions(another.kernel) == instructions(built.binary)
    with stand_in():
        launched = measure(lambda: module.launch(*tensors, 0.25), timer=timer, seconds=0.0)
    assert launched.digest == compiled_digest(rendered)


def test_only_executable_sections_count() -> None:
    """An ELF file by hand: a section of names, one of code, one of data."""
    sections = [(b"names", 0x0), (b"code one", 0x6), (b"data", 0x2), (b"code two", 0x100006)]
    body, headers = b"", b""
    for content, flags in sections:
        headers += struct.pack("<IIQQQQ24x", 1, 1, flags, 0, 64 + len(body), len(content))
        body += content
    start = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", 64 + len(body))
    file = start.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, len(sections), 0) + body + headers
    assert instructions(file) == b"code onecode two"
    assert instructions(file[:-100]) == file[:-100], "cut short: all of it"
    assert instructions(b"SPIR-V") == b"SPIR-V"
    digest = digest_of(file, num_warps=4, shared_bytes=1024)
    assert digest == digest_of(file.replace(b"data", b"Data"), num_warps=4, shared_bytes=1024)
    others = [
        digest_of(file.replace(b"code one", b"Code one"), num_warps=4, shared_bytes=1024),
        digest_of(file, num_warps=8, shared_bytes=1024),
        digest_of(file, num_warps=4, shared_bytes=2048),
    ]
    assert len({digest, *others}) == 4
