"""Peak of multiplications and additions in fp32, measured: independent FMAs on registers."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from tilegen.cpu.target import host

SUMS = 12
"""Accumulators, more than the latency of an FMA times those that start in a cycle."""
STEPS = 2_000_000
ROUNDS = 20


def peak_gflops(threads: int) -> float:
    """Return fp32 operations of some threads together [1e9/s]: the best of several rounds."""
    spin, lanes = _spin(), host().lanes
    out = [(ctypes.c_float * (SUMS * lanes))() for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(ROUNDS):
            start = time.perf_counter()
            list(pool.map(lambda one: spin(ctypes.addressof(one), STEPS), out))
            taken = time.perf_counter() - start
            best = max(best, 2.0 * SUMS * lanes * STEPS * threads / taken / 1e9)
    return best


@cache
def _spin():  # noqa: ANN202
    """Return a function that runs FMAs: `spin(address, steps)`."""
    import llvmlite.binding as llvm

    target, numbers = host(), range(SUMS)
    vector, width = f"<{target.lanes} x float>", 32 * target.lanes
    multiply = f"@llvm.fmuladd.v{target.lanes}f32"
    sums = [f"  %s{n} = phi {vector} [ %x, %entry ], [ %t{n}, %body ]" for n in numbers]
    steps = [
        f"  %t{n} = call {vector} {multiply}({vector} %s{n}, {vector} %x, {vector} %s{n})"
        for n in numbers
    ]
    stores = [
        f"  %p{n} = getelementptr {vector}, ptr %out, i64 {n}\n"
        f"  store {vector} %t{n}, ptr %p{n}, align 4"
        for n in numbers
    ]
    lines = "\n".join
    text = f"""
declare {vector} {multiply}({vector}, {vector}, {vector})
define void @launch(ptr %out, i64 %steps) #0 {{
entry:
  %x = load {vector}, ptr %out, align 4
  br label %body
body:
  %i = phi i64 [ 0, %entry ], [ %next, %body ]
{lines(sums + steps)}
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, %steps
  br i1 %more, label %body, label %done
done:
{lines(stores)}
  ret void
}}
attributes #0 = {{ "target-cpu"="{target.cpu}" "target-features"="{target.features}"
  "prefer-vector-width"="{width}" "min-legal-vector-width"="{width}" }}
"""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=target.cpu, features=target.features, opt=2, jit=True
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), machine)
    engine.finalize_object()
    spin = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(
        engine.get_function_address("launch")
    )
    spin.engine = engine  # type: ignore[attr-defined]  # must live as long as its code
    return spin
