"""The launcher passes the same arguments as the emitted `launch`, from a bundle and with Triton."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilegen
from tests.support import sliced, splits
from tests.support.bundles import StandIn, not_compiled
from tilegen.bundles.launching import Packed
from tilegen.emit import kernel_files
from tilegen.emit.identity import RenderedKernel
from tilegen.emit.launch import launch_of
from tilegen.emit.render import render
from tilegen.kernels import allocation
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.panels import Launch
from tilegen.kernels.registry import KERNELS, family_with
from tilegen.launch.binding import BoundKernel
from tilegen.launch.launcher import Described, launch_by
from tilegen.launch.triton_run import TritonRun
from tilegen.masks import Mask
from tilegen.masks.dropout import Dropout
from tilegen.masks.form import Shape
from tilegen.masks.score import Score
from tilegen.masks.source import unlisted
from tilegen.masks.tensors import score_tensors
from tilegen.problem import AttentionProblem

CONFIGS: dict[Kernel, TileConfig] = {
    "fwd": TileConfig(block_m=64, block_n=32),
    "bwd_dkdv": TileConfig(block_m=64, block_n=32),
    "bwd_dq": TileConfig(block_m=64, block_n=32),
    **sliced.ALL,
    **splits.ALL,
}
FORWARD = render(AttentionProblem.parse("hq2 q64 d64 fp16 causal"), CONFIGS["fwd"])
BATCH, HEADS, GROUP, SEQLEN_Q, SEQLEN_KV, DIM_QK, DIM_V = 2, 4, 2, 100, 203, 96, 64
TABLE = torch.randn(HEADS, 301)
CASES: dict[str, tuple[Mask, Score | None]] = {
    "causal": (tilegen.causal(), None),
    "lengths": (tilegen.kv_lengths(torch.tensor([50, 203], dtype=torch.int32)), None),
    "blocks": (tilegen.block_sparse(torch.ones(4, 7, dtype=torch.bool), 32), None),
    "softcap": (tilegen.full(), tilegen.softcap(20.0)),
    "trained": (tilegen.full(), tilegen.relative_bias(TABLE.requires_grad_())),
    "sinks": (tilegen.causal(), tilegen.sinks(torch.zeros(HEADS))),
    "dropout": (tilegen.causal(), None),
    "trained, dropout": (tilegen.full(), tilegen.relative_bias(TABLE)),
}


class Recorder:
    """Stands where the `@triton.jit` function of an emitted module is."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, list[Any]]] = []
        self.bound: tuple[Any, Any] = (), {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self.bound = arguments, options
            values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
            self.launches.append((grid[0], values))

        return launch


class Compiled:
    """A stand-in for Triton's compiled kernel that notes arguments of compilation and launch."""

    function, packed_metadata = 7, "metadata"

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Any]] = []
        self.launches: list[tuple[int, list[Any]]] = []
        self.told: list[Any] = []

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> Compiled:
        """Stand for the method of a JIT function."""
        self.asked.append((arguments, options))
        return self

    def launch_metadata(self, grid: Any, stream: int, *values: Any) -> str:
        return f"grid {grid}"

    def run(self, grid: int, y: int, z: int, stream: int, *rest: Any) -> None:
        function, metadata, told, enter, leave, *values = rest
        assert (y, z, function, metadata) == (1, 1, self.function, self.packed_metadata)
        self.told.append((told, enter, leave))
        self.launches.append((grid, values))


class Jitted(SimpleNamespace):
    """Stands for a JIT function that is compiled."""


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's driver has one stream, and no GPU."""
    from triton.runtime import driver

    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda device: 0))


def jitted(compiled: Compiled) -> Any:
    return Jitted(__name__="attention", warmup=compiled.warmup)


def by_triton(rendered: RenderedKernel, function: Any, own: Any = None) -> Launch:
    """Return the launch of a kernel by Triton's compiled code, or by the file's `own` run."""
    module: Any = SimpleNamespace(run=own)
    start = TritonRun(module, function, rendered.config, rendered.aligned).start
    return launch_by(start, launch_of(rendered.source), torch.device("cpu"), "test", Described)


