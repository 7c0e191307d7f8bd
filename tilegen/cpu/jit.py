"""Compile LLVM IR to machine code and link it into this process, with llvmlite."""

from __future__ import annotations

import itertools
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

from tilegen.cpu.target import Target
from tilegen.errors import BuildFailed

if TYPE_CHECKING:
    from tilegen.cpu.lower import Lowered

_lock = Lock()
_number = itertools.count()
_WORD = {"i1": "i8"}
_CLEAR = """
define internal void @clear(ptr %first, i64 %bytes) #0 {
entry:
  %whole = and i64 %bytes, -64
  br label %lines
lines:
  %at = phi i64 [ 0, %entry ], [ %next, %line ]
  %more = icmp ult i64 %at, %whole
  br i1 %more, label %line, label %rest
line:
  %place = getelementptr i8, ptr %first, i64 %at
  store <16 x i32> zeroinitializer, ptr %place, align 4
  %next = add i64 %at, 64
  br label %lines
rest:
  %at_word = phi i64 [ %whole, %lines ], [ %next_word, %word ]
  %left = icmp ult i64 %at_word, %bytes
  br i1 %left, label %word, label %done
word:
  %word_place = getelementptr i8, ptr %first, i64 %at_word
  store i32 0, ptr %word_place, align 4
  %next_word = add i64 %at_word, 4
  br label %rest
done:
  ret void
}
""".splitlines()
"""Clears copies, whose sizes are multiples of 4 bytes. A shared object has no memset to call."""
_PASSES = ("sroa", "instruction_combine", "simplify_cfg", "new_gvn", "dead_code_elimination")
_FEWEST = ("sroa",)
"""The passes of level 0, which compiles in the least time."""


def object_of(lowered: Lowered, target: Target, symbol: str = "") -> bytes:
    """Compile a kernel to an object file. Raises BuildFailed if LLVM rejects the IR.

    Its functions are `work` and `launch`, or, with a `symbol`, the symbol and `symbol_launch`.
    """
    return bytes(_compiled(lowered, target, symbol, assembly=False))


def assembly_of(lowered: Lowered, target: Target) -> str:
    """Compile a kernel to assembly. Raises BuildFailed if LLVM rejects the IR."""
    return _compiled(lowered, target, assembly=True)


def _compiled(lowered: Lowered, target: Target, symbol: str = "", *, assembly: bool) -> Any:
    import llvmlite.binding as llvm

    _initialise()
    try:
        names = (symbol, f"{symbol}_launch") if symbol else ("work", "launch")
        module = llvm.parse_assembly(lowered.ir + driver(lowered, *names))
        module.verify()
    except RuntimeError as error:
        raise BuildFailed(f"{lowered.name}: LLVM refuses the IR: {error}") from error
    machine = llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu,
        features=target.features,
        opt=target.level,
        reloc="pic",
        codemodel="small",
    )
    # The IR is already vectorised and unrolled: these passes give the same speed as LLVM's O2,
    # which takes four times as long.
    manager = llvm.create_new_module_pass_manager()
    for name in _PASSES if target.level else _FEWEST:
        getattr(manager, f"add_{name}_pass")()
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    manager.run(module, llvm.create_pass_builder(machine, tuning))
    return machine.emit_assembly(module) if assembly else machine.emit_object(module)


class Linked:
    """Machine code linked into this process."""

    def __init__(self, binary: bytes) -> None:
        """Raise BuildFailed if a symbol is missing."""
        import llvmlite.binding as llvm

        _initialise()
        name = f"tilegen{next(_number)}"
        builder = llvm.JITLibraryBuilder().add_object_img(binary).add_current_process()
        builder.export_symbol("work")
        with _lock:
            try:
                self._library = builder.link(_linker(), name)
            except RuntimeError as error:
                raise BuildFailed(f"cannot link a compiled kernel: {error}") from error
            self.work: int = self._library["work"]
            """Address of the function that each thread of a grid runs; see `driver`."""


@cache
def _initialise() -> None:
    import llvmlite.binding as llvm

    with _lock:
        for name in ("initialize_native_target", "initialize_native_asmprinter"):
            getattr(llvm, name)()


def initialise_all() -> None:
    """Initialise LLVM for all processors, to compile for others than this machine's."""
    import llvmlite.binding as llvm

    _initialise()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


@cache
def _linker() -> Any:
    import llvmlite.binding as llvm

    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    # LLVM's other linker may place code and constants further apart than offsets of 32 bits reach.
    return llvm.create_lljit_compiler(machine, use_jit_link=True)


