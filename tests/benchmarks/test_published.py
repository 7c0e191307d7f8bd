"""The model judged by published tables: readers on made-up samples, judges on hand-made rankings,
the fit on times that the model itself made."""

from __future__ import annotations

import gzip
import io
import json
import sqlite3
import tarfile
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.published import (
    __main__ as command,
)
from benchmarks.published import (
    decoding,
    judge,
    readers,
    records,
    winners,
)
from benchmarks.published.records import UnreadableTable
from tilegen import gpu
from tilegen.choose.ranker import estimate
from tilegen.kernels.config import TileConfig
from tilegen.model.rates import rates_of
from tilegen.problem import AttentionProblem
from tilegen.task import Tiled

PARSE, CONFIG = AttentionProblem.parse, TileConfig.parse

# --------------------------------------------------------------------------------------------------
# Readers


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of made-up tables in the published formats."""
    fuse = tmp_path / "attentionfuse"
    fuse.mkdir()
    (fuse / "e2e_2026-05-22__config_sweep_expanded.csv").write_text(
        "variant,seqlen,BLOCK_M,BLOCK_N,num_warps,num_stages,latency_ms\n"
        "dense,512,64,32,4,3,0.09\ndense,512,128,64,8,2,0.08\ncausal,512,64,32,4,3,0.05\n"
        "dense,2048,64,32,4,3,0.9\ndense,2048,128,64,8,2,0.8\n"
    )
    (fuse / "e2e_2026-05-22__backward_config_sweep.csv").write_text(
        "N,BLOCK_M,BLOCK_N,num_warps,num_stages,fwd_bwd_ms\n"
        "1024,64,64,4,2,0.9\n1024,32,64,4,2,1.0\n"
    )
    (fuse / "e2e_2026-05-22__gqa_config_sweep.csv").write_text(
        "N,BLOCK_M,BLOCK_N,num_warps,num_stages,latency_ms\n"
        "2048,64,64,4,2,1.7\n2048,128,32,4,2,1.2\n"
    )
    for arch in winners.AOTRITON_GPUS:
        for table in winners.AOTRITON_KERNELS:
            archive(tmp_path / "aotriton" / f"{arch}_{table}.sqlite3.tar.xz", table)
    for name in winners.FFPA_GPUS:
        entries(tmp_path / "ffpa-attn" / f"{name}.json.gz")
    (tmp_path / "ibm-vllm-triton-backend").mkdir()
    (tmp_path / "ibm-vllm-triton-backend" / "attention_winners.csv").write_text(
        "file,gpu,kernel,best_ms,HQ,HK,IS_CAUSAL,BLOCK_DMODEL,MAX_SEQLENS_Q,MAX_SEQLENS_K,best_BLOCK_M,"
        "best_BLOCK_N,best_num_warps,best_num_stages,AVG_SEQ_Q,AVG_SEQ_K,num_query_heads,"
        "num_queries_per_kv,HEAD_SIZE\n"
        "1,NVIDIA_H100_80GB_HBM3,attn_fwd,0.015,32,8,True,128,512,512,128,128,8,2,,,,,\n"
        "4,NVIDIA_H100_80GB_HBM3,kernel_unified_attention_2d,0.01,,,,,,,16,32,4,4,8,64,32,4,128\n"
        "5,NVIDIA_H100_80GB_HBM3,kernel_unified_attention_2d,0.01,,,,,,,16,128,8,8,1,64,32,4,128\n"
        "6,NVIDIA_H100_80GB_HBM3,kernel_unified_attention_2d,0.01,,,,,,,16,32,4,4,8,64,32,4,128\n"
    )
    cudnn = tmp_path / "cudnn-frontend"
    cudnn.mkdir()
    (cudnn / readers.DECODE_SWEEP).write_text(
        "library,batch,q_tokens,kv_len,heads_q,heads_kv,head_dim,time_ms\n"
        "cuDNN,1,1,2048,64,8,128,0.0064\ncuDNN,8,1,2048,64,8,128,0.0248\n"
        "cuDNN,1,1,131072,64,8,128,0.2\ncuDNN,1,16,2048,64,8,128,\n"
    )
    (cudnn / "h200_919_only_cudnn__some.csv").write_text(
        "success,data_type,attn_mask,batch_size,num_q_heads,num_kv_heads,q_seqlen,kv_seqlen,"
        "head_dim_qk,head_dim_vo,fwd_time_ms,bwd_time_ms,sliding_window_size,deterministic_bwd\n"
        "True,bfloat16,top_left,1,8,8,1024,1024,64,64,0.05,0.2,128,False\n"
        "True,bfloat16,no_mask,1,8,8,1024,1024,64,64,0.06,0.3,,True\n"
        "True,fp8,no_mask,1,8,8,1024,1024,64,64,0.04,0.2,,False\n"
        'False,bfloat16,no_mask,1,8,8,1024,1024,64,64,inf,inf,"went\nwrong",False\n'
    )
    (tmp_path / "published-tables").mkdir()
    (tmp_path / "published-tables" / "hopper.csv").write_text(
        "source,gpu,library,case,seqlen,value,unit\n"
        "here,H100,FA3,fwd causal bf16 B4 H48 d128,1024,140,us\n"
        "here,H100,FA3,bwd full B4 H48 d128,1024,500,TFLOP/s\n"
        "here,H100,FA3,something else,1024,500,TFLOP/s\n"
    )
    (tmp_path / "flash-attention-lab").mkdir()
    (tmp_path / "flash-attention-lab" / "decode_splits_h100.csv").write_text(
        "batch,heads,heads_kv,context,head_dim,num_splits,median_ms\n"
        "1,32,8,32768,128,1,4.0\n1,32,8,32768,128,32,0.202\n1,32,8,32768,128,64,0.2\n"
    )
    return tmp_path


def archive(path: Path, table: str) -> None:
    """A SQLite table of four rows in a compressed archive: one good, one with a bias, one of a
    large problem, one that a smaller GPU takes fewer heads of."""
    base = sqlite3.connect(":memory:")
    inputs = "Q_dtype Max_seqlen_q Max_seqlen_k CAUSAL_TYPE BLOCK_DMODEL ENABLE_DROPOUT BIAS_TYPE"
    if table != "attn_fwd":
        inputs = inputs.replace("Max", "max")
    columns = [
        '"gpu"',
        *(f'"inputs${name}"' for name in inputs.split()),
        '"tuned_kernel$BLOCK_M"',
        '"tuned_kernel$BLOCK_N"',
        '"compiler_options$num_warps"',
        '"compiler_options$num_stages"',
    ]
    base.execute(f'CREATE TABLE "FLASH${table}" ({", ".join(columns)})')
    rows = [
        ("gfx", "torch.float16", 128, 256, 3, 64, 1, 0, 32, 16, 4, 1),
        ("gfx", "torch.float16", 128, 256, 0, 64, 0, 1, 32, 16, 4, 1),
        ("gfx", "torch.bfloat16", 8192, 8192, 3, 128, 0, 0, 64, 64, 2, 1),
        ("gfx", "torch.float32", 8192, 8192, 0, 512, 1, 0, 16, 16, 4, 1),
    ]
    base.executemany(f'INSERT INTO "FLASH${table}" VALUES ({",".join("?" * 12)})', rows)
    content = base.serialize()
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w:xz") as file:
        member = tarfile.TarInfo(f"{table}.sqlite3")
        member.size = len(content)
        file.addfile(member, io.BytesIO(content))


def entries(path: Path) -> None:
    """Winners of three forwards and of a kernel that tilegen does not have."""
    config = {
        "BLOCK_M": 64,
        "BLOCK_N": 64,
        "BLOCK_HEADDIM_QK": 64,
        "BLOCK_HEADDIM_V": 64,
        "num_warps": 4,
        "num_stages": 2,
    }
    shape = {
        "nheads_q": 32,
        "nheads_kv": 8,
        "seqlen_q": 512,
        "seqlen_k": 512,
        "headdim": 512,
        "dtype": "bf16",
        "causal": True,
    }
    forward = {"kernel": "fwd_generic", "config": config, **shape}
    path.parent.mkdir(exist_ok=True)
    with gzip.open(path, "wt") as file:
        json.dump(
            {
                "entries": [
                    forward,
                    {**forward, "has_attn_bias": True},
                    {**forward, "config": {**config, "BLOCK_M": 8}},
                    {**forward, "kernel": "bwd_generic"},
                ]
            },
            file,
        )


def test_only_rows_that_measure_tiles_are_read(data: Path) -> None:
    dense, long, backward, grouped = readers.attentionfuse(data / "attentionfuse")
    assert dense.seconds == pytest.approx(
        {CONFIG("m64n32w4s3"): 0.09e-3, CONFIG("m128n64w8s2"): 0.08e-3}
    )
    assert (dense.length, dense.noise, long.noise, backward.noise) == (512, 0.06, 0.01, 0.03)
    assert backward.kernels == ("bwd_preprocess", "bwd_dkdv", "bwd_dq")
    assert grouped.problem == PARSE("b2 hq32 hkv8 q2048 d128 fp16 causal")
    assert dense.source.endswith("results/e2e_2026-05-22/config_sweep_expanded.csv")


def test_winners_of_an_archive(data: Path) -> None:
    tables = {(one.name, one.measured_on): one for one in winners.aotriton(data / "aotriton", 1)}
    assert len(tables) == 12
    table = tables["attn_fwd 16 bit", "gfx942"]
    assert {problem.key: config.key for problem, config in table.rows} == {
        "b3 hq5 hkv5 q128 kv256 d64 fp16 causal dropout": "m32n16w4s1",
        "b3 hq5 hkv5 q8192 kv8192 d128 bf16 causal": "m64n64w2s1",
    }
    assert table.left_out == Counter({"bias matrix": 1})
    assert [one.key for one in table.grid] == [
        f"m{m}n{n}w{warps}s1" for m in (32, 64) for n in (16, 64) for warps in (2, 4)
    ]
    ((small, _),) = tables["bwd_kernel_dq fp32", "gfx942"].rows
    ((large, _),) = tables["bwd_kernel_dq fp32", "gfx950"].rows
    assert (small.num_heads_q, large.num_heads_q) == (3, 5), "MI300 has less memory"


def test_every_which_row_is_read(data: Path) -> None:
    for table in winners.aotriton(data / "aotriton", 3):
        assert len(table.rows) + table.left_out.total() == 1


def test_winners_of_large_head_dims(data: Path) -> None:
    table = winners.ffpa(data / "ffpa-attn")[0]
    assert table.rows == ((PARSE("b1 hq32 hkv8 q512 d512 bf16 causal"), CONFIG("m64n64d64w4s2")),)
    assert table.left_out == Counter(
        {
            "bias matrix": 1,
            "tile that fwd_streamed does not take": 1,
            "bwd_generic: no such kernel in tilegen": 1,
        }
    )


def test_paged_rows_hold_a_group_of_heads(data: Path) -> None:
    plain, paged = winners.ibm(data / "ibm-vllm-triton-backend")
    assert plain.rows[0][0] == PARSE("b1 hq32 hkv8 q512 d128 fp16 causal")
    assert [(problem.key, config.key) for problem, config in paged.rows] == [
        ("b8 hq8 hkv8 q32 kv64 d128 fp16 full", "m16n32w4s4")
    ]
    assert paged.left_out == Counter({"tile that tilegen does not write": 1}), "8 stages"


def test_times_of_winners(data: Path) -> None:
    (point,) = winners.ibm_times(data / "ibm-vllm-triton-backend")
    assert (point.gpu, point.config) == ("h100", CONFIG("m128n128w8s2"))
    assert point.seconds == pytest.approx(15e-6)
    verdict = judge.judge_point(point)
    assert verdict.chosen == "m128n128w8s2"
    assert verdict.ratio == pytest.approx(verdict.model_us / 15)


def test_times_of_libraries(data: Path) -> None:
    points = readers.library_times(data)
    assert [(one.name, one.library, one.problem.mask.notation) for one in points] == [
        ("training fwd", "FA3", "causal"),
        ("training bwd", "FA3", "full"),
        *[("decode", "cuDNN", "causal(bottom_right)")] * 3,
        ("training fwd", "cuDNN", "window(127,0)"),
        ("training bwd", "cuDNN", "window(127,0)"),
        ("training bwd deterministic", "cuDNN", "full"),
    ]
    assert points[0].seconds == pytest.approx(140e-6)
    flops = 2.5 * 4 * 4 * 48 * 1024**2 * 128
    assert points[1].seconds == pytest.approx(flops / 500e12)


def test_split_counts_are_judged_with_tilegen_s_tiles(data: Path) -> None:
    ((problem, seconds),) = (times := readers.split_times(data / "flash-attention-lab")).items()
    assert problem == PARSE("b1 hq32 hkv8 q1 kv32768 d128 bf16")
    assert seconds == pytest.approx({32768: 4e-3, 1024: 0.202e-3, 512: 0.2e-3})
    (verdict,) = decoding.judge_splits(times)
    assert "k512" in verdict.best, "the published optimum"
    assert verdict.configs == 2, "tilegen takes 8192 keys a split at most"
    assert (verdict.spread, verdict.noise) == (pytest.approx(1.01), 0.01)


@pytest.mark.parametrize(
    "read, name",
    [
        (readers.attentionfuse, "config_sweep_expanded.csv"),
        (lambda path: winners.aotriton(path, 1), "gfx942_attn_fwd.sqlite3.tar.xz"),
        (winners.ffpa, "NVIDIA_L20.json.gz"),
        (winners.ibm, "attention_winners.csv"),
    ],
)
def test_a_missing_table_is_named(read: object, name: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableTable, match=name):
        read(tmp_path)  # type: ignore[operator]


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UnreadableTable, match=r"expected the columns c in .*, found a, b"):
        records.csv_rows(tmp_path / "table.csv", ("a", "c"))


# --------------------------------------------------------------------------------------------------
# The command


@pytest.mark.slow
def test_the_command_writes_every_verdict(data: Path, tmp_path: Path) -> None:
    import typer

    app = typer.Typer()
    app.command()(command.main)
    out = tmp_path / "out"
    arguments = ["--data", str(data), "--out", str(out), "--stride", "1"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    for name, record in (
        ("sweeps_predicted", judge.SweepVerdict),
        ("sweeps", judge.SweepVerdict),
        ("sweeps_left_out", judge.SweepVerdict),
        ("winners", judge.WinnersVerdict),
        ("curves", judge.PointVerdict),
        ("decode", decoding.Decoding),
        ("splits", judge.SweepVerdict),
    ):
        header = (out / f"{name}.csv").read_text().splitlines()[0].split(",")
        assert header[-1] == fields(record)[-1].name, name
        assert "source" in header
    missing = CliRunner().invoke(app, ["--data", str(tmp_path / "none"), "--out", str(out)])
    assert missing.exit_code == 1
    assert "expected a table at" in missing.output


# --------------------------------------------------------------------------------------------------
# Decoding


def test_an_envelope_of_times_is_found_again() -> None:
    true = decoding.Envelope(fixed=4e-6, bandwidth=4e12, pushed_out=0.5, l2_bytes=60_000_000)
    assert true.seconds(1e6) == pytest.approx(4e-6 + 1.5e6 / 4e12)
    assert true.seconds(1e9) == pytest.approx(4e-6 + 1.03e9 / 4e12)
    times = [(moved, true.seconds(moved)) for moved in (1e6, 1e7, 3e7, 1e8, 1e9)]
    actual = decoding.envelope(times, true.l2_bytes)
    assert (actual.fixed, actual.bandwidth, actual.pushed_out) == pytest.approx((4e-6, 4e12, 0.5))


def test_decoding_is_judged_without_launches(data: Path) -> None:
    points = readers.library_times(data)
    verdicts = decoding.judge(points)
    assert [verdict.published_us for verdict in verdicts] == pytest.approx([6.4, 24.8, 200])
    spec = gpu("h200")
    for verdict, point in zip(verdicts, decoding.decoded(points), strict=True):
        both = [
            estimate(Tiled.of(kernel, point.problem, spec, CONFIG(key))).seconds
            for key, kernel in zip(
                verdict.chosen.split(), ("fwd_split", "fwd_combine"), strict=True
            )
        ]
        launches = rates_of("sm_90").launch_seconds + rates_of("sm_90").following_seconds
        alone = 1e6 * (sum(both) - launches)
        assert verdict.split_us + verdict.combine_us == pytest.approx(alone)
        assert verdict.model_over_published == pytest.approx(alone / verdict.published_us)
        assert verdict.splits == -(
            -point.problem.seqlen_kv // CONFIG(verdict.chosen.split()[0]).split_kv
        )


def test_short_kernels_take_a_following_launch_besides(data: Path) -> None:
    problem, config, spec = PARSE("b1 hq8 q32 d64 fp16 full"), CONFIG("m32n32w4s2"), gpu("h100")
    programs = (
        estimate(Tiled.of("fwd", problem, spec, config)).seconds - rates_of("sm_90").launch_seconds
    )
    point = replace(
        winners.ibm_times(data / "ibm-vllm-triton-backend")[0],
        problem=problem,
        config=config,
        seconds=programs + 1e-6,
    )
    slow = replace(point, seconds=1e-3)
    assert decoding.following_launch([point, slow]) == pytest.approx(1e-6)
