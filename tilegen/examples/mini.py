"""The whole idea in one file: propose tiles, render, compile, time, check, and keep the winner.

A small model of tilegen for readers: one kernel, the forward of attention, full or causal. It runs
on a GPU by Triton, else on the processor by tilegen's compiler. `python mini.py FOLDER` keeps the
kernels and the winners in a folder; a second run with it finds the winner and times nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

from tilegen.cpu.direct import DirectFunction

ON_GPU = torch.cuda.is_available()

# --------------------------------------------------------------------------------------------------
# 1. Records: what to compute, on what, and how


@dataclass(frozen=True)
class Problem:
    """Attention of `heads` heads, of which `group` share their keys and values."""

    heads: int
    group: int
    length: int
    head_dim: int
    dtype: torch.dtype
    causal: bool

    @property
    def key(self) -> str:
        """The name under which a winner is kept."""
        mask = "causal" if self.causal else "full"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"h{self.heads} n{self.length} d{self.head_dim} group {self.group} {dtype} {mask}"


@dataclass(frozen=True, order=True)
class Tile:
    """A program keeps `m` rows of queries on chip, and streams tiles of `n` keys past them."""

    m: int
    n: int
    warps: int = 4  # of a program on a GPU; a processor ignores them

    def __str__(self) -> str:
        return f"m{self.m}n{self.n}" + (f"w{self.warps}" if ON_GPU else "")


@dataclass(frozen=True)
class Device:
    """A machine of `cores` equal cores, each with fast memory of its own."""

    name: str
    cores: int
    fast_bytes: int  # that a program may hold: the M of the theorems
    flops: float  # of a core in a second
    bandwidth: float  # of a core to slow memory, in bytes per second
    step: float  # seconds that a tile of keys costs besides


def device_at_hand() -> Device:
    """Return the first GPU, else the processor. The rates are rough: a ranking needs ratios."""
    if ON_GPU:
        gpu = torch.cuda.get_device_properties(0)
        held = gpu.shared_memory_per_block_optin + 4 * 65536  # and the registers
        return Device(gpu.name, gpu.multi_processor_count, held, 3e12, 8e10, 1e-7)
    return Device("processor", torch.get_num_threads(), 256 * 1024, 4e10, 1e10, 1e-6)


# --------------------------------------------------------------------------------------------------
# 2. The model: words moved, words held, seconds


def tiles_of_keys(problem: Problem, tile: Tile) -> Iterator[int]:
    """Yield for each tile of queries the tiles of keys that it needs: causal ones stop early."""
    for first in range(0, problem.length, tile.m):
        end = min(first + tile.m, problem.length) if problem.causal else problem.length
        yield -(-end // tile.n)


def traffic(problem: Problem, tile: Tile) -> int:
    """Return the bytes between fast and slow memory.

    Q and the output move once; K and V move once for each tile of queries. Without a mask that is
    2 N d + 2 N^2 d / m words for each head. As m d words must fit on chip, m is at most M / d, and
    the sum is Theta(N^2 d^2 / M): FlashAttention's Theorem 2 (arXiv 2205.14135), and no schedule
    moves less if M > d^2 (Saha and Ye, arXiv 2402.07443, Theorem 3.1). So m should be large. n is
    not in the formula: memory that n takes saves nothing.
    """
    streamed = sum(min(tiles * tile.n, problem.length) for tiles in tiles_of_keys(problem, tile))
    words = 2 * problem.length * problem.head_dim + 2 * streamed * problem.head_dim
    return problem.heads * words * problem.dtype.itemsize


def held(problem: Problem, tile: Tile) -> int:
    """Return the bytes that a program holds: Q, K and V of a step, and fp32 output and scores."""
    operands = (tile.m + 2 * tile.n) * problem.head_dim * problem.dtype.itemsize
    return operands + 4 * tile.m * (problem.head_dim + tile.n)


def predict(problem: Problem, tile: Tile, device: Device) -> float:
    """Return the predicted seconds: the slower of arithmetic and traffic, and the steps."""
    programs = problem.heads * -(-problem.length // tile.m)
    steps = problem.heads * sum(tiles_of_keys(problem, tile))
    arithmetic = 4 * steps * tile.m * tile.n * problem.head_dim / device.flops
    moved = traffic(problem, tile) / device.bandwidth
    waves = -(-programs // device.cores)  # the last wave may leave cores without work
    return (max(arithmetic, moved) + steps * device.step) * waves / programs


def propose(problem: Problem, device: Device) -> list[Tile]:
    """Return the tiles that fit, the fastest by the model first."""
    sizes = (16, 32, 64, 128)
    warps = (4, 8) if ON_GPU else (4,)
    tiles = (Tile(*sides) for sides in itertools.product(sizes, sizes, warps))
    fitting = (tile for tile in tiles if held(problem, tile) <= device.fast_bytes)
    return sorted(fitting, key=lambda tile: (predict(problem, tile, device), tile))


# --------------------------------------------------------------------------------------------------
# 3. The template: a readable kernel for one problem and one tile

TEMPLATE = '''\
"""Attention forward: {{ problem.key }}, tiles of {{ tile.m }} queries and {{ tile.n }} keys."""

import triton
import triton.language as tl

BLOCK_M = tl.constexpr({{ tile.m }})
BLOCK_N = tl.constexpr({{ tile.n }})
HEAD_DIM = tl.constexpr({{ problem.head_dim }})
GROUP = tl.constexpr({{ problem.group }})
SCALE_LOG2 = tl.constexpr({{ 1.4426950408889634 / problem.head_dim ** 0.5 }})  # exp2, not exp


{% macro step(masked) %}
        keys = tile_n * BLOCK_N + offs_n
        exists = keys < length
        at = keys[:, None] * HEAD_DIM + offs_d[None, :]
        k = tl.load(k_base + at, mask=exists[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k)) * SCALE_LOG2
{% if masked %}
        keep = exists[None, :]
{% if problem.causal %}
        keep &= keys[None, :] <= rows[:, None]
{% endif %}
        s = tl.where(keep, s, float("-inf"))
{% endif %}
        # Online softmax: the output so far is relative to the largest score so far.
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        m_i = m_new
        l_i = l_i * alpha + tl.sum(p, 1)
        v = tl.load(v_base + at, mask=exists[:, None], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
{% endmacro %}
@triton.jit
def forward(q_ptr, k_ptr, v_ptr, out_ptr, length):
    # Tiles with most keys start first, so that short ones fill the gaps at the end.
    tile_m = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k_base = k_ptr + head // GROUP * length * HEAD_DIM
    v_base = v_ptr + head // GROUP * length * HEAD_DIM
    q_at = head * length * HEAD_DIM + rows[:, None] * HEAD_DIM + offs_d[None, :]
    q = tl.load(q_ptr + q_at, mask=rows[:, None] < length, other=0.0)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
{% if problem.causal %}
    end = tl.minimum(length, tile_m * BLOCK_M + BLOCK_M)
    full = tile_m * BLOCK_M // BLOCK_N  # tiles that end before the first row: no mask code
{% else %}
    end = length
    full = length // BLOCK_N
{% endif %}
    for tile_n in range(0, full):
{{ step(false) }}
    for tile_n in range(full, tl.cdiv(end, BLOCK_N)):
{{ step(true) }}
    out = acc / l_i[:, None]
    tl.store(out_ptr + q_at, out.to(out_ptr.dtype.element_ty), mask=rows[:, None] < length)
'''


def render(problem: Problem, tile: Tile) -> str:
    """Return the Python text of the kernel."""
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(TEMPLATE).render(problem=problem, tile=tile)


# --------------------------------------------------------------------------------------------------
# 4. Compile and launch

Launch = Callable[..., torch.Tensor]
"""Computes the output of q, k and v."""


def load(problem: Problem, tile: Tile, folder: Path) -> Launch:
    """Write the kernel to a file, import it, and return a function that launches it."""
    text = render(problem, tile)
    name = f"forward_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = module.forward if ON_GPU else DirectFunction(module.forward)
    options = {"num_warps": tile.warps} if ON_GPU else {}
    grid = (-(-problem.length // tile.m), problem.heads)

    def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        kernel[grid](q, k, v, out, problem.length, **options)
        return out

    return launch


# --------------------------------------------------------------------------------------------------
# 5. Check, time, and keep the winner


def sdpa(problem: Problem, qkv: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute attention by PyTorch."""
    q, k, v = qkv
    return scaled_dot_product_attention(q, k, v, is_causal=problem.causal, enable_gqa=True)


