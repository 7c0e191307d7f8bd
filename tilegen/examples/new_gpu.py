"""Describe a GPU that is not in the catalogue, and see which tiles the model proposes for it."""

import dataclasses

import tilegen

# Half of an H200: as many programs, and half of the bandwidth. A file of these fields is
# `tilegen propose ... --gpu FILE.toml`; a lasting one is a table in tilegen/gpus/gpus.toml.
whole = tilegen.gpu("h200")
half = dataclasses.replace(
    whole,
    name="half-h200",
    title="half of an NVIDIA H200",
    num_sms=whole.num_sms // 2,
    l2_bytes=whole.l2_bytes // 2,
    l2_bandwidth=whole.l2_bandwidth / 2,
    dram_bandwidth=whole.dram_bandwidth / 2,
    tensor_flops_16=whole.tensor_flops_16 / 2,
    vector_flops_32=whole.vector_flops_32 / 2,
)
for device in (whole, half):
    best = tilegen.propose("hq32 hkv8 q4096 d128 bf16 causal", device, top=1)[0]
    print(f"{device.name:10}{best.config.key:14}{1e6 * best.estimate.seconds:5.0f} us predicted")
