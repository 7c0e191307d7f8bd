"""Choose and load the kernels of a problem bucket, and launch them for calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from threading import RLock
from typing import Any

import torch

from tilegen import bundles, cpu, pipeline
from tilegen.choose.choice import Choice
from tilegen.cpu import runs_compiled
from tilegen.environment import current, using
from tilegen.errors import Unsupported
from tilegen.gpus.spec import ASSUMED, GpuSpec, detect, gpu
from tilegen.kernels import passes
from tilegen.kernels.config import Kernel
from tilegen.kernels.layout import public_lse
from tilegen.kernels.panels import Launch, rows_for
from tilegen.kernels.spec import Direction, FamilySpec
from tilegen.kernels.split_kv import Requests
from tilegen.launch.binding import BoundKernel
from tilegen.launch.bound_module import bound_kernel
from tilegen.launch.changes import Changes, Gradients, Wanted
from tilegen.launch.libraries import Library
from tilegen.masks.form import Shape
from tilegen.masks.tensors import score_tensors, tensors_of
from tilegen.problem import AttentionProblem

READABLE = torch.int32, torch.int64
"""Dtypes of lengths and tables that kernels compiled in this process read without a copy."""


@dataclass(frozen=True)
class Pass:
    """The kernels of a pass and the order of their launches."""

    kernels: Mapping[Kernel, BoundKernel]
    launches: Mapping[Kernel, Launch]
    """The launches of the kernels, without the arguments of mask, score and dropout."""
    panel_rows: int
    run: Callable[..., Any]
    """The function that launches the kernels in order: `run` of their family."""
    is_plain: bool
    """True if mask, score and dropout add no arguments."""
    reads_lists: bool
    """True if some kernels take lists of tiles."""
    converts_integers: bool
    """True if lengths, tables and starts are made int32 and contiguous before kernels read them."""
    library: Library | None = None
    """A library that computes the pass for every call whose result it can give."""

    @cached_property
    def takes_laid(self) -> bool:
        """Whether `run` takes the shapes and strides of q, k and v."""
        return "laid" in inspect.signature(self.run).parameters

    @cached_property
    def padded(self) -> tuple[tuple[Kernel, Launch, bool], ...]:
        """(kernel, launch, whether it reads `t0`) for each kernel, if no kernel reads more than the
        mask's tensor `t0`; otherwise empty.

        A fast path for calls with lengths of padded batches and no other tensors.
        """
        kernels = self.kernels.items()
        if self.is_plain or not all(k.reads_t0_alone or k.reads_nothing for _, k in kernels):
            return ()
        return tuple((name, kernel.launch, kernel.reads_t0_alone) for name, kernel in kernels)

    def reading(
        self, tables: Sequence[torch.Tensor], reads: Mapping[str, Any]
    ) -> Mapping[Kernel, Launch]:
        """Bind the tensors of mask, score and dropout to the launches, but no lists of tiles."""
        launches: dict[Kernel, Launch] = {}
        for name, kernel in self.kernels.items():  # takes half the time of a comprehension
            launches[name] = kernel.reading(tables, reads)
        return launches


class Kernels:
    """The emitted kernels of one problem bucket on one device. The kernels of a pass are chosen and
    loaded when it first runs."""

    def __init__(
        self,
        problem: AttentionProblem,
        device: torch.device,
        aligned: bool,
        describable: bool = True,
        integers: tuple[torch.dtype, ...] = (),
    ) -> None:
        """Prepare kernels for tensors that are `aligned` to 16 bytes and `describable` by tensor
        descriptors, or not.

        `integers` are the dtypes, all in READABLE, of the lengths of padded batches, or of block
        table, lengths and starts of a paged call. Without them each call converts its integers.
        """
        self.problem = problem
        # Gradients of keys and of values have separate buffers, even if v is a view of k.
        self._problems = {"forward": problem, "backward": replace(problem, latent=False)}
        self.device = device
        self.aligned = aligned
        self.describable = aligned and describable
        self._integers = integers
        self._on_gpu = device.type == "cuda"
        self.settings = current()
        self._passes: dict[Direction, Pass] = {}
        self._lock = RLock()

    def load(self, direction: Direction) -> Pass:
        """Return a pass, choosing and loading its kernels the first time."""
        with self._lock:
            if direction not in self._passes:
                load = self._for_cpu if runs_compiled(self.device) else self._for_gpu
                with using(self.settings):  # a backward may run in another thread
                    self._passes[direction] = load(direction)
            return self._passes[direction]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        changes: Changes,
        requests: Requests | None = None,
        laid: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute (out, lse), for `requests` over pages. With a score lse is in pairs, as the
        backward takes it: see `public_lse`. `laid` are the shapes of q, k and v, then their
        strides, if the caller knows them."""
        # Triton launches on the current device.
        if self._on_gpu and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self.forward(q, k, v, scale, changes, requests, laid)
        pass_ = self._passes.get("forward") or self.load("forward")
        if pass_.library and (result := pass_.library.forward(q, k, v, scale)) is not None:
            return result
        launches = pass_.launches
        if pass_.padded and changes.kv_lengths is not None:
            lengths = changes.lengths(self.device, pass_.converts_integers)
            launches = {}
            for name, launch, reads in pass_.padded:
                launches[name] = partial(launch, t0=lengths) if reads else launch
        elif not pass_.is_plain:
            score = changes.score
            reads = {} if changes.dropout is None else changes.dropout.given
            if score is not None:
                reads |= score_tensors(score.captured, score.sink_logits)
            launches = self._completed(pass_, changes, reads, q, k, requests)
        rows = pass_.panel_rows
        if laid is not None and pass_.takes_laid:
            return pass_.run(launches, q, k, v, scale, panel_rows=rows, laid=laid)
        if requests is None:
            return pass_.run(launches, q, k, v, scale, panel_rows=rows)
        if pass_.converts_integers:
            requests = requests.narrow
        return pass_.run(launches, q, k, v, scale, panel_rows=rows, requests=requests)

    def backward(
        self,
        saved: tuple[torch.Tensor, ...],
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        scale: float,
        changes: Changes,
        wanted: Wanted,
    ) -> Gradients:
        """Compute the gradients; `saved` are q, k, v, out and lse."""
        if self._on_gpu and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self.backward(saved, dout, dlse, scale, changes, wanted)
        q, k, v, out, lse = saved
        pass_ = self._passes.get("backward") or self.load("backward")
        if pass_.library and dlse is None:
            gradients_of_library = pass_.library.backward(saved, dout, scale, wanted)
            if gradients_of_library is not None:
                return gradients_of_library
        launches = pass_.launches
        captured: dict[int, torch.Tensor] = {}
        if not pass_.is_plain:
            score = self.problem.score
            # Kernels write dense gradients, whatever the strides of the trained tensors.
            sizes = {
                slot: changes.captured[slot].shape for slot in (score.trained if score else ())
            }
            gradients = {s: q.new_zeros(size, dtype=torch.float32) for s, size in sizes.items()}
            captured = {slot: gradients[slot] for slot in wanted.captured}
            reads = {} if changes.dropout is None else changes.dropout.given
            reads |= score_tensors(changes.captured, None, gradients)
            launches = self._completed(pass_, changes, reads, q, k)
        delta = passes.delta_of(launches, out, dout)
        if wanted.sinks and self.problem.mask.apart == "pairs":
            # 0 times NaN: rows beyond all documents reach no sink.
            delta.masked_fill_(~out.any(-1), 0.0)
        if dlse is not None:  # d lse / d s = p: the same as subtracting dlse from delta
            # A row without kept keys has lse -inf, and the gradient of -inf may be NaN: use 0.
            has_keys = public_lse(lse) > float("-inf")
            delta -= torch.where(has_keys, public_lse(dlse), 0.0)
        dq, dk, dv = pass_.run(
            launches,
            *(q, k, v, dout, lse, delta, scale),
            panel_rows=pass_.panel_rows,
            wants_dq=wanted.dq or bool(captured),
            wants_dkdv=wanted.dkdv,
        )
        sinks = None
        if wanted.sinks and changes.sinks is not None:
            sinks = passes.gradient_of_sinks(changes.sinks, lse, delta)
        return Gradients(dq, dk, dv, sinks, captured)

    def _completed(
        self,
        pass_: Pass,
        changes: Changes,
        reads: Mapping[str, Any],
        q: torch.Tensor,
        k: torch.Tensor,
        requests: Requests | None = None,
    ) -> Mapping[Kernel, Launch]:
        """Bind the tensors of mask, score and dropout to the launches of a pass."""
        if requests is None:
            tables = changes.tables(q, k, self.device, pass_.converts_integers)
        else:
            bounds = requests.longest_q, requests.longest_kv
            shape = Shape(len(requests.lengths), self.problem.num_heads_q, *bounds)
            tables = tensors_of(changes.given, shape, self.device)
        if not pass_.reads_lists:
            return pass_.reading(tables, reads)
        read = (changes.mask, Shape.of(q, k), self.device, reads, tables)
        return {name: kernel.given(*read) for name, kernel in pass_.kernels.items()}

    def _for_cpu(self, direction: Direction) -> Pass:
        # A bundle's kernels check no addresses.
        served = None if current().check_bounds else self._from_bundle(None, direction)
        if served:
            family = passes.family_of(served, direction)
            return self._pass(direction, family, served, panel_rows=1, readable=(torch.int32,))
        from tilegen.cpus.host import current_cpu

        problem = self._problems[direction]
        if reason := cpu.why_not_compiled():
            lacking = f"no loaded bundle has its {direction} for this processor, and "
            in_none = bundles.loaded and not current().check_bounds
            raise Unsupported(
                f"no kernels for '{problem}': {lacking if in_none else ''}none can be compiled "
                f"here: {reason}; without TILEGEN_CPU=kernels PyTorch computes"
            )
        chosen = pipeline.choose(
            problem, current_cpu(), direction, aligned=self.aligned, may_tune=True
        )
        return self._pass(direction, *self._bound(chosen, direction), panel_rows=1)

    def _for_gpu(self, direction: Direction) -> Pass:
        problem, spec = self._problems[direction], _spec(self.device)
        rows = rows_for(problem, spec, direction)
        if kernels := self._from_bundle(spec, direction):
            family = passes.family_of(kernels, direction)
            return self._pass(direction, family, kernels, panel_rows=rows, readable=(torch.int32,))
        chosen = pipeline.choose(
            problem,
            spec,
            direction,
            aligned=self.aligned,
            describable=self.describable,
            may_tune=self._on_gpu,
            may_compile=self._on_gpu,
        )
        library = Library.of(next(iter(chosen.values())))
        bound = self._bound(chosen, direction)
        return self._pass(direction, *bound, panel_rows=rows, library=library)

    def _bound(
        self, chosen: Mapping[Kernel, Choice], direction: Direction
    ) -> tuple[FamilySpec, dict[Kernel, BoundKernel]]:
        emitted = pipeline.emit(chosen, aligned=self.aligned)
        kernels = {kernel: bound_kernel(one, self.device) for kernel, one in emitted.items()}
        return passes.family_of(kernels, direction), kernels

    def _pass(
        self,
        direction: Direction,
        family: FamilySpec,
        kernels: Mapping[Kernel, BoundKernel],
        *,
        panel_rows: int,
        readable: tuple[torch.dtype, ...] = READABLE,
        library: Library | None = None,
    ) -> Pass:
        pairs = direction == "forward" and self._problems[direction].pair_lse
        return Pass(
            kernels,
            {name: kernel.launch for name, kernel in kernels.items()},
            panel_rows,
            partial(family.run, pairs=True) if pairs else family.run,
            all(kernel.reads_nothing for kernel in kernels.values()),
            any(kernel.reads_lists for kernel in kernels.values()),
            not self._integers or not set(self._integers) <= set(readable),
            library,
        )

    def _from_bundle(
        self, spec: GpuSpec | None, direction: Direction
    ) -> dict[Kernel, BoundKernel] | None:
        """Return the kernels of a pass from the first bundle that has them, or None. Without a
        `spec` they are for this machine's processor."""
        for bundle in bundles.loaded:
            problem = self._problems[direction]
            if kernels := bundle.launches(
                problem, spec, direction, self.device, aligned=self.aligned
            ):
                return kernels
        return None


@cache
def _spec(device: torch.device) -> GpuSpec:
    spec = detect(device.index) if device.type == "cuda" else gpu(ASSUMED)
    if spec is None:
        raise Unsupported(f"expected a GPU that PyTorch sees, got {device}")
    return spec