def error_of(problem: Problem, launch: Launch, qkv: Sequence[torch.Tensor]) -> str:
    """Return why a result is wrong; empty if it errs at most twice as much as PyTorch's."""
    exact = sdpa(problem, [x.double() for x in qkv])
    error, usual = ((out - exact).abs().max().item() for out in (launch(*qkv), sdpa(problem, qkv)))
    allowed = 2 * usual + torch.finfo(problem.dtype).eps
    return "" if error <= allowed else f"error {error:.1e}, allowed {allowed:.1e}"


def seconds_of(run: Callable[[], object]) -> float:
    """Return the median time of a call, after warm ones."""
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.2).median


def tune(problem: Problem, device: Device, folder: Path, trials: int = 6) -> Tile:
    """Time the first tiles of the ranking, print a table, and return the fastest right one."""
    ranking = propose(problem, device)
    tried = [*ranking[:trials], ranking[-1]]  # and the last, to see what the ranking saves
    qkv = inputs(problem)
    times: dict[Tile, float] = {}
    print(f"{'tile':12}{'held':>9}{'moved':>11}{'predicted':>12}{'measured':>11}")
    for tile in tried:
        row = f"{tile!s:12}{held(problem, tile) / 1024:5.0f} KiB"
        row += f"{traffic(problem, tile) / 1e6:8.1f} MB"
        row += f"{1e3 * predict(problem, tile, device):9.2f} ms"
        try:
            launch = load(problem, tile, folder)
            wrong = error_of(problem, launch, qkv)
            if not wrong:
                times[tile] = seconds_of(lambda launch=launch: launch(*qkv))
        except Exception as error:  # a failure is a value: the next tile may compile
            wrong = f"{type(error).__name__}: {error}".splitlines()[0]
        print(row, wrong or f"{1e3 * times[tile]:7.2f} ms")
    return min(times, key=lambda tile: times[tile])


