"""Check rules of structure and of English that ruff and pyright do not know; print each fault.

- Modules do not need each other in a circle.
- Functions take tasks instead of a kernel, a problem and a device; stages do not name kernels.
- Undocumented names of PyTorch and Triton stand in one module each.
- Variables have nouns, docstrings name results, and prose fits its width.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tilegen.kernels.registry import KERNELS

Nodes = list[ast.AST]
ROOT = Path(__file__).parents[1]
FILES = {
    path.relative_to(ROOT).as_posix(): [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    for folder in (".ci", "benchmarks", "tests", "tilegen")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
"""Nodes of all Python files."""
PACKAGE = {
    name.removeprefix("tilegen/"): nodes
    for name, nodes in FILES.items()
    if name.startswith("tilegen/")
}

# --------------------------------------------------------------------------------------------------
# Structure

STAGES = ("model", "choose", "compiling", "emit", "explaining", "store", "tuning", "check")
NAMED_KERNELS = {
    ("model/rates.py", "fwd"),  # whose counts kernels take that nobody counted
    ("explaining/plot.py", "fwd"),  # theory: any task with the problem's values
    ("explaining/plot.py", "bwd_preprocess"),  # schedules of theory
    ("explaining/plot.py", "bwd_dkdv"),
    ("explaining/plot.py", "bwd_dq"),
    ("emit/render.py", "fwd"),  # the default of a function
}
LOOKS_KERNELS_UP = {
    "model/traffic.py",  # formulas of a kernel, whatever the problem
    "model/bounds.py",  # the same
    "choose/records.py",  # the task of a kernel by its name
}
NORMALISES = "choose/records.py"
"""The module in which the choice takes the normal form of a problem, once."""


def circles() -> Iterator[str]:
    """Yield the first circle of modules that need each other, in functions too."""
    modules = {_module(f"tilegen/{name}"): nodes for name, nodes in PACKAGE.items()}
    needs = {name: set(imported(nodes, modules.keys())) - {name} for name, nodes in modules.items()}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as circle:
        yield f"modules need each other: {' -> '.join(circle.args[1])}"


def imported(nodes: Nodes, modules: Set[str]) -> Iterator[str]:
    """Yield the modules that one imports, inside functions too."""
    for node in nodes:
        match node:
            case ast.ImportFrom(module=str() as module, names=parts):
                # `from folder import module` needs the module, and not the folder.
                inner = {f"{module}.{part.name}" for part in parts} & modules
                yield from inner or {module} & modules
            case ast.Import(names=parts):
                yield from {part.name for part in parts} & modules
            case _:
                pass


def loose_tasks() -> Iterator[str]:
    """Yield functions that take a kernel, a problem and a device, where a task is due."""
    for name, nodes in PACKAGE.items():
        if name.split("/")[0] in ("api.py", "cli", "task.py"):  # where names of users become tasks
            continue
        for node in nodes:
            if isinstance(node, ast.FunctionDef):
                given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                types = {ast.unparse(x.annotation).split(" |")[0] for x in given if x.annotation}
                if types >= {"Kernel", "AttentionProblem", "GpuSpec"}:
                    yield f"tilegen/{name}:{node.lineno}: {node.name} takes no task"


def kernels_by_name() -> Iterator[str]:
    """Yield places where a stage names a kernel, or looks one up, instead of reading its record,
    and the exceptions that no place needs."""
    unused, normalised = set(NAMED_KERNELS), 0
    for name, nodes in PACKAGE.items():
        folder = name.split("/")[0]
        for node in nodes:
            where = f"tilegen/{name}:{getattr(node, 'lineno', 0)}"
            match node:
                case ast.Constant(value=str() as word) | ast.Name(id=word):
                    if folder in STAGES and word.lower() in KERNELS:
                        unused.discard((name, word.lower()))
                        if (name, word.lower()) not in NAMED_KERNELS:
                            yield f"{where}: names the kernel {word}"
                    is_choice = folder in ("model", "choose")
                    if is_choice and word == "KERNELS" and name not in LOOKS_KERNELS_UP:
                        yield f"{where}: looks a kernel up"
                case ast.Attribute(attr="normal") if folder in ("model", "choose"):
                    normalised += name == NORMALISES
                    if name != NORMALISES or normalised > 1:
                        yield f"{where}: a task is of the normal form already"
                case _:
                    pass
    for name, word in sorted(unused):
        yield f"tilegen/{name}: no longer names the kernel {word}; take it out of NAMED_KERNELS"


TORCH = {
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C.DisableTorchFunction",
    "torch._C._disabled_torch_function_impl",
    "torch._C",  # and `_dynamo.guards._empty_strided_cpu`, `_empty_strided_cuda`
    "torch.autograd.function._SingleLevelFunction",
    "torch._C._dynamo",
    "torch.nn.attention.flex_attention._LARGE_SPARSE_BLOCK_SIZE",
    "torch._dynamo",
}
TRITON = {
    "triton.knobs",  # and `runtime.launch_enter_hook.calls`, `launch_exit_hook.calls`
    "triton._C.libtriton.ir",
    "triton.backends.compiler.GPUTarget",
    "triton.compiler.ASTSource",
    "triton.compiler.CompiledKernel",
    "triton.compiler.compiler.make_backend",
    "triton.experimental.gluon._runtime.GluonASTSource",
    "triton.runtime.driver",
    "triton.runtime.jit.JITFunction",
}
ATTRIBUTES = {"warmup", "packed_metadata", "get_current_stream"}
"""Undocumented attributes of Triton's functions, kernels and drivers. compiling/digests.py replaces
another, `launch_metadata`."""
UNDOCUMENTED = ("triton.runtime", "triton.compiler", "triton.backends", "triton.knobs")
READERS = {"private_torch.py": TORCH, "private_triton.py": TRITON | ATTRIBUTES}
"""The modules that read undocumented names, to be looked up in a new release of each package."""


def undocumented() -> Iterator[str]:
    """Yield undocumented names of PyTorch and Triton that are read elsewhere, or no longer."""
    for name in sorted({*PACKAGE, *READERS}):
        nodes = PACKAGE.get(name, [])
        names = {x for x in _names_of_packages(nodes) if _is_undocumented(x)}
        attributes = {x.attr for x in nodes if isinstance(x, ast.Attribute)} & ATTRIBUTES
        expected = READERS.get(name, set[str]())
        for fault in sorted((names | attributes) ^ expected):
            yield f"tilegen/{name}: {fault} is undocumented, and stands in private_*.py"


def _is_undocumented(name: str) -> bool:
    root, *parts = name.split(".")
    if root == "triton" and name.startswith(UNDOCUMENTED):
        return True
    private = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return root in ("torch", "triton") and private and not name.startswith("torch.ops.")


def _names_of_packages(nodes: Nodes) -> Iterator[str]:
    """Yield the names of other packages in a module, the longest of each expression."""
    inner: set[ast.AST] = set()
    for node in nodes:
        match node:
            case ast.ImportFrom(module=str(module)):
                yield from (f"{module}.{part.name}" for part in node.names)
            case ast.Import():
                yield from (part.name for part in node.names)
            case ast.Attribute() if node not in inner:
                yield _dotted(node)
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=value), *_]):
                yield f"{_dotted(owner)}.{value}"
            case _:
                pass
        if isinstance(node, ast.Attribute):
            inner.add(node.value)


def _dotted(node: ast.AST) -> str:
    """Return an expression such as torch._C.x as text; empty for others."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def _module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