def from_bundle(rendered: RenderedKernel, stand_in: StandIn) -> Launch:
    """Return the launch of a kernel by a stand-in for its binary."""
    start = Packed(not_compiled(rendered), lambda: stand_in).start  # type: ignore[arg-type]
    return launch_by(start, launch_of(rendered.source), torch.device("cpu"), "test")


def tensor(*shape: int, heads_inside: bool = False, dtype: Any = torch.float16) -> torch.Tensor:
    if heads_inside:
        batch, heads, rows, dim = shape
        return torch.empty((batch, rows, heads, dim), dtype=dtype).transpose(1, 2)
    return torch.empty(shape, dtype=dtype)


def given_to(kernel: Kernel, *, heads_inside: bool = False) -> tuple[Any, ...]:
    """Return the positional arguments of a kernel's `launch`; all numbers differ."""
    heads_kv = HEADS // GROUP
    q = tensor(BATCH, HEADS, SEQLEN_Q, DIM_QK, heads_inside=heads_inside)
    k = tensor(BATCH, heads_kv, SEQLEN_KV, DIM_QK, heads_inside=heads_inside)
    v = tensor(BATCH, heads_kv, SEQLEN_KV, DIM_V)
    out, dout = tensor(*q.shape[:3], DIM_V), tensor(*q.shape[:3], DIM_V, heads_inside=heads_inside)
    lse, delta = torch.zeros(q.shape[:3]), torch.zeros(q.shape[:3])
    panel = tensor(1, 64, 208)
    notes = torch.zeros(1, 4, 64), torch.zeros(1, 4, 64)
    inside = (3, 1, 0, 64)  # head_first, num_heads, row_first, num_rows
    match kernel:
        case "fwd" | "fwd_streamed" | "fwd_split":
            return q, k, v, 0.125
        case "fwd_paged":
            rows = tensor(1, HEADS, 2 * SEQLEN_Q, DIM_QK, heads_inside=heads_inside)
            pages = tensor(30, heads_kv, 16, DIM_QK), tensor(30, heads_kv, 16, DIM_V)
            table, lengths = (torch.zeros(n, dtype=torch.int32) for n in ((BATCH, 13), BATCH))
            starts = torch.zeros(BATCH + 1, dtype=torch.int32)
            bounds = BATCH, SEQLEN_Q, SEQLEN_KV, 13
            return rows, *pages, table, lengths, starts, *bounds, 0.125
        case "fwd_combine":
            partials = torch.zeros(BATCH, HEADS, 4, SEQLEN_Q, DIM_V)
            return partials, torch.zeros(partials.shape[:4]), out, lse
        case "fwd_scores":
            return q, k, *inside, 0.125
        case "fwd_values":
            return panel, *notes, 64, v, out, lse, 3, 64
        case "bwd_preprocess":
            return out, dout
        case "bwd_dkdv_sum":
            parts = torch.zeros(BATCH, heads_kv, 3, SEQLEN_KV, DIM_QK + DIM_V)
            return *parts.split([DIM_QK, DIM_V], 4), parts[..., 0], k, v, 0.125
        case "bwd_dq_sum":
            parts = torch.zeros(BATCH, HEADS, 3, SEQLEN_Q, DIM_QK)
            return parts, parts[..., 0], q, 0.125
        case "bwd_dkdv" | "bwd_dq" | "bwd_dkdv_split" | "bwd_dq_split" | "bwd_one_pass":
            return q, k, v, dout, lse, delta, 0.125
        case "bwd_scores":
            return q, k, v, dout, lse, delta, *inside, 0.125
        case "bwd_columns":
            return panel, q, torch.zeros(SEQLEN_KV, DIM_QK), k, 3, 64, False, True, 0.125
        case "bwd_rows":
            return panel, k, q, 3, 64, 0.125


