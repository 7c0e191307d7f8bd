"""Build a program that launches the kernels of a pass as a call does, without Python.

The launches are recorded: their machine code, grids, numbers, and the tensors that they read and
write. A C program then launches the same machine code on the same bytes, so that a simulator sees
the kernels alone.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.study.counting import ONE_PANEL, run_pass
from tilegen.check.reference import make_inputs
from tilegen.cpu.build import code_of, object_of, source_of
from tilegen.cpu.function import flat
from tilegen.cpu.objects import CompiledObject
from tilegen.cpu.target import Target
from tilegen.emit.identity import RenderedKernel
from tilegen.emit.launch import launch_of
from tilegen.emit.render import render
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.panels import Launch
from tilegen.launch.binding import BoundKernel
from tilegen.launch.launcher import always, launch_by
from tilegen.masks.form import Shape
from tilegen.problem import AttentionProblem

NEEDED = ("cc", "objcopy")
"""Programs that `build` starts."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A recorded launch."""

    kernel: Kernel
    grid: tuple[int, int, int]
    values: list[Any]
    owners: list[torch.Tensor | None]


class Recorder:
    """Replaces the function of an emitted module: compiles it, and notes launches instead of
    running them."""

    def __init__(self, rendered: RenderedKernel, target: Target, calls: list[Call]) -> None:
        source = source_of(rendered)
        self.arg_names = [name for name, _ in source.signature]
        self.made = object_of(source, code_of(rendered), target)
        assert not self.made.private, f"{rendered.kernel} adds to copies"
        self._kernel, self._calls = rendered.kernel, calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        gx, gy, gz = (*grid, 1, 1)[:3]

        def launch(*given: Any, **_options: Any) -> None:
            values, owners = flat(given)
            call = Call(kernel=self._kernel, grid=(gx, gy, gz), values=values, owners=owners)
            self._calls.append(call)

        return launch


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The recorded launches of a pass, with the machine code of each kernel."""

    calls: Sequence[Call]
    objects: Mapping[Kernel, CompiledObject]

    @property
    def state_bytes(self) -> int:
        """Bytes that a program of the largest kernel keeps: tiles and packed operands."""
        return max(made.scratch_bytes for made in self.objects.values())


def realized(problem: AttentionProblem) -> AttentionProblem:
    """Return the problem with a tensor for each stand-in of its mask, the same in all processes."""
    return replace(problem, mask=problem.mask.realized(problem.shape, "cpu"))


def record(problem: AttentionProblem, configs: Mapping[Kernel, TileConfig], target: Target) -> Pass:
    """Compile the kernels of a pass for a processor and record what a call launches."""
    problem, inputs = realized(problem), make_inputs(problem, device="cpu")
    calls: list[Call] = []
    recorders: dict[Kernel, Recorder] = {}
    launch: dict[Kernel, Launch] = {}
    for kernel, config in configs.items():
        rendered = render(problem, config, kernel)
        recorders[kernel] = Recorder(rendered, target, calls)
        given = problem.mask, Shape.of(inputs.q, inputs.k), inputs.q.device, {}
        launch[kernel] = _bound(rendered, recorders[kernel]).given(*given)
    run_pass(launch, inputs, panel_rows=ONE_PANEL)
    objects = {kernel: recorder.made for kernel, recorder in recorders.items()}
    return Pass(calls=calls, objects=objects)


def build(recorded: Pass, folder: Path, flushed_bytes: int) -> Path:
    """Build the program in a folder and return its path.

    `program TIMES [FILE]` loads the tensors, replaces what a cache of up to `flushed_bytes` / 4
    holds, launches the pass TIMES times, and writes all tensors to FILE.
    """
    objects: list[str] = []
    for kernel, made in recorded.objects.items():
        path = folder / f"{kernel}.o"
        path.write_bytes(made.binary)
        names = [f"--redefine-sym={name}={name}_{kernel}" for name in ("launch", "work", "program")]
        subprocess.run(["objcopy", *names, path], check=True)
        objects.append(str(path))
    buffers = _buffers(recorded.calls)
    with (folder / "tensors").open("wb") as file:
        for owner in buffers.values():
            file.write(bytes(owner.untyped_storage()))
    source, program = folder / "main.c", folder / "program"
    source.write_text(_source(recorded, buffers, flushed_bytes), encoding="utf-8")
    command = ["cc", "-O1", "-o", str(program), str(source), *objects, "-lm"]
    subprocess.run(command, check=True)
    return program


def missing() -> str:
    """Return the first program that `build` needs and this machine lacks, or an empty text."""
    return next((name for name in NEEDED if shutil.which(name) is None), "")


def place_of(recorded: Pass, argument: str) -> tuple[int, torch.Tensor]:
    """Return where the tensor of the last call's argument begins in the file of all tensors, in
    bytes, and the tensor."""
    call = recorded.calls[-1]
    owner = call.owners[recorded.objects[call.kernel].names.index(argument)]
    assert owner is not None
    first = 0
    for address, other in _buffers(recorded.calls).items():
        if address == owner.untyped_storage().data_ptr():
            return first + owner.data_ptr() - address, owner
        first += other.untyped_storage().nbytes()
    raise AssertionError(argument)


def _bound(rendered: RenderedKernel, recorder: Recorder) -> BoundKernel:
    start = always(lambda grid, arguments, _: recorder[(grid,)](*arguments))
    launch = launch_by(start, launch_of(rendered.source), torch.device("cpu"), rendered.function)
    return BoundKernel(launch, rendered.problem.mask, rendered.kernel, rendered.config)


def _buffers(calls: Sequence[Call]) -> dict[int, torch.Tensor]:
    """Return a tensor of every storage, by its address, in the order of first use."""
    owners = [owner for call in calls for owner in call.owners if owner is not None]
    return {owner.untyped_storage().data_ptr(): owner for owner in reversed(owners)}


def _source(recorded: Pass, buffers: Mapping[int, torch.Tensor], flushed_bytes: int) -> str:
    """Return the C source of the program."""
    numbers = {address: number for number, address in enumerate(buffers)}
    sizes = [owner.untyped_storage().nbytes() for owner in buffers.values()]
    scratch = (recorded.state_bytes + 4095) // 4096 * 4096 + 4096
    launches = "\n".join(_launch(call, recorded, numbers) for call in recorded.calls)
    declared = "\n".join(
        f"void launch_{kernel}(void *, int, int, int, int, void *, void *, int64_t, void *);"
        for kernel in recorded.objects
    )
    return f"""#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
{declared}
static const long sizes[] = {{{", ".join(map(str, sizes))}}};
enum {{ COUNT = {len(sizes)}, FLUSHED = {flushed_bytes} }};
static char *b[COUNT];
static int64_t single(float x) {{ int64_t word = 0; memcpy(&word, &x, 4); return word; }}
static char *room(long bytes) {{ return aligned_alloc(4096, (bytes + 4095) / 4096 * 4096); }}
int main(int count, char **given) {{
  FILE *file = fopen("tensors", "rb");
  for (int i = 0; i < COUNT; i++) {{
    b[i] = room(sizes[i]);
    if (!file || fread(b[i], 1, sizes[i], file) != (size_t)sizes[i]) return 1;
  }}
  char *scratch = room({scratch}), *others = room(FLUSHED);
  int times = atoi(given[1]);
  for (long i = 0; i < FLUSHED; i += 64) ((volatile char *)others)[i] = 1;
  for (int time = 0; time < times; time++) {{
{launches}
  }}
  if (count > 2) {{
    FILE *after = fopen(given[2], "wb");
    for (int i = 0; i < COUNT; i++) fwrite(b[i], 1, sizes[i], after);
    fclose(after);
  }}
  return 0;
}}
"""


def _launch(call: Call, recorded: Pass, numbers: Mapping[int, int]) -> str:
    """Return the C statement of a launch on one thread."""
    words: list[str] = []
    types = recorded.objects[call.kernel].arguments
    for value, owner, type_ in zip(call.values, call.owners, types, strict=True):
        if owner is not None:
            first = owner.untyped_storage().data_ptr()
            words.append(f"(int64_t)(b[{numbers[first]}] + {value - first})")
        elif type_ == "float":
            words.append(f"single({float(value)!r}f)")
        else:
            words.append(str(int(value)))
    gx, gy, gz = call.grid
    given = f"words, {gx}, {gy}, {gz}, 1, 0, scratch, 0, 0"
    return f"    {{ int64_t words[] = {{{', '.join(words)}}}; launch_{call.kernel}({given}); }}"
