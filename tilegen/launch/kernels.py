"""The kernels of a kind of call: chosen and loaded for its bucket, launched for its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from threading import RLock
from typing import Any

import torch

from tilegen import bundles, pipeline
from tilegen.choose.libraries import library_used
from tilegen.choose.records import Records
from tilegen.cpu import runs_compiled
from tilegen.disk import log
from tilegen.emit.identity import stride_unit
from tilegen.errors import Unsupported
from tilegen.gpus.spec import ASSUMED, GpuSpec, detect, gpu
from tilegen.kernels import passes
from tilegen.kernels.config import Kernel
from tilegen.kernels.layout import public_lse
from tilegen.kernels.panels import Launch, rows_for
from tilegen.kernels.spec import Direction
from tilegen.kernels.split_kv import Requests
from tilegen.launch.binding import BoundKernel
from tilegen.launch.bound_module import bound_kernel, bound_module
from tilegen.launch.changes import Changes, Gradients, Wanted
from tilegen.launch.libraries import Library
from tilegen.masks.mask import Causal
from tilegen.masks.shapes import Shape
from tilegen.masks.tensors import score_tensors
from tilegen.problem import AttentionProblem
from tilegen.settings import settings

READABLE = torch.int32, torch.int64
"""Dtypes of lengths and tables that kernels compiled here read as they are."""


@dataclass(frozen=True)
class Pass:
    """The kernels of a pass, and how they follow each other."""

    kernels: Mapping[Kernel, BoundKernel]
    launches: Mapping[Kernel, Launch]
    """The launches of the same kernels, without what mask and score add."""
    panel_rows: int
    run: Callable[..., Any]
    """The function that launches them in order: `run` of their family."""
    is_plain: bool
    """Whether neither mask nor score nor dropout adds to what launches are given."""
    reads_lists: bool
    """Whether kernels are given lists of tiles."""
    converts_integers: bool
    """Whether lengths, and where requests lie, are made int32 and contiguous before kernels read
    them."""
    library: Library | None = None
    """The library that computes the pass wherever a call means the same by it."""

    @cached_property
    def padded(self) -> tuple[tuple[Kernel, Launch, bool], ...]:
        """The launches, each with whether it reads the mask's tensor `t0`, where no kernel reads
        more: for calls with lengths of padded batches and no more, nothing is looked up."""
        its = self.kernels.items()
        if self.is_plain or not all(one.reads_t0_alone or one.reads_nothing for _, one in its):
            return ()
        return tuple((name, one.launch, one.reads_t0_alone) for name, one in its)

    def reading(
        self, tables: Sequence[torch.Tensor], reads: Mapping[str, Any]
    ) -> Mapping[Kernel, Launch]:
        """Return the launches with what mask, score and dropout read, but without lists."""
        launches: dict[Kernel, Launch] = {}
        for name, one in self.kernels.items():  # takes half the time of a comprehension
            launches[name] = one.reading(tables, reads)
        return launches


class Kernels:
    """The emitted kernels of one problem bucket on one device; those of a pass are chosen and
    loaded when it first runs."""

    def __init__(
        self,
        problem: AttentionProblem,
        device: torch.device,
        aligned: bool,
        describable: bool = True,
        integers: tuple[torch.dtype, ...] = (),
    ) -> None:
        """`aligned` and `describable` are what tensors may be taken for. `integers` are the dtypes,
        of READABLE, of the lengths of padded batches, or of what says where requests lie in pages:
        kernels read these as they are. There are none where each call converts the lengths."""
        self.problem = problem
        # Gradients of keys and of the values in them are formed apart.
        self._problems = {"forward": problem, "backward": replace(problem, latent=False)}
        self.device = device
        self.aligned = aligned
        self.describable = aligned and describable
        self._integers = integers
        self._on_gpu = device.type == "cuda"
        self._passes: dict[Direction, Pass] = {}
        self._lock = RLock()

    def load(self, direction: Direction) -> Pass:
        """Return a pass, whose kernels are chosen and loaded the first time."""
        with self._lock:
            if direction not in self._passes:
                load = self._for_cpu if runs_compiled(self.device) else self._for_gpu
                self._passes[direction] = load(direction)
            return self._passes[direction]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, changes: Changes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse), lse perhaps in pairs, as the backward takes it: see `public_lse`."""
        # Triton launches on the current device.
        if self._on_gpu and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self.forward(q, k, v, scale, changes)
        its = self._passes.get("forward") or self.load("forward")
        if its.library and (found := its.library.forward(q, k, v, scale)) is not None:
            return found
        launches = its.launches
        if its.padded and changes.kv_lengths is not None:
            lengths = changes.lengths(self.device, its.converts_integers)
            launches = {}
            for name, launch, reads in its.padded:
                launches[name] = partial(launch, t0=lengths) if reads else launch
        elif not its.is_plain:
            score = changes.score
            reads = {} if changes.dropout is None else changes.dropout.given
            if score is not None:
                reads |= score_tensors(score.captured, score.sink_logits)
            launches = self._completed(its, changes, reads, q, k)
        return its.run(launches, q, k, v, scale, panel_rows=its.panel_rows)

    def forward_paged(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        requests: Requests,
        tables: tuple[torch.Tensor, ...],
        reads: Mapping[str, Any],
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse) of requests over pages; `tables` are what the mask reads, `reads` what
        the score does, and `out` is written where it is given."""
        if self._on_gpu and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self.forward_paged(q, k, v, scale, requests, tables, reads, out)
        its = self._passes.get("forward") or self.load("forward")
        launches = its.launches if its.is_plain else its.reading(tables, reads)
        if its.converts_integers:
            requests = requests.narrow
        rows = its.panel_rows
        made = its.run(launches, q, k, v, scale, panel_rows=rows, requests=requests, out=out)
        return made[0], public_lse(made[1])

    def backward(
        self,
        saved: tuple[torch.Tensor, ...],
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        scale: float,
        changes: Changes,
        wanted: Wanted,
    ) -> Gradients:
        """Return the gradients; `saved` are q, k, v, out and lse."""
        if self._on_gpu and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self.backward(saved, dout, dlse, scale, changes, wanted)
        q, k, v, out, lse = saved
        its = self._passes.get("backward") or self.load("backward")
        if its.library and dlse is None:
            given = its.library.backward(saved, dout, scale, wanted)
            if given is not None:
                return given
        launches = its.launches
        captured: dict[int, torch.Tensor] = {}
        if not its.is_plain:
            score = self.problem.score
            # Dense, as kernels need them, whatever the strides of what is trained.
            sizes = {
                slot: changes.captured[slot].shape for slot in (score.trained if score else ())
            }
            gradients = {s: q.new_zeros(size, dtype=torch.float32) for s, size in sizes.items()}
            captured = {slot: gradients[slot] for slot in wanted.captured}
            reads = {} if changes.dropout is None else changes.dropout.given
            reads |= score_tensors(changes.captured, None, gradients)
            launches = self._completed(its, changes, reads, q, k)
        delta = passes.delta_of(launches, out, dout)
        if dlse is not None:  # d lse / d s = p, as if delta were smaller by dlse
            # lse of a row with nothing kept is -inf, whose gradient may be NaN, and p is 0.
            has_keys = public_lse(lse) > float("-inf")
            delta -= torch.where(has_keys, public_lse(dlse), 0.0)
        dq, dk, dv = its.run(
            launches,
            *(q, k, v, dout, lse, delta, scale),
            panel_rows=its.panel_rows,
            wants_dq=wanted.dq or bool(captured),
            wants_dkdv=wanted.dkdv,
        )
        sinks = None
        if wanted.sinks and changes.sinks is not None:
            sinks = passes.gradient_of_sinks(changes.sinks, lse, delta)
        return Gradients(dq, dk, dv, sinks, captured)

    def _completed(
        self,
        its: Pass,
        changes: Changes,
        reads: Mapping[str, Any],
        q: torch.Tensor,
        k: torch.Tensor,
    ) -> Mapping[Kernel, Launch]:
        """Return the launches of a pass, given what mask, score and dropout read."""
        tables = changes.tables(q, k, self.device, its.converts_integers)
        if not its.reads_lists:
            return its.reading(tables, reads)
        read = (changes.mask, Shape.of(q, k), self.device, reads, tables)
        return {name: one.given(*read) for name, one in its.kernels.items()}

    def _for_cpu(self, direction: Direction) -> Pass:
        from tilegen.cpu.choice import cpu_choice
        from tilegen.emit.render import render  # loads Jinja and SymPy

        problem = self._problems[direction]
        family, configs = cpu_choice(problem, direction)
        log.debug("%s of '%s' on the CPU: %s, %s", direction, problem, family.name, configs)
        kernels: dict[Kernel, BoundKernel] = {}
        for kernel, config in configs.items():
            rendered = render(problem, config, kernel, aligned=self.aligned)
            kernels[kernel] = bound_kernel(rendered, self.device)
        return self._pass(direction, kernels, panel_rows=1)

    def _for_gpu(self, direction: Direction) -> Pass:
        spec = _spec(self.device)
        rows = rows_for(self._problems[direction], spec, direction)
        if found := self._from_bundle(spec, direction):
            return self._pass(direction, found, panel_rows=rows, readable=(torch.int32,))
        found = self._compiled_here(spec, direction)
        library = self._library(spec, direction, tuple(found))
        return self._pass(direction, found, panel_rows=rows, library=library)

    def _pass(
        self,
        direction: Direction,
        kernels: Mapping[Kernel, BoundKernel],
        *,
        panel_rows: int,
        readable: tuple[torch.dtype, ...] = READABLE,
        library: Library | None = None,
    ) -> Pass:
        return Pass(
            kernels,
            {name: kernel.launch for name, kernel in kernels.items()},
            panel_rows,
            _run_of(kernels, direction, self._problems[direction]),
            all(kernel.reads_nothing for kernel in kernels.values()),
            any(kernel.reads_lists for kernel in kernels.values()),
            not self._integers or not set(self._integers) <= set(readable),
            library,
        )

    def _compiled_here(self, spec: GpuSpec, direction: Direction) -> dict[Kernel, BoundKernel]:
        problem = self._problems[direction]
        chosen = pipeline.choose(
            problem,
            spec,
            direction,
            aligned=self.aligned,
            describable=self.describable,
            may_tune=self._on_gpu,
            may_compile=self._on_gpu,
        )
        modules = pipeline.load(chosen, aligned=self.aligned)
        unit = stride_unit(problem, self.aligned)
        return {
            kernel: bound_module(module, problem, kernel, chosen[kernel].config, unit)
            for kernel, module in modules.items()
        }

    def _library(
        self, spec: GpuSpec, direction: Direction, kernels: tuple[Kernel, ...]
    ) -> Library | None:
        """Return the library that was measured to be faster than these kernels, if one was."""
        if not settings().libraries:
            return None
        records = Records(self._problems[direction], spec)
        if (record := library_used(records, direction, kernels)) is None:
            return None
        log.info("%s of '%s': %s", direction, records.problem, record.config)
        return Library(record.library, causal=isinstance(records.problem.mask, Causal))

    def _from_bundle(self, spec: GpuSpec, direction: Direction) -> dict[Kernel, BoundKernel] | None:
        """Return the kernels of a pass from the first bundle that has them."""
        for bundle in bundles.loaded:
            problem = self._problems[direction]
            if found := bundle.launches(problem, spec, direction, aligned=self.aligned):
                return found
        return None


def _run_of(
    kernels: Mapping[Kernel, BoundKernel], direction: Direction, problem: AttentionProblem
) -> Callable[..., Any]:
    """Return `run` of the family that kernels make up."""
    run = passes.family_of(kernels, direction).run
    return partial(run, pairs=True) if direction == "forward" and problem.pair_lse else run


@cache
def _spec(device: torch.device) -> GpuSpec:
    spec = detect(device.index) if device.type == "cuda" else gpu(ASSUMED)
    if spec is None:
        raise Unsupported(f"expected a GPU that PyTorch sees, got {device}")
    return spec
