"""Make kernels ahead of time, and serve them without a compiler."""

import tempfile
from pathlib import Path

import torch

import tilegen

problem = "hq4 hkv2 q256 d64 fp32 causal"
with tempfile.TemporaryDirectory() as folder:
    out = Path(folder, "dist")
    # For this machine x86-64-v3 runs everywhere since 2013; sm_90 would need no GPU either.
    manifest = tilegen.generate(problem, arch="x86-64-v3", out=out, forward_only=True)
    for binary in manifest.binaries:
        print(f"{binary.kernel} {binary.config.key} for {binary.arch}")
    print("files:", len([path for path in out.rglob("*") if path.is_file()]))

    tilegen.load_bundle(out)  # calls use the bundle's kernels from here on, where they fit
    q = torch.randn(1, 4, 256, 64)
    k, v = torch.randn(2, 1, 2, 256, 64)
    print("out", tuple(tilegen.attention(q, k, v, mask=tilegen.causal()).shape))
