"""The forward for Hopper in Gluon: its text, and its binary.

The kernel belongs to no family of the compiler yet, so that no call takes it. The memory model
proves it, and machines without a GPU compile it.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from tilegen.emit.render import environment
from tilegen.errors import BuildFailed, Unsupported

TEMPLATE = Path(__file__).parent / "attention_fwd_hopper.py.jinja"
STAY = "{ .reg .pred p; setp.lt.f32 p, $1, 0fBF800000; @p nanosleep.u32 1; mov.f32 $0, $1; }"
"""Assembly that returns its operand: ptxas moves neither the assembly nor what it needs beyond a
wait."""
TWINS = {STAY: lambda x: x}
"""Functions that compute the assembly's results, for the memory model."""
_NEW_NAMES = (3, 8)
"""Version of Triton from which TMA's operations are called `async_load` and `async_store`."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True)
class HopperForward:
    """A forward for sm_90: the parameters of its text."""

    head_dim: Literal[64, 128] = 128
    """Width of q, k, v and out [elements]."""
    dtype: Literal["bf16", "fp16"] = "bf16"
    group_size: int = 1
    """Query heads that share one key-value head."""
    causal: bool = True
    block_n: int = 128
    """Keys of a step."""
    stages: int = 2
    """Tiles of keys, and of values, that shared memory holds."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("head_dim", (64, 128)),
            ("dtype", tuple(_DTYPES)),
            ("block_n", (64, 128)),
            ("stages", (2, 3, 4)),
        ):
            if (value := getattr(self, name)) not in allowed:
                raise Unsupported(f"{name} must be one of {allowed}, got {value!r}")

    def source(self, triton: str) -> str:
        """Return the text for a version of Triton, such as 3.7.1."""
        new = tuple(int(one) for one in triton.split(".")[:2]) >= _NEW_NAMES
        template = environment(TEMPLATE.parent).get_template(TEMPLATE.name)
        return (
            template.render(
                head_dim=self.head_dim,
                dtype=self.dtype,
                gluon_dtype=_DTYPES[self.dtype],
                group_size=self.group_size,
                causal=self.causal,
                block_n=self.block_n,
                stages=self.stages,
                triton=triton,
                tma_load="async_load" if new else "async_copy_global_to_shared",
                tma_store="async_store" if new else "async_copy_shared_to_global",
                ln_2=repr(math.log(2)),
                stay=STAY,
            ).strip()
            + "\n"
        )

    def compile(self) -> Any:
        """Compile for sm_90 by the installed Triton."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon._runtime import GluonASTSource

        module = _imported(self.source(triton.__version__))
        dtype = getattr(gl, _DTYPES[self.dtype])

        def tiles(rows: int) -> str:
            layout = gl.NVMMASharedLayout.get_default_for([1, rows, self.head_dim], dtype)
            return f"tensordesc<{self.dtype}[1, {rows}, {self.head_dim}],{layout!r}>"

        signature = {
            **{"q_desc": tiles(64), "k_desc": tiles(self.block_n), "v_desc": tiles(self.block_n)},
            **{"o_desc": tiles(64), "lse_ptr": "*fp32", "seqlen_q": "i32", "seqlen_kv": "i32"},
            "softmax_scale_log2": "fp32",
        }
        source = GluonASTSource(
            fn=module.attention_fwd_hopper,
            signature=signature,
            constexprs={},
            attrs={(4,): [["tt.divisibility", 16]]},
        )
        try:
            return triton.compile(
                source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}
            )
        except Exception as error:  # Triton raises many types
            raise BuildFailed(f"attention_fwd_hopper for sm_90: {error}") from error


def _imported(source: str) -> ModuleType:
    """Return the module of a text, from a file, which Triton reads again."""
    folder = Path(tempfile.mkdtemp(prefix="tilegen-gluon-"))
    path = folder / "attention_fwd_hopper.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
