"""Compilation of emitted text to a binary for a named architecture. It needs no GPU."""

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
from tilegen.compiling.triton_cache import written
from tilegen.cpu.processors import PROCESSORS, OnCpu
from tilegen.disk import log
from tilegen.emit.identity import RenderedKernel
from tilegen.emit.kernel_files import load
from tilegen.errors import BuildFailed, Unsupported
from tilegen.kernels.config import launched_warps, threads_of
from tilegen.kernels.descriptors import ARCHITECTURES
from tilegen.kernels.registry import KERNELS
from tilegen.model.resources import Resources
from tilegen.parsing import collection_paused

if TYPE_CHECKING:
    from tilegen.compiling.machine_code.reading import MachineCode
    from tilegen.model.resources import StepCode


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """A binary for one architecture, with the resources that the compiler reports."""

    rendered: RenderedKernel
    arch: str
    binary: bytes
    """The binary: a cubin, an hsaco for AMD, or a shared object for a CPU."""
    reported: Resources
    """Resources without `step_code`; `resources` includes it."""
    scratch_pointers: int
    """Number of pointers after the arguments of the signature; all of them may be null."""
    seconds: float
    assembly: str = ""
    """Assembly text of a binary for AMD; empty for NVIDIA, whose binaries are disassembled."""
    on_cpu: OnCpu | None = None
    """Facts about a shared object; None for a GPU."""

    @property
    def extension(self) -> str:
        """File name extension of the binary."""
        if self.on_cpu is not None:
            return "so"
        return "hsaco" if self.arch.startswith("gfx") else "cubin"

    @property
    def threads(self) -> int:
        """Threads of one program."""
        if self.on_cpu is not None:
            return 1
        return threads_of(self.arch, self.rendered.config.num_warps)

    @cached_property
    def code(self) -> MachineCode:
        """The kernel's machine code, disassembled at first use, which takes half a second."""
        from tilegen.compiling.machine_code.reading import disassembled, read  # imports networkx

        warps = self.rendered.config.num_warps
        if self.assembly:
            return read(self.assembly, warps, gcn=True)
        return read(disassembled(self.binary), warps)

    @cached_property
    def resources(self) -> Resources:
        """Resources with `step_code`, read from `code` at first use."""
        return replace(self.reported, step_code=self._step_code())

    def _step_code(self) -> StepCode | None:
        if self.arch.startswith("gfx"):
            return None
        from tilegen.model.footprint import executed

        rendered = self.rendered
        problem, config = rendered.problem.normal(), rendered.config
        spec = KERNELS[rendered.kernel]
        work = spec.step(problem, config)
        if not work.products:
            return None
        done = executed(work, problem.element_bytes, config.num_warps, self.arch)
        try:
            code = self.code.step(round(done), roles=spec.specialised)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            log.debug("machine code of %s could not be read: %s", rendered.function, error)
            return None
        if code is None:
            return None
        # A descriptor's instruction writes a whole tile, whose size is not in the machine code.
        loaded = work.loaded * problem.element_bytes if config.descriptors else 0
        return replace(code, kernel=spec.fitted_as, shared_bytes=code.shared_bytes + loaded)


