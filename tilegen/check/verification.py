"""The rule for correct results: a kernel may err at most twice as much as PyTorch in the same
precision, plus an allowance for fp32 rounding.

PyTorch's error is measured against a reference in fp64. As in FlashAttention's tests, it includes
the change of the reference when 0.3 is added and subtracted in the working precision. The allowance
for rounding differs by element: see rounding.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilegen import cpu
from tilegen.check import in_child
from tilegen.check.paging import in_pages, out_of_pages
from tilegen.check.reference import Inputs, attention_reference, make_inputs, torch_attention
from tilegen.check.rounding import rounding_floors
from tilegen.emit.identity import RenderedKernel
from tilegen.emit.render import render
from tilegen.errors import Unsupported, WrongResult
from tilegen.kernels import passes
from tilegen.kernels.allocation import poisoned
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.layout import public_lse
from tilegen.kernels.panels import PANEL_STEP, Launch
from tilegen.kernels.registry import KERNELS, family_among
from tilegen.launch.bound_module import bound_kernel
from tilegen.masks.dropout import Dropout
from tilegen.masks.form import Shape
from tilegen.masks.mask import Mask
from tilegen.masks.score import Score
from tilegen.masks.tensors import score_tensors, typical_score
from tilegen.problem import AttentionProblem


@dataclass(frozen=True, kw_only=True)
class Check:
    """Judgement of one output tensor, by the element that exceeds its bound most, or comes nearest
    to it."""

    tensor: str
    """Name of the output: out, lse, dq, dk, dv, dsinks, or dt0, dt1, ... for a score's tensors."""
    ok: bool
    """True if every element is within its bound."""
    error: float
    """Distance between the kernel's element and the reference's."""
    allowed: float
    """Upper bound of the error: PyTorch's own error, doubled, plus rounding."""
    index: tuple[int, ...]
    """Index of the element in the tensor."""
    found: float
    """Value of the kernel."""
    expected: float
    """Value of the reference."""

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "WRONG"
        return (
            f"{self.tensor:5} {verdict}  error {self.error:.3g}, allowed {self.allowed:.3g}"
            f"  (worst at {self.index}: {self.found:.6g}, expected {self.expected:.6g})"
        )


def verify(
    problem: AttentionProblem,
    configs: Mapping[Kernel, TileConfig],
    *,
    device: str | torch.device | None = None,
    seed: int = 0,
    here: bool = False,
) -> tuple[Check, ...]:
    """Run the kernels of `configs` on random inputs of the problem's shape and judge every output.

    The kernels of a forward give checks of out and lse. With the kernels of a backward also dq, dk
    and dv are checked, dt0, dt1, ... for trained tensors of a score, and dsinks for its sinks. Mask
    and score read typical tensors. `device` defaults to the GPU, or to the CPU if there is none.
    Kernels whose warpgroups have roles run in a child process with a time limit, unless `here`.
    Raises Unsupported if emitted kernels cannot run.
    """
    device = torch.device(device or run_device())
    if device.type == "cuda" and not here and any(KERNELS[name].specialised for name in configs):
        return tuple(map(_check_of, in_child.run(problem, configs, seed=seed)))
    with _own_modes(device):
        inputs = make_inputs(problem, device=device, seed=seed)
        problem = replace(problem, mask=problem.mask.realized(problem.shape, device))
        kernels: dict[Kernel, RenderedKernel] = {
            kernel: render(problem, config, kernel) for kernel, config in configs.items()
        }
        score = typical_score(problem.score, problem.shape, device, seed=seed)
        dropout = Dropout.typical(problem.dropout, device, seed=seed)
        return check(kernels, inputs, mask=problem.mask, score=score, dropout=dropout)


def _check_of(fields: Mapping[str, Any]) -> Check:
    """Return a check from its fields in JSON, which has no tuples."""
    known: dict[str, Any] = {name: fields[name] for name in Check.__dataclass_fields__}
    known["index"] = tuple(fields["index"])
    return Check(**known)


