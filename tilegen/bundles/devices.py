"""Comparison of the architectures in a bundle with the devices of this machine."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tilegen.bundles.manifest import Manifest
from tilegen.bundles.on_cpu import check_files
from tilegen.cpu.processors import PROCESSORS, missing, runs_here
from tilegen.cpu.target import processor
from tilegen.disk import log
from tilegen.errors import Unsupported


def runs_on(arch: str, gpu_arch: str) -> bool:
    """Check whether a binary for `arch` runs on a GPU of architecture `gpu_arch`. Up to sm_89,
    binaries also run on later architectures of the same generation."""
    of_binary, of_gpu = (re.fullmatch(r"sm_(\d+)(\d)", name) for name in (arch, gpu_arch))
    if of_binary and of_gpu and of_binary[1] == of_gpu[1] and int(of_binary[1]) < 9:
        return of_binary[2] <= of_gpu[2]
    return arch == gpu_arch  # from sm_90 on, Triton uses features of a single architecture


def check_devices(path: Path, manifest: Manifest) -> None:
    """Check that a device of this machine runs binaries of a bundle. Raises Unsupported.

    A bundle for GPUs alone is accepted on a machine without a GPU.
    """
    archs = manifest.architectures
    for_cpus = [arch for arch in archs if arch in PROCESSORS]
    for_gpus = [arch for arch in archs if arch not in PROCESSORS]
    check_files(path, manifest)
    runs_on_cpu = any(map(runs_here, for_cpus))
    runs_on_gpu = bool(for_gpus) and _runs_on_gpus(path, for_gpus, others=bool(for_cpus))
    if for_cpus and not runs_on_cpu and not runs_on_gpu:
        raise Unsupported(f"{path} {_why_not(for_cpus)}")


def _why_not(archs: list[str]) -> str:
    """Explain why this machine runs no binary for the processors `archs`."""
    lacking = {arch: missing(PROCESSORS[arch].features) for arch in archs}
    nearest = min(archs, key=lambda arch: len(lacking[arch]))
    names = " ".join(lacking[nearest][:6]) + (" ..." if len(lacking[nearest]) > 6 else "")
    usable = [name for name in PROCESSORS if runs_here(name)]
    advice = f"generate with --arch {usable[0]}" if usable else "tilegen has no --arch for it"
    return (
        f"has binaries for {', '.join(archs)}, and this processor ({processor()}) lacks what they "
        f"need, for {nearest}: {names}; {advice}"
    )


def _runs_on_gpus(path: Path, archs: list[str], *, others: bool) -> bool:
    """Check whether a GPU of this machine runs binaries for `archs`. Raises Unsupported unless the
    bundle has binaries for `others`."""

    from tilegen.bundles.driver import driver
    from tilegen.gpus.spec import detect

    detected = [detect(index) for index in range(torch.cuda.device_count())]
    gpus = [spec for spec in detected if spec]
    if not gpus:
        if not others:
            log.info("no GPU here: %s was checked, and nothing will run from it", path)
        return False
    fits = any(runs_on(arch, spec.arch) for arch in archs for spec in gpus)
    if others and (gpus[0].arch.startswith("gfx") or not fits):
        return False
    if gpus[0].arch.startswith("gfx"):
        raise Unsupported(
            f"expected an NVIDIA GPU to serve a bundle on, got {gpus[0].title}; attention "
            "compiles here without it, and other programs can load its hsaco files"
        )
    if not fits:
        raise Unsupported(
            f"{path} has binaries for {', '.join(archs)}, and this GPU is an "
            f"{gpus[0].arch} ({gpus[0].title}): generate with --arch {gpus[0].arch}"
        )
    driver()
    return True
