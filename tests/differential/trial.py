"""Runs one problem through tilegen's kernels and judges every result."""

from __future__ import annotations

import ast
import contextlib
import re
import signal
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch._dynamo

import tilegen
from tests.differential import oracle
from tests.differential.problems import Layout, Problem
from tests.differential.requests import Packing, attend_pages, attend_varlen, inside, only
from tests.support.calls import gpu_road
from tilegen import pipeline
from tilegen.check.reference import TORCH_DTYPES, Inputs, make_inputs
from tilegen.check.verification import judge
from tilegen.choose.records import Records
from tilegen.compiling.workers import Pool
from tilegen.cpu import executable
from tilegen.emit.identity import RenderedKernel
from tilegen.environment import settings
from tilegen.errors import BuildFailed, InvalidProblem, Unsupported
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import family_among
from tilegen.kernels.spec import Direction, FamilySpec
from tilegen.launch import bound_module
from tilegen.masks import values
from tilegen.masks.dilation import step_of
from tilegen.masks.grouping import packed_heads
from tilegen.problem import AttentionProblem
from tilegen.runtime import plans

SECONDS = 60
"""That a problem may take, and COMPILING to build its kernels."""
COMPILING = 600
ARCH = "sm_90"
TILEGEN_NAMES: dict[str, Any] = {
    name: getattr(tilegen, name)
    for name in (
        *("predicate", "full", "causal", "sliding_window", "prefix_lm", "global_tokens"),
        *("streaming", "kv_lengths", "dilated", "documents", "neighborhood", "block_sparse"),
        *("from_bool", "score", "softcap", "alibi", "temperature", "relative_bias", "bias"),
        "sinks",
        "tree",
    )
} | {"values": values}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a problem: right, refused, wrong, crashed, or unclear (unsuitable)."""

    what: str
    detail: str = ""
    seconds: float = 0.0

    @property
    def kind(self) -> str:
        """The kind that a simpler problem must share to be the same failure."""
        return self.what if self.what != "crashed" else f"{self.what} {self.detail[:50]}"

    @property
    def failed(self) -> bool:
        """True if it is one to look into."""
        return self.what in ("wrong", "crashed")


class OutOfTimeError(Exception):
    """A problem took longer than SECONDS."""


@contextlib.contextmanager
def alarm(seconds: int) -> Generator[None]:
    """Raise OutOfTimeError inside after this long."""

    def ring(*_: Any) -> None:
        raise OutOfTimeError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def attempt(problem: Problem, pool: Pool | None = None) -> Outcome:
    """Try a problem and return the outcome; with a pool, kernels are compiled for ARCH too."""
    started = time.monotonic()
    outcome = _attempt(problem, pool)
    return replace(outcome, seconds=time.monotonic() - started)


def _attempt(problem: Problem, pool: Pool | None) -> Outcome:
    try:
        with alarm(SECONDS):
            question = Question(problem)
    except Exception as error:
        return Outcome("unclear", f"{type(error).__name__}: {error}")
    try:
        asked: list[RenderedKernel] = []
        with alarm(SECONDS), _kernels(problem, asked):
            calls = list(_calls(question))
        if pool is not None:
            with alarm(COMPILING):
                _compile(asked, pool)
    except OutOfTimeError as error:
        return Outcome("crashed", f"timeout: {error}")
    except (Unsupported, InvalidProblem) as error:
        return Outcome("refused", str(error).split("; the call was")[0])
    except torch._dynamo.exc.Unsupported as error:
        refusal = re.search(r"raised exception (?:Unsupported|InvalidProblem)\((.*)\)", str(error))
        what = "refused" if refusal else "crashed"
        return Outcome(what, refusal[1] if refusal else f"torch.compile: {str(error)[:300]}")
    except Exception as error:
        return Outcome("crashed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    failures = [line for call in calls for line in call]
    return Outcome("wrong", "; ".join(failures)) if failures else Outcome("right")


def _compile(kernels: list[RenderedKernel], pool: Pool) -> None:
    """Compile kernels for ARCH. Raises BuildFailed."""
    for kernel in kernels:
        if isinstance(compiled := pool.compile(kernel, ARCH), BuildFailed):
            raise compiled


@contextlib.contextmanager
def _kernels(problem: Problem, asked: list[RenderedKernel]) -> Generator[None]:
    """Make calls use the problem's kernels and tiles; collect loaded kernels."""
    names = set(problem.configs)

    def families_used(_: Any, direction: Direction) -> tuple[FamilySpec, ...]:
        family = family_among(names, direction)
        assert family is not None, f"no {direction} among {names}"
        return (family,)

    def agreed(records: Records, kernel: Kernel) -> TileConfig:
        config = TileConfig.parse(problem.configs[kernel])
        if config.heads > packed_heads(records.problem):  # mask or score tell heads apart
            config = replace(config, block_m=config.rows, heads=1)
        return config

    def noted(rendered: RenderedKernel, device: torch.device) -> ModuleType:
        asked.append(rendered)
        return executable(rendered, device)

    plans.forget()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(bound_module, "executable", noted))
        stack.enter_context(settings(batch_invariant=problem.invariant))
        if names:
            stack.enter_context(gpu_road(noted))
            stack.enter_context(mock.patch.object(pipeline, "families_used", families_used))
            stack.enter_context(mock.patch.object(Records, "agreed", agreed))
        yield
    plans.forget()


