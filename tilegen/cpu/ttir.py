"""Triton's front end: the TTIR of an emitted kernel, made without a GPU.

TTIR is Triton's first intermediate form: tiles and loops, before layouts, warps and shared memory.
The printed text is used rather than the bindings, since these give neither dense constants nor
the types of block arguments.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from tilegen.emit.identity import RenderedKernel
from tilegen.errors import BuildFailed

_ARCH = 80
"""sm_80 selects Triton's passes. It has no tensor descriptors, so Triton itself rewrites loads
through descriptors into loads by address."""


def ttir_of(rendered: RenderedKernel, function: Any) -> str:
    """Return the printed TTIR module of a `@triton.jit` function, with locations.

    Raises BuildFailed where Triton refuses the kernel.
    """
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    target = GPUTarget("cuda", _ARCH, 32)
    backend = make_backend(target)
    leading = takewhile(lambda one: one[1].startswith(("*", "tensordesc")), rendered.signature)
    pointers = [i for i, (_, type_) in enumerate(leading) if type_.startswith("*")]
    divisible = [["tt.divisibility", 16]] if rendered.aligned else []
    source = ASTSource(
        fn=function,
        signature=dict(rendered.signature),
        constexprs={},
        attrs={(i,): divisible for i in pointers},
    )
    # Warps and stages change nothing before TTIR; Triton only wants them set.
    options = backend.parse_options({"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True})
    try:
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        maps = backend.get_codegen_implementation(options), backend.get_module_map()
        module = source.make_ir(target, options, *maps, context)
        stages: dict[str, Any] = {}
        backend.add_stages(stages, options, source.language)
        return str(stages["ttir"](module, {}))
    except Exception as error:  # Triton raises many types, down to RuntimeError from its passes
        raise BuildFailed(f"{rendered.function}: no TTIR: {type(error).__name__}: {error}") from error