def compile_for(rendered: RenderedKernel, arch: str, *, line_info: bool = True) -> CompiledKernel:
    """Compile a kernel for `arch`, such as `sm_90`, `gfx942` or `x86-64-v3`; needs no GPU.

    Without `line_info` the binary does not contain the path of the emitted file, so its bytes are
    the same everywhere. Raises BuildFailed or Unsupported.
    """
    if cpu.is_interpreting():
        raise Unsupported("cannot compile under TRITON_INTERPRET=1; unset it")
    if arch in PROCESSORS:
        return _shared_object(rendered, arch)
    import triton

    from tilegen.private_triton import ASTSource, gluon_source, in_gluon, knobs

    spec, specialised = KERNELS.get(rendered.kernel), rendered.specialised
    base = gluon_source() if specialised else ASTSource

    class Source(base):  # type: ignore[misc]
        """A function that Triton parses here, and in no other step of `triton.compile`."""

        def hash(self) -> str:
            with collection_paused():
                return super().hash()

        def make_ir(self, *arguments: Any) -> Any:
            with collection_paused():
                return super().make_ir(*arguments)

    if spec and spec.requires and arch not in spec.requires:
        raise Unsupported(f"{rendered.function} needs {' or '.join(spec.requires)}, not {arch}")
    if rendered.config.descriptors and arch not in ARCHITECTURES:
        raise Unsupported(f"{rendered.function}: {arch} has no tensor descriptors")
    target = _target(arch)
    function = getattr(load(rendered), rendered.function)
    # Specialise pointers as the launcher does, so that it finds this binary in Triton's cache.
    divisible = [["tt.divisibility", 16]] if rendered.aligned else []
    # Pointers and descriptors come first. Tensors of a mask come last, and are not specialised.
    leading = takewhile(
        lambda argument: argument[1].startswith(("*", "tensordesc")), rendered.signature
    )
    pointers = [i for i, (_, type_) in enumerate(leading) if type_.startswith("*")]
    source = Source(
        fn=function,
        signature={
            name: in_gluon(type_) if specialised else type_ for name, type_ in rendered.signature
        },
        constexprs={},
        attrs={(i,): divisible for i in pointers},
    )
    # The options of `launch`. Fusion is explicit, because Triton 3.10 changes its default.
    options = {
        "num_warps": launched_warps(rendered.config, specialised=specialised),
        "num_stages": rendered.config.num_stages,
        "enable_fp_fusion": True,
    }
    started = time.perf_counter()
    try:
        with knobs.compilation.scope():
            if not line_info:
                knobs.compilation.disable_line_info = True
            compiled = written(lambda: triton.compile(source, target=target, options=options))
    except Unsupported:
        raise
    except Exception as error:  # Triton raises many types, down to RuntimeError from its passes
        raise BuildFailed(f"{rendered.function} for {arch}: {_one_line(error)}") from error
    seconds = time.perf_counter() - started
    log.info("compiled %s for %s in %.2f s", rendered.function, arch, seconds)
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


def _shared_object(rendered: RenderedKernel, arch: str) -> CompiledKernel:
    """Compile a kernel for a processor; of the resources of a GPU it uses none."""
    from tilegen.cpu.shared_objects import compile_for_processor

    started = time.perf_counter()
    binary, facts = compile_for_processor(rendered, arch)
    return CompiledKernel(
        rendered=rendered,
        arch=arch,
        binary=binary,
        reported=Resources(registers=0, spill_bytes=0, shared_bytes=0),
        scratch_pointers=0,
        seconds=time.perf_counter() - started,
        on_cpu=facts,
    )


def _target(arch: str) -> Any:
    from tilegen.private_triton import GPUTarget

    if match := re.fullmatch(r"sm_(\d{2,3})", arch):
        return GPUTarget("cuda", int(match[1]), 32)
    if re.fullmatch(r"gfx9[0-9a-f]{2}", arch):
        return GPUTarget("hip", arch, 64)
    raise Unsupported(f"arch must look like sm_90 or gfx942, got {arch!r}")


def binary_of(compiled: Any, arch: str) -> tuple[bytes, Resources]:
    """Return the binary of Triton's compiled kernel, and its registers, spills and shared memory.
    Raises BuildFailed if these cannot be read."""
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
    """Count the parameters of a binary, its scratch pointers included. Raises BuildFailed if the
    kernel uses scratch memory."""
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
    """Count the parameters of an argument. A descriptor is followed by its sizes and strides."""
    return 9 if argument[1].startswith("tensordesc") else 1


def _one_line(error: BaseException) -> str:
    # Triton wraps an error inside a helper in an error at the helper's call.
    while isinstance(error.__cause__, type(error)):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    return f"{type(error).__name__}: {lines[-1][:400] if lines else 'no message'}"