# --------------------------------------------------------------------------------------------------
# The call


class Question:
    """A problem's tensors and PyTorch's results. Raises Unclear."""

    def __init__(self, problem: Problem) -> None:
        """Everything random comes from the problem's seeds."""
        self.problem = problem
        shape = (
            f"b{problem.batch} hq{problem.heads} hkv{problem.heads_kv} q{problem.rows} "
            f"kv{problem.columns} d{problem.head_dim}/{problem.head_dim_v} {problem.dtype} full"
        )
        x = make_inputs(AttentionProblem.parse(shape), seed=problem.seed)
        tensors = (x.q, x.k, x.v, x.dout)
        laid_out = zip(tensors, problem.layouts, strict=True)
        self.x = Inputs(*(_laid_out(tensor, layout) for tensor, layout in laid_out))
        if problem.latent:
            self.x = replace(self.x, v=self.x.k[..., : problem.head_dim_v])
        generator = torch.Generator().manual_seed(problem.seed)
        rows = (problem.batch, problem.heads, problem.rows)
        self.dlse = torch.randn(rows, generator=generator) if problem.trains_lse else None
        if problem.requests and self.dlse is not None:
            self.dlse = self.dlse * inside(problem).any(-1)
        self.tables = problem.captured()
        if problem.dropout and not problem.requests:
            texts = problem.mask, problem.score or "softcap(1.0)"
            mask, score = (
                oracle.evaluate(text, problem, self.tables, TILEGEN_NAMES) for text in texts
            )
            if step_of(mask, score.text, problem.batch) > 1:
                raise oracle.Unclear("weights are drawn by places in groups")
        self.block_mask = _block_mask(problem, self.tables) if problem.call == "flex" else None
        self.answers = [self._answer(self.tables)]
        if problem.changed:
            later = {
                name: table.detach().clone().requires_grad_(table.requires_grad)
                if isinstance(table, torch.Tensor)
                else table
                for name, table in self.tables.items()
            }
            problem.change(later)
            self.answers.append(self._answer(later))

    def _answer(self, tables: dict[str, Any]) -> Answer:
        problem, dtype = self.problem, TORCH_DTYPES[self.problem.dtype]
        keep = oracle.kept(problem, tables)
        if problem.score:
            oracle.require_clear_score(problem, self.x, tables)
        given = (problem, self.x, self.dlse, keep, oracle.dropped(problem), tables)
        exact = oracle.reference(*given)
        oracle.require_numbers(problem, exact)
        own = oracle.reference(*given, dtype=dtype)
        for name in problem.trained:  # a gradient is stored as its table is
            own[f"d{name}"] = own[f"d{name}"].to(tables[name].dtype)
        return Answer(exact, own, oracle.floors(*given, exact), bool(keep.any()))


@dataclass(frozen=True)
class Answer:
    """The correct results, PyTorch's results in the inputs' precision, the effect of rounding, and
    whether any pair is kept."""

    exact: oracle.Results
    own: oracle.Results
    floors: dict[str, float]
    keeps_any: bool

    def failures(self, results: oracle.Results) -> list[str]:
        """Return a line for each result that is wrong."""
        failed: list[str] = []
        for name, tensor in results.items():
            check = judge(name, tensor, self.exact[name], [self.own[name]])
            if not check.ok and not check.error <= self.floors[name]:
                failed.append(f"{check}, rounding {self.floors[name]:.3g}")
        return failed