def winner(problem: Problem, device: Device, folder: Path) -> Tile:
    """Return the fastest tile: of the file of winners, else tuned now and added to it."""
    path = folder / "winners.json"
    winners = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    key = f"{problem.key} on {device.name}"
    if key not in winners:
        winners[key] = asdict(tune(problem, device, folder))
        written = path.with_suffix(".new")  # then renamed: no reader sees half a file
        written.write_text(json.dumps(winners, indent=1), encoding="utf-8")
        written.replace(path)
    return Tile(**winners[key])


def inputs(problem: Problem) -> tuple[torch.Tensor, ...]:
    """Return random q, k and v."""
    heads = (problem.heads, problem.heads // problem.group, problem.heads // problem.group)
    sizes = [(1, count, problem.length, problem.head_dim) for count in heads]
    device = "cuda" if ON_GPU else "cpu"
    return tuple(torch.randn(size, dtype=problem.dtype, device=device) for size in sizes)


def main(folder: Path) -> None:
    """Tune one problem, then use the winner."""
    torch.manual_seed(0)
    problem = Problem(
        heads=32 if ON_GPU else 8,
        group=4,
        length=4096 if ON_GPU else 1000,  # 1000: the last tiles are ragged
        head_dim=64,
        dtype=torch.bfloat16 if ON_GPU else torch.float32,
        causal=True,
    )
    device = device_at_hand()
    print(f"{problem.key} on {device.name}")
    tile = winner(problem, device, folder)
    launch, qkv = load(problem, tile, folder), inputs(problem)
    wrong = error_of(problem, launch, qkv)
    times = [seconds_of(lambda: launch(*qkv)), seconds_of(lambda: sdpa(problem, qkv))]
    print("winner {}: {:.2f} ms, SDPA {:.2f} ms;".format(tile, *(1e3 * x for x in times)), end=" ")
    print(wrong or "as exact as SDPA")


if __name__ == "__main__":
    if sys.argv[1:]:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
