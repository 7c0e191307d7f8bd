"""Run Triton's front end: make the TTIR of an emitted kernel, without a GPU.

TTIR is Triton's first intermediate form: tiles and loops, before layouts, warps and shared memory.
It is used as printed text, since the bindings give neither dense constants nor the types of block
arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from tilegen.errors import BuildFailed
from tilegen.parsing import collection_paused

_ARCH = 80
"""sm_80 selects Triton's passes. It has no tensor descriptors, so Triton rewrites loads through
descriptors into loads by address."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A `@triton.jit` function with the types of its arguments."""

    name: str
    function: Callable[[], Any]
    """Returns the function. An emitted module is imported only if its kernel has to be compiled."""
    signature: Sequence[tuple[str, str]]
    """(argument, Triton type); `constexpr` for arguments that are constants."""
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])
    aligned: bool = False
    """True: addresses are multiples of 16 bytes."""
    aliases: bool = False
    """True: memory that is written through one argument may be read through another."""

    @property
    def file(self) -> str:
        """The file whose lines errors and checks report."""
        return self.function().fn.__code__.co_filename

    @property
    def arguments(self) -> list[tuple[str, str]]:
        """The arguments of the compiled function: all but constants."""
        return [argument for argument in self.signature if argument[1] != "constexpr"]


def ttir_of(source: Source) -> str:
    """Return the printed TTIR module of a function, with locations.

    Raises BuildFailed if Triton rejects the function.
    """
    from tilegen.private_triton import ASTSource, GPUTarget, ir, make_backend

    target = GPUTarget("cuda", _ARCH, 32)
    backend = make_backend(target)
    leading = takewhile(lambda pair: pair[1].startswith(("*", "tensordesc")), source.signature)
    pointers = [i for i, (_, type_) in enumerate(leading) if type_.startswith("*")]
    places = {name: i for i, (name, _) in enumerate(source.signature)}
    divisible = [["tt.divisibility", 16]] if source.aligned else []
    parsed = ASTSource(
        fn=source.function(),
        signature=dict(source.signature),
        constexprs={(places[name],): value for name, value in source.constants.items()},
        attrs={(i,): divisible for i in pointers},
    )
    # Warps and stages change nothing before TTIR, but Triton requires values.
    options = backend.parse_options({"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True})
    try:
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        maps = backend.get_codegen_implementation(options), backend.get_module_map()
        with collection_paused():
            module = parsed.make_ir(target, options, *maps, context)
        stages: dict[str, Any] = {}
        backend.add_stages(stages, options, parsed.language)
        return str(stages["ttir"](module, {}))
    except Exception as error:  # Triton raises many types, including RuntimeError from its passes
        raise BuildFailed(f"{source.name}: no TTIR: {type(error).__name__}: {error}") from error
