"""What vLLM and sglang ask of an attention back end: names and parameters, read from their wheels.

Neither installs beside our tools, so their interfaces are recorded: names of methods and of their
parameters, of fields and of members, as the syntax of their files has them; nothing of theirs is
run. To read them again, from wheels in a folder:

    pip download --no-deps --dest DIR vllm==0.33.0 sglang==0.5.23
    python -m tests.support.engine_contracts DIR
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

RECORD = Path(__file__).with_name("engine_contracts.json")
READ: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {
        "vllm/config/vllm.py": ("get_current_vllm_config", "get_current_vllm_config_or_none"),
        "vllm/model_executor/layers/attention/mla_attention.py": (
            *("MLACommonBackend", "MLACommonMetadata", "MLACommonDecodeMetadata"),
            *("MLACommonMetadataBuilder", "MLACommonImpl", "QueryLenSupport"),
        ),
        "vllm/v1/attention/backend.py": (
            *("AttentionBackend", "AttentionMetadataBuilder", "AttentionImplBase", "AttentionImpl"),
            *("CommonAttentionMetadata", "AttentionCGSupport", "AttentionType"),
        ),
        "vllm/v1/attention/backends/mla/prefill/base.py": ("MLAPrefillBackend",),
        "vllm/v1/attention/backends/mla/prefill/registry.py": (
            *("MLAPrefillBackendEnum", "register_mla_prefill_backend"),
        ),
        "vllm/v1/attention/backends/registry.py": ("AttentionBackendEnum", "register_backend"),
    },
    "sglang": {
        "sglang/srt/arg_groups/choices.py": (
            *("ATTENTION_BACKEND_CHOICES", "add_attention_backend_choices"),
        ),
        "sglang/srt/layers/attention/attention_registry.py": ("register_attention_backend",),
        "sglang/srt/layers/attention/base_attn_backend.py": ("AttentionBackend",),
        "sglang/srt/layers/radix_attention.py": ("AttentionType", "RadixAttention"),
        "sglang/srt/mem_cache/memory_pool.py": (
            *("KVWriteLoc", "MHATokenToKVPool", "MLATokenToKVPool", "HybridLinearKVPool"),
            "ReqToTokenPool",
        ),
        "sglang/srt/mem_cache/swa_memory_pool.py": ("SWAKVPool",),
        "sglang/srt/model_executor/forward_batch_info.py": ("ForwardBatch", "ForwardMode"),
        "sglang/srt/model_executor/model_runner.py": ("ModelRunner",),
        "sglang/srt/runtime_context.py": ("get_parallel",),
        "sglang/srt/speculative/spec_info.py": ("SpecInput",),
    },
}
"""The files that are read, and the names that are recorded of each."""


def recorded(package: str) -> dict[str, Any]:
    """Return the recorded contract of a package: `version`, and `names`, descriptions by
    "module:name"."""
    return json.loads(RECORD.read_text(encoding="utf-8"))[package]


def methods(described: dict[str, Any]) -> dict[str, str]:
    """Return the recorded methods of a class, as `abstract static name(parameters)`, by name."""
    return {line.partition("(")[0].split()[-1]: line for line in described["methods"]}


def parameters(line: str) -> list[str]:
    """Return the parameters of a recorded method, with `=` behind those that have a default."""
    return [one for one in line.partition("(")[2].rstrip(")").split(", ") if one]


def written(function: Any) -> list[str]:
    """Return the parameters of a function of ours as the record has them."""
    given = inspect.signature(function).parameters.values()
    return [one.name + "=" * (one.default is not one.empty) for one in given]


def read_wheel(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the package of a wheel, and its contract."""
    package, version = path.name.split("-")[:2]
    names: dict[str, Any] = {}
    with ZipFile(path) as wheel:
        for file, wanted in READ[package].items():
            module = file.removesuffix(".py").replace("/", ".")
            out = {name: one for name, one in _top_level(wheel.read(file).decode())}
            names |= {f"{module}:{name}": _described(out[name]) for name in wanted}
    return package, {"version": version, "names": names}


def _top_level(source: str) -> list[tuple[str, Any]]:
    results: list[tuple[str, Any]] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            results += [(one.id, node) for one in node.targets if isinstance(one, ast.Name)]
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            results.append((node.name, node))
    return results


def _described(node: Any) -> Any:
    if isinstance(node, ast.FunctionDef):
        return _line(node)
    if isinstance(node, ast.Assign):
        return "a name"
    functions = [one for one in node.body if isinstance(one, ast.FunctionDef)]
    names = [
        target.id
        for one in node.body
        for target in (
            one.targets
            if isinstance(one, ast.Assign)
            else [one.target]
            if isinstance(one, ast.AnnAssign)
            else []
        )
        if isinstance(target, ast.Name)
    ]
    assigned = {
        one.attr
        for function in functions
        for one in ast.walk(function)
        if isinstance(one, ast.Attribute)
        and isinstance(one.ctx, ast.Store)
        and isinstance(one.value, ast.Name)
        and one.value.id == "self"
    }
    return {
        "bases": [ast.unparse(one) for one in node.bases],
        "names": names,
        "assigned": sorted(assigned),
        "methods": [_line(one) for one in functions],
    }


def _line(node: ast.FunctionDef) -> str:
    marks = {ast.unparse(one) for one in node.decorator_list}
    words = [
        *["abstract"] * ("abstractmethod" in marks),
        *["static"] * ("staticmethod" in marks),
        *["class"] * ("classmethod" in marks),
        *["property"] * ("property" in marks),
    ]
    given = ", ".join(_parameters(node.args))
    return f"{' '.join([*words, node.name])}({given})"


def _parameters(parameters: ast.arguments) -> list[str]:
    plain = [*parameters.posonlyargs, *parameters.args]
    required = len(plain) - len(parameters.defaults)
    results = [one.arg + "=" * (i >= required) for i, one in enumerate(plain)]
    if parameters.vararg:
        results.append(f"*{parameters.vararg.arg}")
    elif parameters.kwonlyargs:
        results.append("*")
    pairs = zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
    results += [one.arg + "=" * (default is not None) for one, default in pairs]
    return [*results, f"**{parameters.kwarg.arg}"] if parameters.kwarg else results


def main(folder: str) -> None:
    """Write the contracts of the wheels in a folder over the recorded ones."""
    wheels = [path for package in READ for path in Path(folder).glob(f"{package}-*.whl")]
    text = json.dumps(dict(map(read_wheel, wheels)), indent=1)
    RECORD.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
