"""Undocumented names of PyTorch and Triton. Each package has one module that reads them. All are
listed here, to be looked up in a new release."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import tilegen
from tilegen.parsing import parse_module

PACKAGE = Path(tilegen.__file__).parent
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


def is_private(name: str) -> bool:
    root, *parts = name.split(".")
    if root == "triton" and name.startswith(UNDOCUMENTED):
        return True
    return not name.startswith("torch.ops.") and any(
        one.startswith("_") and not one.startswith("__") for one in parts
    )


def dotted(node: ast.AST) -> str:
    """Return an expression such as torch._C.x as text; empty for others."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yield the names of PyTorch and Triton in a module, the longest of each expression."""
    inner: set[ast.AST] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)):
                yield from (f"{module}.{one.name}" for one in node.names)
            case ast.Import():
                yield from (one.name for one in node.names)
            case ast.Attribute() if node not in inner:
                yield dotted(node)
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=value), *_]):
                yield f"{dotted(owner)}.{value}"
            case _:
                pass
        if isinstance(node, ast.Attribute):
            inner.add(node.value)


def test_undocumented_names_stand_in_one_module_each() -> None:
    private: dict[str, set[str]] = defaultdict(set)
    attributes: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        tree = parse_module(path.read_text(encoding="utf-8"))
        module = path.relative_to(PACKAGE).as_posix()
        names = {x for x in names_in(tree) if x.split(".")[0] in ("torch", "triton")}
        private[module] |= {name for name in names if is_private(name)}
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        attributes[module] |= used & ATTRIBUTES
    by_module = {module: names for module, names in private.items() if names}
    assert by_module == {"private_torch.py": TORCH, "private_triton.py": TRITON}
    assert {module for module, used in attributes.items() if used} == {"private_triton.py"}
    assert attributes["private_triton.py"] == ATTRIBUTES