def driver(lowered: Lowered, work: str = "work", launch: str = "launch") -> str:
    """Return the IR of `launch`, which runs the programs of a grid on threads, and of `work`, which
    each thread runs.

    `launch(arguments, grid_x, grid_y, grid_z, threads, parallel, scratch, scratch_stride, extra)`:
    arguments are words of 8 bytes, and `parallel` is GOMP_parallel, not called for one thread. Each
    thread uses its part of `scratch`, and takes programs from a shared counter until none is left.
    If the kernel has private arguments, threads take chunks of programs: see `_in_chunks`.
    `work(shared)` reads words of 8 bytes: counters, which start at 0, and `fields`.
    """
    reads, passed = [], []
    for i, type_ in enumerate(lowered.arguments):
        held = _WORD.get(type_, type_)
        reads.append(f"  %p{i} = getelementptr i64, ptr %args, i64 {i}")
        reads.append(f"  %x{i} = load {held}, ptr %p{i}")
        if held != type_:
            reads.append(f"  %y{i} = trunc {held} %x{i} to {type_}")
        passed.append(f"{type_} %{'x' if held == type_ else 'y'}{i}")
    programs = _in_chunks(lowered, passed) if lowered.private else _by_one(passed)
    fields = [("args", "ptr"), ("scratch", "ptr"), ("stride", "i64"), ("extra", "ptr")]
    fields += [("gx", "i32"), ("gy", "i32"), ("gz", "i32")]
    loads, stores, given = [], [], {"stride": "i64 %scratch_stride"}
    for i, (name, type_) in enumerate(fields):
        place = f"%at_{name} = getelementptr i64, ptr %shared, i64 {i + 1}"
        loads += [f"  {place}", f"  %{name} = load {type_}, ptr %at_{name}"]
        value = given.get(name, f"{type_} %{name}")
        stores += [f"  {place}", f"  store {value}, ptr %at_{name}"]
    lines = [
        *(_CLEAR if lowered.private else ()),
        f"define void @{work}(ptr %shared) #0 {{",
        "entry:",
        *loads,
        # Two counters: threads that have started, and programs that were taken.
        "  %thread = atomicrmw add ptr %shared, i32 1 monotonic",
        "  %taken = getelementptr i32, ptr %shared, i64 1",
        "  %thread64 = zext i32 %thread to i64",
        "  %offset = mul i64 %thread64, %stride",
        "  %own = getelementptr i8, ptr %scratch, i64 %offset",
        *reads,
        "  %xy = mul i32 %gx, %gy",
        "  %all = mul i32 %xy, %gz",
        *programs,
        "done:",
        "  ret void",
        "}",
        f"define void @{launch}(ptr %args, i32 %gx, i32 %gy, i32 %gz, i32 %threads, ptr %parallel, "
        "ptr %scratch, i64 %scratch_stride, ptr %extra) #0 {",
        "entry:",
        "  %shared = alloca [64 x i8], align 64",
        "  store i64 0, ptr %shared",
        *stores,
        "  %alone = icmp sle i32 %threads, 1",
        "  br i1 %alone, label %one, label %many",
        "one:",
        f"  call void @{work}(ptr %shared)",
        "  ret void",
        "many:",
        f"  call void %parallel(ptr @{work}, ptr %shared, i32 %threads, i32 0)",
        "  ret void",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _by_one(passed: list[str]) -> list[str]:
    """Return the loop in which a thread takes programs one by one from the counter."""
    return [
        "  br label %head",
        "head:",
        "  %i = atomicrmw add ptr %taken, i32 1 monotonic",
        "  %more = icmp ult i32 %i, %all",
        "  br i1 %more, label %body, label %done",
        "body:",
        *_program(passed, "%extra"),
        "  br label %head",
    ]


def _in_chunks(lowered: Lowered, passed: list[str]) -> list[str]:
    """Return the loop in which a thread takes chunks of consecutive programs.

    Two words follow the arguments: the number of chunks, and the address of a table with a row for
    each chunk. A row has `extra`, and for each private argument the address to use instead and the
    bytes to clear there.
    """
    given = list(passed)
    words = 1 + 2 * len(lowered.private)
    reads = ["  %extra_here = load ptr, ptr %row"]
    for place, i in enumerate(lowered.private):
        reads += [
            f"  %at_own{i} = getelementptr i64, ptr %row, i64 {1 + 2 * place}",
            f"  %own{i} = load ptr, ptr %at_own{i}",
            f"  %at_size{i} = getelementptr i64, ptr %row, i64 {2 + 2 * place}",
            f"  %size{i} = load i64, ptr %at_size{i}",
            f"  call void @clear(ptr %own{i}, i64 %size{i})",
        ]
        given[i] = f"ptr %own{i}"
    count = len(lowered.arguments)
    return [
        f"  %at_chunks = getelementptr i64, ptr %args, i64 {count}",
        "  %chunks = load i64, ptr %at_chunks",
        f"  %at_table = getelementptr i64, ptr %args, i64 {count + 1}",
        "  %table = load ptr, ptr %at_table",
        "  %all64 = zext i32 %all to i64",
        "  br label %head",
        "head:",
        "  %chunk32 = atomicrmw add ptr %taken, i32 1 monotonic",
        "  %chunk = zext i32 %chunk32 to i64",
        "  %more = icmp ult i64 %chunk, %chunks",
        "  br i1 %more, label %begin, label %done",
        "begin:",
        "  %before = mul i64 %chunk, %all64",
        "  %first = udiv i64 %before, %chunks",
        "  %until = add i64 %before, %all64",
        "  %end = udiv i64 %until, %chunks",
        f"  %offset_of_row = mul i64 %chunk, {words}",
        "  %row = getelementptr i64, ptr %table, i64 %offset_of_row",
        *reads,
        "  br label %next",
        "next:",
        "  %i64 = phi i64 [ %first, %begin ], [ %after, %body ]",
        "  %inside = icmp ult i64 %i64, %end",
        "  br i1 %inside, label %body, label %head",
        "body:",
        "  %i = trunc i64 %i64 to i32",
        *_program(given, "%extra_here"),
        "  %after = add i64 %i64, 1",
        "  br label %next",
    ]


def _program(passed: list[str], extra: str) -> list[str]:
    """Return the call of program %i."""
    ids = "i32 %x, i32 %gx, i32 %y, i32 %gy, i32 %z, i32 %gz"
    return [
        "  %x = urem i32 %i, %gx",
        "  %yz = udiv i32 %i, %gx",
        "  %y = urem i32 %yz, %gy",
        "  %z = udiv i32 %yz, %gy",
        f"  call void @program({', '.join(passed)}, {ids}, ptr %own, ptr {extra})",
    ]