@pytest.mark.slow
@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize("heads_inside", [False, True], ids=["rows inside", "heads inside"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", [name for name, one in KERNELS.items() if not one.specialised])
def test_the_driver_gets_the_arguments_of_the_emitted_launch(
    kernel: Kernel, case: str, heads_inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask, score = CASES[case]
    drops = "dropout" in family_with(kernel).supports
    problem = AttentionProblem(
        batch=BATCH,
        num_heads_q=HEADS,
        num_heads_kv=HEADS // GROUP,
        seqlen_q=SEQLEN_Q,
        seqlen_kv=SEQLEN_KV,
        head_dim_qk=DIM_QK,
        head_dim_v=DIM_V,
        dtype="fp16",
        mask=unlisted(mask.stand_in) if "pages" in KERNELS[kernel].supports else mask.stand_in,
        score=score and score.form,
        dropout="dropout" in case and drops,
        page=16 if "pages" in KERNELS[kernel].supports else 0,
    )
    rendered = render(problem, CONFIGS[kernel], kernel)
    binary = not_compiled(rendered)
    module, recorder = kernel_files.load(rendered), Recorder()
    monkeypatch.setattr(module, rendered.function, recorder)
    from_driver: list[tuple[int, list[Any]]] = []
    stand_in = StandIn(binary, lambda grid, values: from_driver.append((grid, values)))

    captured = {
        slot: torch.zeros(one.shape) for slot, one in enumerate(score.captured if score else ())
    }
    reads = score_tensors(
        score.captured if score else (), score.sink_logits if score else None, captured
    )
    if problem.dropout:
        reads |= Dropout(0.3, torch.tensor([5, 6])).given
    shape = Shape(BATCH, HEADS, SEQLEN_Q, SEQLEN_KV)
    compiled = Compiled()
    from_triton = by_triton(rendered, jitted(compiled))
    given = given_to(kernel, heads_inside=heads_inside)
    results: list[Any] = []
    of_bundle = from_bundle(rendered, stand_in)
    for launch in (module.launch, of_bundle, from_triton, from_triton):
        bound = BoundKernel(launch, problem.mask, kernel, CONFIGS[kernel])
        results.append(bound.given(mask, shape, torch.device("cpu"), reads)(*given))

    ((grid, ours),), ((emitted_grid, theirs),) = from_driver, recorder.launches
    assert grid == emitted_grid
    *ours, first_scratch, second_scratch = ours
    assert (first_scratch, second_scratch) == (0, 0)
    assert described(ours, results[1]) == described(theirs, results[0])
    for (again, values), result in zip(compiled.launches, results[2:], strict=True):
        assert again == grid
        assert described(values, result) == described(theirs, results[0])
    for result in results[1:]:
        assert [of(one) for one in flat(result)] == [of(one) for one in flat(results[0])]
    ((arguments, options),) = compiled.asked  # once, as the emitted launch asks
    assert options == recorder.bound[1]
    assert [kind(one) for one in arguments] == [kind(one) for one in recorder.bound[0]]


def kind(argument: Any) -> Any:
    """Return the values that Triton's binder specialises on."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16, argument.shape
    return type(argument)


def described(values: list[Any], result: Any) -> list[Any]:
    """Return arguments with results instead of their addresses, floats as fp32 has them."""
    made = {
        one.data_ptr(): f"result {i}"
        for i, one in enumerate(flat(result))
        if isinstance(one, torch.Tensor)
    }
    return [torch.tensor(x).item() if isinstance(x, float) else made.get(x, int(x)) for x in values]


def flat(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def of(result: Any) -> Any:
    if not isinstance(result, torch.Tensor):
        return result
    return result.shape, result.stride(), result.dtype


def forward(compiled: Any, own: Any = None, **changed: Any) -> Launch:
    """Return the launch of a forward kernel of dense heads."""
    function: Any = jitted(compiled)
    vars(function).update(changed)
    return by_triton(FORWARD, function, own)


@pytest.mark.usefixtures("no_driver")
def test_a_plan_keeps_only_facts_that_strides_determine() -> None:
    compiled = Compiled()
    launch = forward(compiled)
    dense = tensor(1, 2, 64, 64)
    given = [dense, dense.clone(), tensor(1, 2, 64, 64, heads_inside=True)]
    results = [launch(q, q, q, scale) for q in given for scale in (0.5, 0.25)]
    assert len(compiled.asked) == 1
    for i, (_, values) in enumerate(compiled.launches):
        q, (out, lse) = given[i // 2], results[i]
        addresses = [one.data_ptr() for one in (q, q, q, out, lse)]
        assert values[:5] == addresses
        heads_inside = i // 2 == 2
        assert values[5:8] == [0, *((8, 16) if heads_inside else (512, 8))]
        assert values[-1] == (0.5, 0.25)[i % 2] * math.log2(math.e)


@pytest.mark.usefixtures("no_driver")
def test_hooks_of_profilers_are_called() -> None:
    from triton import knobs

    compiled = Compiled()
    launch, q = forward(compiled), tensor(1, 2, 64, 64)
    hook: Any = lambda metadata: None  # noqa: E731
    launch(q, q, q, 0.5)
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        launch(q, q, q, 0.5)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    launch(q, q, q, 0.5)
    silent = (None, None, None)
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    assert compiled.told == [silent, ("grid (2, 1, 1)", enter, leave), silent]


@pytest.mark.usefixtures("no_driver")
def test_other_versions_of_triton_launch_by_the_run_of_the_file() -> None:
    q = tensor(1, 2, 64, 64)
    launched: list[Any] = []

    def gone(*_: Any, **__: Any) -> Any:
        raise AttributeError("no such thing")

    for changed in ({"warmup": gone}, {"warmup": lambda *_, **__: SimpleNamespace(run=None)}):
        launch = forward(Compiled(), lambda *given: launched.append(given), **changed)
        launched.clear()
        results = [launch(q, q, q, 0.5) for _ in range(2)]
        for (grid, arguments, device), (out, lse) in zip(launched, results, strict=True):
            assert (grid, device) == (2, q.device)
            assert [x.data_ptr() for x in arguments[:5]] == [
                x.data_ptr() for x in (q, q, q, out, lse)
            ]


def test_a_stride_that_does_not_fit_is_refused() -> None:
    launch = from_bundle(FORWARD, StandIn(not_compiled(FORWARD), lambda grid, values: None))
    q = torch.zeros(1, 2, 64, 65, dtype=torch.float16)[..., :64]
    with pytest.raises(ValueError, match="multiples of 8 elements"):
        launch(q, q, q, 0.125)


@pytest.mark.parametrize("stride", [7, 2**40], ids=["no multiple of the unit", "beyond an int"])
@pytest.mark.parametrize("sizes", [(1, 2, 3), (2, 1, 3), (2, 2, 1), (1, 1, 1)], ids=str)
def test_dimensions_of_size_1_have_no_strides(sizes: tuple[int, int, int], stride: int) -> None:
    """PyTorch lets them have any."""
    rendered = render(AttentionProblem.parse("hq2 hkv2 q64 d64 fp16 causal"), CONFIGS["fwd"])
    binary = not_compiled(rendered)
    dense = torch.zeros(*sizes, 64, dtype=torch.float16)
    strides = [stride if n == 1 else s for n, s in zip(sizes, dense.stride(), strict=False)]
    q = dense.as_strided((*sizes, 64), (*strides, 1))
    launched: list[dict[str, int]] = []
    names = [name for name, _ in binary.arguments]
    stand_in = StandIn(
        binary, lambda grid, values: launched.append(dict(zip(names, values, strict=True)))
    )
    from_bundle(rendered, stand_in)(q, q, q, 0.125)
    expected = [0 if n == 1 else s // 8 for n, s in zip(sizes, dense.stride(), strict=False)]
    for letter, row in (("q", "m"), ("k", "n"), ("v", "n")):
        assert [launched[0][f"stride_{letter}{one}"] for one in ("b", "h", row)] == expected


def test_results_are_allocated_equally_without_pytorchs_fast_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: Any = (2, 3, 5, 16), (240, 16, 48, 1), torch.bfloat16
    made = allocation._allocator.__wrapped__
    results = [made(False)(*asked)]
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    results.append(made(False)(*asked))
    for result in results:
        assert (tuple(result.shape), result.stride(), result.dtype) == asked
        assert result.device == torch.device("cpu")
