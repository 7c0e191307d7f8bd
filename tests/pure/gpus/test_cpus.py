"""The catalogue of processors, and how a machine finds itself in it."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from tilegen.cpu.target import TARGETS
from tilegen.cpus import rates
from tilegen.cpus.host import identity_of, with_own_sizes
from tilegen.cpus.spec import CpuSpec, Identity, catalogue, cpu, spec_for
from tilegen.errors import Unsupported

ZEN5 = (
    "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n\nprocessor\t: 1\n"
)
GRACE = "processor\t: 0\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: 0xd4f\n"


def test_the_catalogue_can_be_believed() -> None:
    for spec in catalogue():
        target = TARGETS[spec.arch]
        assert (spec.lanes, spec.pairs) == (target.lanes, bool(target.pairs)), spec.name
        assert spec.l1_bytes < spec.l2_bytes < spec.l3_bytes
        assert spec.l2_bandwidth > spec.l3_bandwidth > spec.dram_bandwidth
        assert spec.product_flops_16 == spec.product_flops_32 * (2 if spec.pairs else 1) or (
            spec.measured and spec.product_flops_16 > spec.product_flops_32
        )
        assert spec.source


def test_look_up_by_name() -> None:
    assert cpu("Zen 5".replace(" ", "")).name == "zen5"
    with pytest.raises(Unsupported, match="did you mean zen5 or"):
        cpu("zen6")


@pytest.mark.parametrize(
    "cpuinfo, arch, name",
    [
        (ZEN5, "avx512bf16", "zen5"),
        (ZEN5.replace("26", "25").replace("\t\t: 2", "\t\t: 17"), "avx512bf16", "zen4"),
        (ZEN5.replace("26", "25").replace("\t\t: 2", "\t\t: 1"), "avx2", "zen3"),
        (GRACE, "neonbf16", "neoverse-v2"),
        (ZEN5, "avx2", "zen5-avx2"),  # a hypervisor hides AVX-512
        ("vendor_id: GenuineIntel\ncpu family: 6\nmodel: 143\n", "avx512bf16", "sapphire-rapids"),
        (
            "vendor_id: GenuineIntel\ncpu family: 6\nmodel: 85\n",
            "avx512",
            "genuineintel-6-85-avx512",
        ),
        ("", "sse2", None),
    ],
)
def test_identities(cpuinfo: str, arch: str, name: str | None) -> None:
    spec = spec_for(identity_of(cpuinfo), arch, "a processor")
    assert name in (spec.name, None)
    assert spec.arch == arch
    assert spec.lanes == TARGETS[arch].lanes


@pytest.mark.parametrize("arch", TARGETS)
def test_every_target_has_rates(arch: str) -> None:
    spec = spec_for(Identity("Nobody", 1, 2), arch, "unheard of")
    assert spec.name == f"nobody-1-2-{arch}"
    assert spec.product_flops("bf16") == spec.product_flops_32 * (2 if spec.pairs else 1)
    assert spec.product_flops("fp16") == spec.product_flops_32


def test_own_sizes(tmp_path: Path) -> None:
    for i, (level, kind, size) in enumerate(
        [("1", "Data", "32K"), ("1", "Instruction", "64K"), ("2", "Unified", "512K")]
    ):
        folder = tmp_path / f"index{i}"
        folder.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(text + "\n", encoding="ascii")
    spec = with_own_sizes(cpu("zen5"), tmp_path)
    assert spec == replace(cpu("zen5"), l1_bytes=32768, l2_bytes=524288)
    assert with_own_sizes(cpu("zen5"), tmp_path / "nothing") == cpu("zen5")


def test_rates_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    rates.measured_cpu.cache_clear()
    spec = rates.measured_cpu()
    (file,) = (tmp_path / "cpus").iterdir()
    text = file.read_text(encoding="utf-8")
    monkeypatch.setattr(rates, "measure", lambda spec: pytest.fail("measured again"))
    rates.measured_cpu.cache_clear()
    assert rates.measured_cpu() == spec
    assert all(getattr(spec, name) > 0 for name in rates.RATES)
    # A damaged file is measured again.
    monkeypatch.undo()
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    file.write_text(text.replace("exp2_rate", "other"), encoding="utf-8")
    rates.measured_cpu.cache_clear()
    assert set(rates.RATES) <= {field.name for field in fields(CpuSpec)}
    assert rates.measured_cpu().measured
    assert "exp2_rate" in file.read_text(encoding="utf-8")
    rates.measured_cpu.cache_clear()
