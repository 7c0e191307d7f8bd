"""Time and memory that making a mask takes, beside FlexAttention's `create_block_mask`.

    python -m benchmarks.mask_creation

Every mask is made by tilegen, by FlexAttention, and by FlexAttention compiled, at 4k to 1M tokens,
in tiles of 128 x 128 and for both directions, as training needs them. Each provider of a mask runs
in a process of its own with limits on time and memory; a length that does not fit is written with
its status, and so are longer ones. Live tiles are counted, and differing counts are an error. Rows
go to benchmarks/results/<gpu or cpu>/mask_creation.csv. Device: the GPU where there is one, else
one core.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from benchmarks.environment import RESULTS, Environment, environment, gpu_folder, has_gpu
from benchmarks.mask_cases import WINDOW, Case, cases
from benchmarks.rows import Status, append, with_environment

Provider = Literal["tilegen", "flex", "flex-compiled"]
LENGTHS = (4096, 16_384, 65_536, 262_144, 1_048_576)
TILE = 128
REPEATS = 5
SLOW_MS = 1000
"""Time from which making a mask is repeated once only [ms]."""


@dataclass(frozen=True, kw_only=True)
class Creation:
    """Time and memory of making one mask once more."""

    status: Status = "ok"
    first_ms: float | None = None
    """First time at this length [ms], with all that is loaded, solved or compiled on the way."""
    median_ms: float | None = None
    """Median of later times [ms], with nothing kept from earlier ones."""
    mask_bytes: int | None = None
    """Size of a mask besides the tensors that it is made of [bytes]."""
    peak_bytes: int | None = None
    """Peak of memory while the mask is made again, over the use before [bytes]. On a CPU, what the
    process has not given back is not seen: coarse below some megabytes."""
    live_tiles: int | None = None
    """Number of tiles that are visited; empty if no count is needed."""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class CreationRow(Environment, Creation):
    """One length of one mask, made by one provider."""

    mask: str
    provider: str
    seqlen: int
    form: str
    """Form of the mask once it is made: closed form, lists, or a BlockMask."""


@dataclass(frozen=True)
class Made:
    """A mask as a provider holds it."""

    bytes: int
    live_tiles: int | None


def maker(case: Case, provider: Provider, seqlen: int, device: str) -> Callable[[], Made]:
    """Return a function that makes the mask anew."""
    captured = case.captured(seqlen)
    captured = captured if captured is None else captured.to(device)
    if provider == "tilegen":
        return _closed_form() if case.is_closed else _lists(case, captured, seqlen, device)
    return _block_mask(case.mask_mod(captured), seqlen, device, provider == "flex-compiled")


def form(case: Case, provider: Provider) -> str:
    """Return the form of a provider's mask: closed form, lists or a BlockMask."""
    if provider != "tilegen":
        return "BlockMask"
    return "closed form" if case.is_closed else "lists"


def _closed_form() -> Callable[[], Made]:
    from tilegen.masks import sliding_window
    from tilegen.masks.tiles import spans

    kept = [function for function in vars(spans).values() if hasattr(function, "cache_clear")]

    def make() -> Made:
        for function in kept:
            function.cache_clear()
        for side in ("rows", "columns"):
            spans.stream_sets(sliding_window(WINDOW - 1, 0), side)
        return Made(bytes=0, live_tiles=None)  # expressions, compiled into the kernel

    return make


def _lists(case: Case, captured: Any, seqlen: int, device: str) -> Callable[[], Made]:
    import torch

    from tilegen.masks.form import Shape
    from tilegen.masks.tiles.tile_classes import classify
    from tilegen.masks.tiles.tile_lists import lists_of

    shape = Shape(1, 1, seqlen, seqlen).tiled(TILE, TILE)

    def make() -> Made:
        read = [] if captured is None else [captured]
        classes = classify(case.expression(), read, shape, torch.device(device))
        lists = [lists_of(classes, "rows"), lists_of(classes, "columns")]
        bytes_ = sum(one.tiles.nbytes + one.starts.nbytes for one in lists)
        return Made(bytes=bytes_, live_tiles=lists[0].visited_tiles)

    return make


def _block_mask(
    mask_mod: Callable[..., Any], seqlen: int, device: str, is_compiled: bool
) -> Callable[[], Made]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    def make() -> Made:
        mask = create_block_mask(
            mask_mod,
            None,
            None,
            seqlen,
            seqlen,
            device=device,
            BLOCK_SIZE=TILE,
            _compile=is_compiled,
        )
        tensors = [one for one in vars(mask).values() if isinstance(one, torch.Tensor)]
        live = int(mask.kv_num_blocks.sum())
        if mask.full_kv_num_blocks is not None:
            live += int(mask.full_kv_num_blocks.sum())
        return Made(bytes=sum(one.nbytes for one in tensors), live_tiles=live)

    return make