def _calls(question: Question) -> Iterator[list[str]]:
    """Make the call, then again with changed tables; yield the wrong results of each."""
    problem, tables, packing = question.problem, question.tables, Packing(question.problem)
    call = _flex(question) if problem.call == "flex" else _attention(problem, tables)
    x, dlse = question.x, question.dlse
    given = {name: packing.given(name, getattr(x, name)) for name in ("q", "k", "v", "dout")}
    for number, answer in enumerate(question.answers):
        if number:
            problem.change(tables)
        leaves = [given[name].detach().requires_grad_(problem.backward) for name in "qkv"]
        torch.manual_seed(problem.seed)  # what dropout draws by
        out, lse = call(*leaves)
        results = {"out": out.detach(), "lse": lse.detach()}
        if problem.backward:
            wanted = [*leaves, *(tables[name] for name in problem.trained)]
            finite = lse.masked_fill(lse == -oracle.INF, 0.0)
            outputs = [(out, given["dout"])]
            if dlse is not None:
                outputs.append((finite, packing.given("dlse", dlse)))
            # A table that only decides what is chosen has no gradient, which is one of 0.
            gradients = torch.autograd.grad(
                [y for y, _ in outputs],
                wanted,
                [dy for _, dy in outputs],
                allow_unused=True,
                materialize_grads=True,
            )
            names = ["dq", "dk", "dv", *(f"d{name}" for name in problem.trained)]
            results |= dict(zip(names, gradients, strict=True))
        padded = {name: packing.padded(name, one) for name, one in results.items()}
        yield answer.failures(only(problem, padded))


def _attention(problem: Problem, tables: dict[str, Any]) -> Callable[..., Any]:
    options: dict[str, Any] = {"scale": problem.scale, "return_lse": True}
    attend: Callable[..., Any]
    if problem.page:
        attend = attend_pages(problem, options)
    elif problem.requests:
        attend = attend_varlen(problem, options | {"dropout_p": problem.dropout})
    else:
        options["kv_lengths"] = tables[problem.kv_lengths] if problem.kv_lengths else None
        attend = partial(tilegen.attention, **options, dropout_p=problem.dropout)
    texts = problem.mask, problem.score or "None"
    if problem.compiled:
        return _traced(attend, problem, tables, *texts)
    mask, score = (oracle.evaluate(text, problem, tables, TILEGEN_NAMES) for text in texts)
    return partial(attend, mask=mask, score=score)


def _traced(
    attend: Callable[..., Any], problem: Problem, tables: dict[str, Any], mask: str, score: str
) -> Callable[..., Any]:
    """Return a function that torch.compile compiles, in which mask and score are made."""
    sizes = {"rows": problem.rows, "columns": problem.columns}
    names = TILEGEN_NAMES | sizes | {"torch": torch, "attend": attend}
    given = ", ".join(("q", "k", "v", *tables))
    mask = ast.unparse(_Inverted().visit(ast.parse(mask, mode="eval")))
    text = f"def call({given}):\n    return attend(q, k, v, mask={mask}, score={score})\n"
    exec(text, names)
    torch._dynamo.reset()
    compiled = torch.compile(names["call"], fullgraph=True, backend="aot_eager")
    return lambda q, k, v: compiled(q, k, v, **tables)


class _Inverted(ast.NodeTransformer):
    """Spells `~` of masks as torch.compile takes it."""

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node  # what it inverts are tensors

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        inner: Any = self.generic_visit(node)
        return ast.Call(ast.Attribute(inner.operand, "inverted"), [], [])


PLAIN_NAMES: dict[str, Any] = {name: lambda fn: fn for name in ("predicate", "score")}
"""FlexAttention takes functions as they are."""


def _flex(question: Question) -> Callable[..., Any]:
    problem = question.problem
    options: dict[str, Any] = {"scale": problem.scale, "return_lse": True, "enable_gqa": True}
    options["block_mask"] = question.block_mask
    if problem.score:
        options["score_mod"] = oracle.evaluate(problem.score, problem, question.tables, PLAIN_NAMES)
    return lambda q, k, v: tilegen.flex_attention(q, k, v, **options)


def _block_mask(problem: Problem, tables: dict[str, Any]) -> Any:
    """Return PyTorch's BlockMask of the mask; None for the full mask, whose function gives no
    tensor."""
    from torch.nn.attention.flex_attention import create_block_mask

    if problem.mask == "full()":
        return None
    fn = oracle.evaluate(problem.mask, problem, tables, PLAIN_NAMES)
    sizes = (problem.batch, problem.heads, problem.rows, problem.columns)
    return create_block_mask(fn, *sizes, device="cpu", BLOCK_SIZE=32)


def _laid_out(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the same values in another place in memory (expanded: the first batch's, for all)."""
    match layout:
        case "inside":
            return tensor.transpose(1, 2).contiguous().transpose(1, 2)
        case "padded":
            return torch.nn.functional.pad(tensor, (0, 5))[..., : tensor.shape[-1]]
        case "sliced":
            return torch.stack([tensor, -tensor], 3)[:, :, :, 0]
        case "expanded":
            return tensor[:1].expand(tensor.shape)
        case "transposed":
            return tensor.mT.contiguous().mT
        case _:
            return tensor
