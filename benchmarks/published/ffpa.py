"""FFPA's winners for head dims of 320 to 1024, which its kernels take in slices.

Its forward sums a whole row of the output while slices of Q and K pass, as `fwd_streamed` does. Its
backward kernels sum slices of gradients in one program, as no kernel of tilegen does.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.published.records import UnreadableTable, Winners, tile
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.problem import AttentionProblem

COMMIT = "xlite-dev/ffpa-attn@92e1d3b5"
GPUS = {
    "NVIDIA_L20": "rtx4090",
    "NVIDIA_GeForce_RTX_5090": "rtx5090",
    "NVIDIA_RTX_PRO_5000_72GB_Blackwell": "rtx5090",
}
"""L20 and RTX PRO 5000 are not in the catalogue; parts of the same architecture stand for them."""
KERNEL = "fwd_streamed"


def winners(folder: Path, stride: int) -> list[Winners]:
    """Return every `stride`-th forward of each file, without and with tensor descriptors."""
    tables: list[Winners] = []
    for file, stands_for in GPUS.items():
        entries, path = _entries(folder / f"{file}.json.gz"), f"src/ffpa_attn/triton/configs/{file}"
        others = Counter(
            f"{entry['kernel']}: no such kernel in tilegen"
            for entry in entries
            if entry["kernel"] not in ("fwd_generic", "fwd_sm90_generic")
        )
        for kernel in ("fwd_generic", "fwd_sm90_generic"):
            mine = [entry for entry in entries if entry["kernel"] == kernel]
            left_out, others = others, Counter[str]()
            rows: list[tuple[AttentionProblem, TileConfig]] = []
            for entry in mine[::stride]:
                config = _config(entry["config"])
                if entry.get("has_attn_bias"):
                    left_out["bias matrix"] += 1
                elif config is None:
                    left_out["tile that fwd_streamed does not take"] += 1
                else:
                    rows.append((_problem(entry), config))
            if mine:
                tables.append(
                    Winners(
                        source=f"{COMMIT}:{path}.json",
                        name=kernel,
                        measured_on=file,
                        gpu=stands_for,
                        kernel=KERNEL,
                        rows=tuple(rows),
                        left_out=left_out,
                    )
                )
    return tables


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return json.load(file)["entries"]
    except (OSError, ValueError, KeyError) as error:
        raise UnreadableTable(
            f'expected compressed JSON with "entries" at {path}: {error}'
        ) from None


def _config(of: dict[str, Any]) -> TileConfig | None:
    if of["BLOCK_HEADDIM_QK"] != of["BLOCK_HEADDIM_V"]:
        return None
    knobs = KERNELS[KERNEL].knobs
    config = tile(
        of["BLOCK_M"], of["BLOCK_N"], of["num_warps"], of["num_stages"], of["BLOCK_HEADDIM_QK"]
    )
    if config is None or config.block_m not in knobs.block_m or config.block_n not in knobs.block_n:
        return None
    return config if config.block_d in knobs.block_d else None


def _problem(entry: dict[str, Any]) -> AttentionProblem:
    return AttentionProblem.parse(
        f"b1 hq{entry['nheads_q']} hkv{entry['nheads_kv']} q{entry['seqlen_q']} "
        f"kv{entry['seqlen_k']} d{entry['headdim']} {entry['dtype']} "
        f"{'causal' if entry['causal'] else 'full'}"
        + (" dropout" if entry.get("has_dropout") else "")
    )
