"""The GPU catalogue, its overrides, and specs from a driver's properties."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from tilegen.errors import Unsupported
from tilegen.gpus.spec import GpuSpec, catalogue, detect, from_driver, gpu, gpu_for

FLOPS_PER_CLOCK_AND_SM = {
    "v100": 1024,
    "t4": 1024,
    "a100": 2048,
    "rtx3090": 512,
    "l4": 1024,
    "rtx4090": 512,
    "h100-pcie": 4096,
    "h100": 4096,
    "h200": 4096,
    "b200": 8192,
    "rtx5090": 512,
    "mi300x": 2048,
    "mi350x": 4096,
}
NAMES = list(FLOPS_PER_CLOCK_AND_SM)
CRITICAL_DIMS = {  # sqrt of the 16-bit words of shared memory, alone and with a word per register
    "v100": (221, 338),
    "t4": (181, 313),
    "a100": (288, 385),
    "rtx3090": (225, 340),
    "l4": (225, 340),
    "rtx4090": (225, 340),
    "h100-pcie": (340, 426),
    "h100": (340, 426),
    "h200": (340, 426),
    "b200": (340, 497),
    "rtx5090": (225, 340),
    "mi300x": (181, 404),
    "mi350x": (286, 461),
}
H200_DRIVER = {
    "name": "NVIDIA H200",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "clock_rate": 1_980_000,
    "memory_clock_rate": 3_201_000,
    "memory_bus_width": 6144,
    "L2_cache_size": 62_914_560,
    "shared_memory_per_block_optin": 232_448,
    "shared_memory_per_multiprocessor": 233_472,
    "regs_per_multiprocessor": 65_536,
}


def test_catalogue_holds_these() -> None:
    assert [spec.name for spec in catalogue()] == NAMES
    assert all(gpu(name).name == name for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_peak_is_sms_times_rate_times_clock(name: str) -> None:
    spec = gpu(name)
    peak = spec.num_sms * FLOPS_PER_CLOCK_AND_SM[name] * spec.clock_hz
    assert spec.tensor_flops_16 == pytest.approx(peak, rel=3.2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_on_chip_memory_gives_the_critical_head_dims(name: str) -> None:
    spec = gpu(name)
    shared_words = spec.smem_per_block / 2
    all_words = shared_words + spec.registers_per_sm + spec.tensor_memory_per_sm / 4
    shared, everything = CRITICAL_DIMS[name]
    assert (math.isqrt(int(shared_words)), int(math.sqrt(all_words))) == (
        pytest.approx(shared, abs=1),
        pytest.approx(everything, abs=1),
    )


@pytest.mark.parametrize("spec", catalogue(), ids=lambda spec: spec.name)
def test_rows_are_plausible_and_sourced(spec: GpuSpec) -> None:
    assert spec.smem_per_block <= spec.smem_per_sm <= 256 * 1024
    assert spec.dram_bandwidth < spec.l2_bandwidth < 64 * spec.num_sms * spec.clock_hz
    assert spec.vector_flops_32 < spec.tensor_flops_16
    assert "L2 bandwidth:" in spec.source


def test_spellings_of_a_name() -> None:
    assert gpu("H100 PCIe") == gpu("h100_pcie") == gpu("h100-pcie")


@pytest.mark.parametrize(
    "name, hint", [("h300", "did you mean h200 or h100"), ("x", "a file such as")]
)
def test_unknown_name_lists_close_ones(name: str, hint: str) -> None:
    with pytest.raises(Unsupported, match=f"gpu must be one of v100, t4.*{name}.*{hint}"):
        gpu(name)


def test_fast_memory_replaces_shared_memory_only() -> None:
    small, normal = gpu("h200", fast_memory=48 * 1024), gpu("h200")
    assert small.smem_per_block == 48 * 1024
    assert normal.on_chip_bytes - small.on_chip_bytes == normal.smem_per_block - 48 * 1024
    assert small.smem_per_sm == normal.smem_per_sm
    assert gpu("h200", fast_memory=2**20).smem_per_sm > 2**20
    assert "by hand" in small.source


@pytest.mark.parametrize("value", [0, -1, True, 48.0, "48K", 2**40])
def test_fast_memory_must_be_a_size(value: object) -> None:
    with pytest.raises(Unsupported, match="fast_memory must be an int"):
        gpu("h200", fast_memory=value)  # type: ignore[arg-type]


def test_driver_overrides_the_row_of_the_same_name() -> None:
    spec = from_driver(SimpleNamespace(**H200_DRIVER | {"L2_cache_size": 50 * 2**20}))
    assert (spec.name, spec.arch, spec.l2_bytes) == ("h200", "sm_90", 50 * 2**20)
    assert spec.dram_bandwidth == pytest.approx(2 * 3.201e9 * 6144 / 8)
    assert (spec.clock_hz, spec.tensor_flops_16) == (
        gpu("h200").clock_hz,
        gpu("h200").tensor_flops_16,
    )


def test_fewer_sms_mean_lower_rates() -> None:
    spec = from_driver(SimpleNamespace(**H200_DRIVER | {"multi_processor_count": 66}))
    assert spec.tensor_flops_16 == pytest.approx(gpu("h200").tensor_flops_16 / 2)
    assert spec.l2_bandwidth == pytest.approx(gpu("h200").l2_bandwidth / 2)


@pytest.mark.parametrize(
    "name, cc, expected",
    [
        ("Tesla V100-SXM2-16GB", (7, 0), "v100"),
        ("Tesla T4", (7, 5), "t4"),
        ("NVIDIA A100-SXM4-40GB", (8, 0), "a100"),
        ("NVIDIA GeForce RTX 3090", (8, 6), "rtx3090"),
        ("NVIDIA GeForce RTX 3090 Ti", (8, 6), "geforce-rtx-3090-ti"),
        ("NVIDIA L4", (8, 9), "l4"),
        ("NVIDIA L40S", (8, 9), "l40s"),
        ("NVIDIA GeForce RTX 4090", (8, 9), "rtx4090"),
        ("NVIDIA H100 PCIe", (9, 0), "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", (9, 0), "h100"),
        ("NVIDIA GH200 480GB", (9, 0), "gh200-480gb"),
        ("NVIDIA B200", (10, 0), "b200"),
        ("NVIDIA GeForce RTX 5090", (12, 0), "rtx5090"),
    ],
)
def test_driver_names(name: str, cc: tuple[int, int], expected: str) -> None:
    spec = from_driver(
        SimpleNamespace(name=name, major=cc[0], minor=cc[1], multi_processor_count=100)
    )
    assert (spec.name, spec.arch, spec.num_sms) == (expected, f"sm_{cc[0]}{cc[1]}", 100)
    assert ("not in gpus.toml" in spec.source) == (spec.name not in NAMES)


def test_unlisted_gpu_takes_the_nearest_architecture() -> None:
    spec = from_driver(
        SimpleNamespace(**H200_DRIVER | {"name": "NVIDIA GH200 480GB", "clock_rate": 1_830_000})
    )
    assert (spec.name, spec.title) == ("gh200-480gb", "NVIDIA GH200 480GB")
    assert spec.tensor_flops_16 == pytest.approx(gpu("h100").tensor_flops_16, rel=1e-6)
    newer = from_driver(
        SimpleNamespace(name="NVIDIA B300", major=10, minor=3, multi_processor_count=148)
    )
    assert (newer.arch, newer.tensor_memory_per_sm) == ("sm_103", 262144)
    oldest = from_driver(SimpleNamespace(name="P100", major=6, minor=0, multi_processor_count=56))
    assert "V100" in oldest.source


def test_amd_driver() -> None:
    spec = from_driver(
        SimpleNamespace(
            name="AMD Instinct MI300X",
            gcnArchName="gfx942:sramecc+:xnack-",
            major=9,
            minor=4,
            multi_processor_count=304,
            L2_cache_size=4 * 2**20,  # of one die
        )
    )
    assert (spec.name, spec.arch, spec.l2_bytes) == ("mi300x", "gfx942", 32 * 2**20)


def test_detect_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert detect() is None


def test_detect_asks_the_device_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    asked: list[int] = []

    def properties(index: int) -> SimpleNamespace:
        asked.append(index)
        return SimpleNamespace(**H200_DRIVER)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    actual = detect(), detect(0)
    assert [spec.name for spec in actual if spec] == ["h200", "h200"]
    assert asked == [3, 0]


def test_every_architecture_has_a_typical_gpu() -> None:
    for arch in {spec.arch for spec in catalogue()}:
        assert gpu_for(arch).arch == arch
    with pytest.raises(Unsupported, match="arch must be one of"):
        gpu_for("sm_42")