@contextlib.contextmanager
def _own_modes(device: torch.device) -> Generator[None]:
    """Turn gradients on and autocast off, whatever the modes of a call that tunes."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield


def check(
    kernels: Mapping[Kernel, RenderedKernel],
    inputs: Inputs,
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
) -> tuple[Check, ...]:
    """Run rendered kernels on given inputs and judge every output.

    `dropout` is required if the problem drops weights; the reference drops the same weights.
    """
    factor: float = inputs.q.shape[-1] ** -0.5 if scale is None else scale
    results = run(kernels, inputs, factor, mask=mask, score=score, dropout=dropout)
    return judge_all(results, inputs, factor, mask=mask, score=score, dropout=dropout)


def judge_all(
    outputs: Mapping[str, torch.Tensor],
    inputs: Inputs,
    factor: float,
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    dropout: Dropout | None = None,
) -> tuple[Check, ...]:
    """Judge outputs, given by name, as `check` does; `factor` is the softmax scale."""
    wide, wide_score = inputs.to(torch.float64), _widened(score)
    expected = _reference(wide, mask, wide_score, factor, dropout)
    # With a score or dropout, PyTorch's own kernels do not apply: use its plain operations.
    ways = (True,) if score or dropout else (False, True)
    own = [_torch_result(inputs, mask, score, factor, dropout, plain=plain) for plain in ways]
    trained = _trained(wide_score)
    floors = rounding_floors(
        wide,
        mask=mask,
        score=wide_score,
        scale=factor,
        leaves=list(trained.values()),
        dropout=dropout,
    )
    floors |= {name: floors[f"leaf {i}"] for i, name in enumerate(trained)}
    return tuple(
        judge(name, outputs[name], expected[name], [result[name] for result in own], floors[name])
        for name in outputs
    )


def require(checks: tuple[Check, ...]) -> None:
    """Raise WrongResult with one line for each failed check, unless all are ok."""
    failed = [str(check) for check in checks if not check.ok]
    if failed:
        raise WrongResult("\n".join(failed))


@poisoned()
def run(
    kernels: Mapping[Kernel, RenderedKernel],
    inputs: Inputs,
    scale: float,
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    dropout: Dropout | None = None,
    panel_rows: int = PANEL_STEP,
) -> dict[str, torch.Tensor]:
    """Compute out and lse with emitted kernels, and gradients if `kernels` include a backward.

    Elements that no kernel writes are NaN. `mask` defaults to the mask of the kernels' problem.
    Panels are small by default, so that short sequences need several.
    """
    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    reads: dict[str, Any] = dropout.given if dropout else {}
    gradients: dict[int, torch.Tensor] = {}
    if score:
        sizes = {slot: score.captured[slot].shape for slot in score.form.trained}
        gradients = {s: q.new_zeros(size, dtype=torch.float32) for s, size in sizes.items()}
        reads |= score_tensors(score.captured, score.sink_logits, gradients)
    launch: dict[Kernel, Launch] = {
        kernel: launch_of(rendered, rendered.problem.mask if mask is None else mask, reads, q, k)
        for kernel, rendered in kernels.items()
    }
    page = next(iter(kernels.values())).problem.page
    if page:
        q_rows, k, v, requests = in_pages(q, k, v, page)
        call = launch, q_rows, k, v, scale
        out, lse = passes.forward(*call, panel_rows=panel_rows, requests=requests)
        out, lse = (out_of_pages(x, len(q)) for x in (out, public_lse(lse)))
    else:
        keeps_pairs = next(iter(kernels.values())).problem.pair_lse
        more = {"pairs": True} if keeps_pairs else {}
        out, lse = passes.forward(launch, q, k, v, scale, panel_rows=panel_rows, **more)
    results: dict[str, Any] = {"out": out, "lse": public_lse(lse)}
    if family_among(kernels, "backward"):
        delta = passes.delta_of(launch, out, dout)
        dq, dk, dv = passes.gradients(
            launch, q, k, v, dout, lse, delta, scale, panel_rows=panel_rows
        )
        results |= {"dq": dq, "dk": dk, "dv": dv}
        if score:
            captured = score.captured
            results |= {f"dt{slot}": x.to(captured[slot].dtype) for slot, x in gradients.items()}
            if score.sink_logits is not None and score.sink_logits.requires_grad:
                results["dsinks"] = passes.gradient_of_sinks(score.sink_logits, lse, delta)
    return results


def launch_of(
    rendered: RenderedKernel,
    mask: Mask,
    reads: Mapping[str, Any],
    q: torch.Tensor,
    k: torch.Tensor,
) -> Launch:
    """Return the launch of a rendered kernel on the device of q, with the tensors of the mask and
    of `reads` bound."""
    return bound_kernel(rendered, q.device).given(mask, Shape.of(q, k), q.device, reads)


def run_device() -> torch.device:
    """Return the device that emitted kernels run on. Raises Unsupported if they cannot run."""
    if torch.cuda.is_available() and not cpu.is_interpreting():
        return torch.device("cuda")
    if not cpu.is_interpreting() and (reason := cpu.why_not_compiled()):
        raise Unsupported(f"running an emitted kernel needs a GPU or the CPU compiler: {reason}")
    return torch.device("cpu")


def _trained(score: Score | None) -> dict[str, torch.Tensor]:
    """Return the tensors and sinks that a score trains, by the names of their gradients."""
    if score is None:
        return {}
    trained = {f"dt{slot}": score.captured[slot] for slot in score.form.trained}
    sinks = score.sink_logits
    return trained if sinks is None or not sinks.requires_grad else trained | {"dsinks": sinks}


def _widened(score: Score | None) -> Score | None:
    """Return a score with trained tensors and sinks as leaves in fp64."""
    if score is None:
        return None

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        return tensor.detach().to(torch.float64).requires_grad_()

    return score.with_tensors(wide)


def _reference(
    inputs: Inputs,
    mask: Mask | None,
    score: Score | None,
    scale: float,
    dropout: Dropout | None,
) -> dict[str, torch.Tensor]:
    leaves = [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    out, lse = attention_reference(*leaves, mask=mask, score=score, scale=scale, dropout=dropout)
    gradients = _gradients(out, leaves, inputs.dout, score)
    return {"out": out.detach(), "lse": lse.detach()} | gradients


def _gradients(
    out: torch.Tensor, leaves: Sequence[torch.Tensor], dout: torch.Tensor, score: Score | None
) -> dict[str, torch.Tensor]:
    wanted = dict(zip(("dq", "dk", "dv"), leaves, strict=True)) | _trained(score)
    grads = torch.autograd.grad(out, list(wanted.values()), dout, materialize_grads=True)
    return dict(zip(wanted, grads, strict=True))


def _torch_result(
    inputs: Inputs,
    mask: Mask | None,
    score: Score | None,
    scale: float,
    dropout: Dropout | None,
    *,
    plain: bool,
) -> dict[str, torch.Tensor]:
    """Compute PyTorch's own results in the inputs' precision, with its choice of kernels or, if
    `plain`, its math back end.

    lse, which SDPA does not return, is computed in fp32 from the same inputs.
    """
    leaves = [t.detach().clone().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    if score or dropout:
        out, _ = attention_reference(*leaves, mask=mask, score=score, scale=scale, dropout=dropout)
    else:
        with sdpa_kernel(SDPBackend.MATH) if plain else contextlib.nullcontext():
            out = torch_attention(*leaves, mask=mask, scale=scale)
    gradients = _gradients(out, leaves, inputs.dout, score)
    with torch.no_grad():
        single = inputs.to(torch.float32)
        _, lse = attention_reference(
            single.q, single.k, single.v, mask=mask, score=score, scale=scale
        )
    return {"out": out.detach(), "lse": lse} | gradients


def judge(
    name: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    own: Sequence[torch.Tensor],
    floor: torch.Tensor | float = 0.0,
) -> Check:
    """Judge one output. `own` are PyTorch's results, computed in several ways: the largest error
    counts.

    In fp32 PyTorch's results may differ by more than twice their errors, only by the order of
    summation. A result of PyTorch's that is not finite where the reference is finite is ignored.
    `floor` bounds the rounding error of each element: see `rounding_floors`.
    """
    if actual.shape != expected.shape:
        raise WrongResult(f"{name} must have shape {expected.shape}, got {actual.shape}")
    wide, dtype = torch.float64, own[0].dtype
    target, rounded = expected.to(wide), expected.to(dtype)
    distances = [float(_distance(result.to(wide), target).max()) for result in own]
    once = max(filter(math.isfinite, distances), default=0.0)
    once += float(_distance((rounded + 0.3) - 0.3, rounded).max())
    allowed = (torch.as_tensor(floor, dtype=wide).nan_to_num(0.0) + 2 * once).expand_as(target)
    errors = _distance(actual.to(wide), target)
    worst = int((errors - allowed.to(errors)).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), errors.shape))
    error, limit = float(errors[index]), float(allowed[index])
    return Check(
        tensor=name,
        ok=math.isfinite(error) and error <= limit,
        error=error,
        allowed=limit,
        index=index,
        found=float(actual[index]),
        expected=float(expected[index]),
    )


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|a - b|, where equal infinities are 0 apart and NaN is infinitely far from everything."""
    return torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=float("inf"))
