"""From emitted text to a binary for a named architecture, on a machine with or without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from tilegen import cpu
from tilegen.compiling.tools import nvidia_tool
from tilegen.disk import log
from tilegen.emit.identity import RenderedKernel
from tilegen.emit.kernel_files import load
from tilegen.errors import BuildFailed, Unsupported
from tilegen.kernels.config import threads_of
from tilegen.kernels.descriptors import ARCHITECTURES
from tilegen.model.resources import Resources

if TYPE_CHECKING:
    from tilegen.compiling.machine_code.reading import MachineCode
    from tilegen.model.resources import StepCode


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """A binary for one architecture, with the resources that the compiler reports."""

    rendered: RenderedKernel
    arch: str
    binary: bytes
    """The binary itself: a cubin, or for AMD an hsaco."""
    reported: Resources
    """Resources without `step_code`, which `resources` has too."""
    scratch_pointers: int
    """Pointers that the binary takes after the arguments of its signature; all may be null."""
    seconds: float
    assembly: str = ""
    """Text that a binary for AMD was assembled from; empty for binaries that are disassembled."""

    @property
    def extension(self) -> str:
        """File name extension of the binary."""
        return "hsaco" if self.arch.startswith("gfx") else "cubin"

    @property
    def threads(self) -> int:
        """Threads of one program."""
        return threads_of(self.arch, self.rendered.config.num_warps)

    @cached_property
    def code(self) -> MachineCode:
        """The kernel's machine code, disassembled when first asked for, which takes half a
        second."""
        from tilegen.compiling.machine_code.reading import disassembled, read  # loads networkx

        warps = self.rendered.config.num_warps
        if self.assembly:
            return read(self.assembly, warps, gcn=True)
        return read(disassembled(self.binary), warps)

    @cached_property
    def resources(self) -> Resources:
        """Resources with `step_code`, which takes half a second to read."""
        return replace(self.reported, step_code=self._step_code())

    def _step_code(self) -> StepCode | None:
        if self.arch.startswith("gfx"):
            return None
        from tilegen.kernels.registry import KERNELS
        from tilegen.model.footprint import executed

        rendered = self.rendered
        problem, config = rendered.problem.normal(), rendered.config
        spec = KERNELS[rendered.kernel]
        work = spec.loop.step(problem, config)
        if not work.products:
            return None
        done = executed(work, problem.element_bytes, config.num_warps, self.arch)
        try:
            code = self.code.step(round(done))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            log.debug("machine code of %s could not be read: %s", rendered.function, error)
            return None
        if code is None:
            return None
        # One instruction of a descriptor writes a whole tile, of a size that it does not say.
        loaded = work.loaded * problem.element_bytes if config.descriptors else 0
        return replace(code, kernel=spec.fitted_as, shared_bytes=code.shared_bytes + loaded)


def compile_for(rendered: RenderedKernel, arch: str, *, line_info: bool = True) -> CompiledKernel:
    """Return the binary for `arch` (`sm_90`, `gfx942`); needs no GPU. Raises BuildFailed or
    Unsupported.

    Without `line_info` the binary does not name the emitted file, so it is the same everywhere.
    """
    if cpu.is_interpreting():
        raise Unsupported("expected a process without TRITON_INTERPRET=1 to compile in; unset it")
    import triton
    from triton import knobs
    from triton.compiler import ASTSource

    if rendered.config.descriptors and arch not in ARCHITECTURES:
        raise Unsupported(f"{rendered.function}: {arch} loads nothing through tensor descriptors")
    target = _target(arch)
    function = getattr(load(rendered), rendered.function)
    # Pointers are specialised as the launcher does it, so that what is compiled here is found in
    # Triton's cache.
    divisible = [["tt.divisibility", 16]] if rendered.aligned else []
    # Pointers come first, among descriptors; what a mask reads comes last and is not specialised.
    leading = takewhile(lambda one: one[1].startswith(("*", "tensordesc")), rendered.signature)
    pointers = [i for i, (_, type_) in enumerate(leading) if type_.startswith("*")]
    source = ASTSource(
        fn=function,
        signature=dict(rendered.signature),
        constexprs={},
        attrs={(i,): divisible for i in pointers},
    )
    # Options are those of `launch`; fusion is spelt out since Triton 3.10 changes its default.
    options = {
        "num_warps": rendered.config.num_warps,
        "num_stages": rendered.config.num_stages,
        "enable_fp_fusion": True,
    }
    started = time.perf_counter()
    try:
        with knobs.compilation.scope():
            if not line_info:
                knobs.compilation.disable_line_info = True
            compiled = triton.compile(source, target=target, options=options)
    except Exception as error:  # Triton raises many types, down to RuntimeError from its passes
        raise BuildFailed(f"{rendered.function} for {arch}: {_one_line(error)}") from error
    seconds = time.perf_counter() - started
    binary, reported = binary_of(compiled, arch)
    parameters = sum(map(_parameters, rendered.signature))
    return CompiledKernel(
        rendered=rendered,
        arch=arch,
        binary=binary,
        reported=reported,
        scratch_pointers=_num_parameters(compiled, arch) - parameters,
        seconds=seconds,
        assembly=compiled.asm["amdgcn"] if arch.startswith("gfx") else "",
    )


def _target(arch: str) -> Any:
    from triton.backends.compiler import GPUTarget

    if match := re.fullmatch(r"sm_(\d{2,3})", arch):
        return GPUTarget("cuda", int(match[1]), 32)
    if re.fullmatch(r"gfx9[0-9a-f]{2}", arch):
        return GPUTarget("hip", arch, 64)
    raise Unsupported(f"arch must look like sm_90 or gfx942, got {arch!r}")


def binary_of(compiled: Any, arch: str) -> tuple[bytes, Resources]:
    """Return the binary that Triton compiled, and the resources that it names."""
    shared_bytes = int(compiled.metadata.shared)
    if arch.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        registers = int(re.findall(r"\.vgpr_count:\s+(\d+)", text)[-1])
        spilled = 4 * int(re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)[-1])
        used = Resources(registers=registers, spill_bytes=spilled, shared_bytes=shared_bytes)
        return bytes(compiled.asm["hsaco"]), used
    binary = bytes(compiled.asm["cubin"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [nvidia_tool("cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        if not match:
            raise BuildFailed(
                f"expected REG and STACK from cuobjdump -res-usage, got {usage[:200]!r}"
            )
    return binary, Resources(
        registers=int(match[1]), spill_bytes=int(match[2]), shared_bytes=shared_bytes
    )


def _num_parameters(compiled: Any, arch: str) -> int:
    """Return how many parameters the binary takes, its scratch pointers included."""
    metadata = compiled.metadata
    for name in ("global_scratch_size", "profile_scratch_size"):
        if getattr(metadata, name, 0):
            raise BuildFailed(f"expected a kernel without scratch memory, {name} is not 0")
    if arch.startswith("gfx"):
        return len(re.findall(r"\.value_kind:\s+(?!hidden)", compiled.asm["amdgcn"]))
    entry = re.search(r"\.entry\s+\w+\((.*?)\)", compiled.asm["ptx"], re.DOTALL)
    assert entry
    return entry[1].count(".param")


def _parameters(argument: tuple[str, str]) -> int:
    """Return the parameters of an argument; a descriptor is followed by its sizes and strides."""
    return 9 if argument[1].startswith("tensordesc") else 1


def _one_line(error: BaseException) -> str:
    # Triton raises an error at the call of a helper, from the error inside of the helper.
    while isinstance(error.__cause__, type(error)):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    return f"{type(error).__name__}: {lines[-1][:400] if lines else 'no message'}"