# --------------------------------------------------------------------------------------------------
# English

WIDTH = 100
VAGUE_NAMES = {"one", "found", "its"}
VAGUE_PHRASE = re.compile(
    r"\b(?:in vain|made alike|hangs on|what is none|that is none|said of|is told|nobody says"
    r"|who asks|what it gives|is no number|what of|what lies)\b"
)
HIDDEN_RESULT = re.compile(r"(?:Return|Yield|Whether) what\b")
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("benchmarks/*.md"),
    *(ROOT / "benchmarks/results").glob("[hp]*/README.md"),  # the others hold tables alone
    *(
        page
        for folder in ("cache", "templates", "tests", "tilegen")
        for page in (ROOT / folder).rglob("*.md")
    ),
]
"""Pages with prose."""


def english() -> Iterator[str]:
    """Yield the variables, docstrings and phrases that do not name their subject."""
    for name, nodes in FILES.items():
        for line, docstring in _docstrings(nodes):
            if HIDDEN_RESULT.match(docstring):
                yield f"{name}:{line}: {docstring.split('.')[0]!r} hides its result; name the noun"
        for line, variable in _bound_names(nodes):
            if variable in VAGUE_NAMES:
                yield f"{name}:{line}: a variable called {variable!r}; call it by its noun"
        if name == ".ci/style.py":
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        prose = re.sub(r"\s*\n\s*(?:# |f?\")?", " ", text)  # phrases may go on in the next line
        for phrase in VAGUE_PHRASE.findall(prose):
            yield f"{name}: {phrase!r}; say it with a noun and a verb"


def _docstrings(nodes: Nodes) -> Iterator[tuple[int, str]]:
    """Yield the line and text of docstrings of modules, classes, functions and constants."""
    for node in nodes:
        body = getattr(node, "body", None)  # of a lambda it is an expression
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value


def _bound_names(nodes: Nodes) -> Iterator[tuple[int, str]]:
    """Yield the line and name of variables and parameters, without those of comprehensions and
    lambdas, and without fields of classes."""
    exempt: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.comprehension):
            exempt.update(id(name) for name in ast.walk(node.target))
        elif isinstance(node, ast.Lambda):
            exempt.update(id(name) for name in ast.walk(node.args))
        elif isinstance(node, ast.ClassDef):
            fields = [field.target for field in node.body if isinstance(field, ast.AnnAssign)]
            exempt.update(id(field) for field in fields)
    for node in nodes:
        if id(node) in exempt:
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def long_lines() -> Iterator[str]:
    """Yield the places of lines of prose beyond WIDTH; tables, code and lines that are a single
    link or figure may be longer."""
    for path in PAGES:
        name, is_code = path.relative_to(ROOT).as_posix(), False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if line.lstrip().startswith("```"):
                is_code = not is_code
            is_link = re.fullmatch(r"\s*(?:[-*] )?[(]?!?\[[^\]]*\]\([^)]*\)[).,]*", line)
            is_prose = not is_code and not is_link and not line.startswith(("|", "    "))
            if is_prose and len(line) > WIDTH:
                yield f"{name}:{number}: {len(line)} columns"


RULES = (circles, loose_tasks, kernels_by_name, undocumented, english, long_lines)

if __name__ == "__main__":
    faults = [fault for rule in RULES for fault in rule()]
    print(*faults, sep="\n", end="\n" if faults else "")
    sys.exit(bool(faults))