def measure(case: Case, provider: Provider, seqlen: int, device: str) -> Creation:
    """Measure time and memory of making a mask, or return why it could not be made."""
    import torch

    def run() -> tuple[float, Made]:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        made = make()
        if device == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start), made

    try:
        make = maker(case, provider, seqlen, device)
        first, made = run()
        before = _memory(device, reset=True)
        times = [run()[0]]
        times += [run()[0] for _ in range(REPEATS - 1 if times[0] < SLOW_MS else 0)]
    except (MemoryError, torch.OutOfMemoryError) as error:
        return Creation(status="out_of_memory", detail=_line(error))
    except Exception as error:  # whatever a library raises is a row
        status = "out_of_memory" if "allocate memory" in str(error) else "build_failed"
        return Creation(status=status, detail=_line(error))
    return Creation(
        first_ms=first,
        median_ms=statistics.median(times),
        mask_bytes=made.bytes,
        peak_bytes=max(0, _memory(device) - before),
        live_tiles=made.live_tiles,
    )


def _memory(device: str, *, reset: bool = False) -> int:
    """Return the most bytes in use since the last reset: of this process, or on the GPU."""
    import torch

    if device == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if reset:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts from now
    status = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line for line in status if line.startswith("VmHWM"))
    return 1024 * int(peak.split()[1])


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def _serve(name: str, provider: Provider, lengths: list[int], gib: float, out: Connection) -> None:
    """Send a Creation for one length after the other."""
    import torch

    torch.set_num_threads(1)  # on a shared machine, threads would wait for each other

    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = cases()[name]
    if device == "cpu":
        limit = int(gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    for seqlen in lengths:
        out.send(measure(case, provider, seqlen, device))


def creations(
    name: str, provider: Provider, lengths: list[int], *, seconds: float, gib: float
) -> Iterator[tuple[int, Creation]]:
    """Yield time and memory for each length, measured in a separate process with limits.

    After a length that failed, longer ones are not tried.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(name, provider, lengths, gib, there))
    process.start()
    there.close()
    failed: Creation | None = None
    try:
        for seqlen in lengths:
            if failed is None:
                creation = _received(here, seconds)
                if creation.status != "ok":
                    failed = replace(creation, detail=f"not tried: {seqlen} did not work")
            else:
                creation = failed
            yield seqlen, creation
    finally:
        process.kill()
        process.join()


def _received(connection: Connection, seconds: float) -> Creation:
    if not connection.poll(seconds):
        return Creation(status="unmeasured", detail=f"not done after {seconds:g} s")
    try:
        return connection.recv()
    except EOFError:
        return Creation(status="out_of_memory", detail="the process was ended")


def main(
    mask: Annotated[list[str] | None, typer.Option(help="Repeatable; all by default.")] = None,
    longest: Annotated[int, typer.Option(help="Longest sequence.")] = LENGTHS[-1],
    seconds: Annotated[float, typer.Option(help="Limit for one length, repeats included.")] = 60,
    gib: Annotated[float, typer.Option(help="Limit on the memory of a process on a CPU.")] = 8,
    out: Annotated[Path | None, typer.Option(help="Result file; replaced.")] = None,
) -> None:
    """Make masks in tilegen and in FlexAttention, and write down what each costs.

    Example: python -m benchmarks.mask_creation --mask documents
    """
    path = out or RESULTS / gpu_folder() / "mask_creation.csv"
    lengths = [length for length in LENGTHS if length <= longest]
    counts: dict[tuple[str, int], int] = {}
    here = environment()
    path.unlink(missing_ok=True)
    print(f"{here.gpu}: limits {seconds:g} s" + ("" if has_gpu() else f", {gib:g} GiB"))
    for case in cases().values():
        if mask and case.name not in mask:
            continue
        for provider in get_args(Provider):
            for seqlen, creation in creations(
                case.name, provider, lengths, seconds=seconds, gib=gib
            ):
                live = creation.live_tiles
                if live is not None and counts.setdefault((case.name, seqlen), live) != live:
                    expected = counts[case.name, seqlen]
                    creation = replace(
                        creation, status="wrong", detail=f"expected {expected} live tiles"
                    )
                row = with_environment(
                    CreationRow,
                    here,
                    mask=case.name,
                    provider=provider,
                    seqlen=seqlen,
                    form=form(case, provider),
                    **{one.name: getattr(creation, one.name) for one in fields(Creation)},
                )
                append(path, row)
                print(_shown(row), flush=True)
    print(f"written to {path}")


def _shown(row: CreationRow) -> str:
    head = f"{row.mask:22} {row.seqlen:8} {row.provider:13}"
    if row.median_ms is None:
        return f"{head} {row.status}: {row.detail}"
    return (
        f"{head} {row.median_ms:10.3f} ms  first {row.first_ms:10.3f} ms"
        f"  {row.mask_bytes:11} bytes  peak {row.peak_bytes:11}  {row.status} {row.detail}"
    )


if __name__ == "__main__":
    sys.exit(typer.run(main))
