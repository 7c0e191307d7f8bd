"""vLLM and sglang where neither is installed: modules with the classes that back ends derive from
or are handed, of the recorded names and parameters (engine_contracts.py), with as little behind
them as a batch needs."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import make_dataclass
from enum import Enum, auto
from functools import cache
from types import ModuleType, SimpleNamespace, new_class
from typing import Any, Generic, TypeVar

import pytest
import torch

from tests.support.engine_contracts import methods, parameters, recorded

T = TypeVar("T")


def install(monkeypatch: pytest.MonkeyPatch, package: str) -> dict[str, Any]:
    """Put the stand-in of a package where imports look, for a test; return what it has by name."""
    forget(monkeypatch, package)
    for name in [*sys.modules]:
        if name.split(".")[0] == package:
            monkeypatch.delitem(sys.modules, name)
    made = {"vllm": _vllm, "sglang": _sglang}[package]()
    for path, item in made.items():
        module, _, name = path.rpartition(":")
        parts = module.split(".")
        for i in range(1, len(parts) + 1):
            at = ".".join(parts[:i])
            if at not in sys.modules:
                monkeypatch.setitem(sys.modules, at, ModuleType(at))
                vars(sys.modules[at])["__path__"] = []
                if i > 1:
                    setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], sys.modules[at])
        setattr(sys.modules[module], name, item)
    return {path.rpartition(":")[2]: item for path, item in made.items()}


def forget(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Have our back end for a package imported anew in a test, and again after it."""
    import tilegen.integrations as ours

    for name in (package, f"{package}_backend", f"{package}_latent"):
        monkeypatch.delitem(sys.modules, f"tilegen.integrations.{name}", raising=False)
        monkeypatch.delattr(ours, name, raising=False)


def class_of(described: dict[str, Any], *, bases: tuple[Any, ...] = (), **bodies: Any) -> type:
    """Return a class with the recorded methods. Those in `bodies`, which must have the recorded
    parameters, are as given; `__init__` keeps what it is given, others return None, and abstract
    ones are abstract."""
    by_name: dict[str, Any] = {}
    for name, line in methods(described).items():
        words, given = line.partition("(")[0].split()[:-1], parameters(line)
        body = bodies.pop(name, None)
        if body is None:
            text = ", ".join(f"{one}None" if one.endswith("=") else one for one in given)
            scope: dict[str, Any] = {}
            does = "vars(self).update(locals())" if name == "__init__" else "pass"
            exec(f"def {name}({text}): {does}", scope)
            body = scope[name]
        else:
            code = body.__code__
            assert [one.rstrip("=*") for one in given] == [*code.co_varnames[: code.co_argcount]]
        body = abstractmethod(body) if "abstract" in words else body
        wrap: dict[str, Callable[..., Any]] = {
            "static": staticmethod,
            "class": classmethod,
            "property": property,
        }
        for word in words:
            body = wrap[word](body) if word in wrap else body
        by_name[name] = body
    assert set(bodies) <= set(described["names"]), "fields have the recorded names"
    return new_class(
        "StandIn", (*bases, ABC), exec_body=lambda space: space.update(by_name | bodies)
    )


def names_of(described: dict[str, Any]) -> type[Enum]:
    """Return an enumeration of the recorded members, each of which is its name in small letters, as
    vLLM's and sglang's types of attention are."""
    members = {name: name.lower() for name in described["names"]}
    return Enum("StandIn", members, type=str)


@cache
def _record(package: str) -> dict[str, Any]:
    return {name.partition(":")[2]: one for name, one in recorded(package)["names"].items()}


def _vllm() -> dict[str, Any]:
    contract = _record("vllm")
    backends, register_backend = _registry(contract["AttentionBackendEnum"])
    prefills, register_mla_prefill_backend = _registry(contract["MLAPrefillBackendEnum"])
    current: list[Any] = [None]

    @contextmanager
    def set_current_vllm_config(vllm_config: Any) -> Generator[None]:
        current.append(vllm_config)
        yield
        current.pop()

    def record(name: str, *, has_defaults: bool = True) -> type:
        defaults = {"causal": True}
        fields = [
            (one, Any, defaults.get(one)) if has_defaults else (one, Any)
            for one in contract[name]["names"]
        ]
        return make_dataclass(name, fields)

    levels = contract["AttentionCGSupport"]["names"]
    generic = (Generic[T],)
    backend = "vllm.v1.attention.backend"
    latent = "vllm.model_executor.layers.attention.mla_attention"
    prefill = "vllm.v1.attention.backends.mla.prefill"
    answers = class_of(contract["AttentionBackend"])
    builder = class_of(contract["AttentionMetadataBuilder"], bases=generic)
    metadata = record("MLACommonMetadata")

    def build(
        self: Any, common_prefix_len: Any, common_attn_metadata: Any, fast_build: Any = False
    ) -> Any:
        given, drafts = common_attn_metadata, self.vllm_config.speculative_config
        most = 1 + (drafts.num_speculative_tokens if drafts else 0)
        new = given.query_start_loc_cpu.diff().tolist()
        n = sum(one <= most for one in new) if given.causal else len(new)
        starts, host = (x[: n + 1] for x in (given.query_start_loc, given.query_start_loc_cpu))
        decode = self._build_decode(
            block_table_tensor=given.block_table_tensor[:n],
            seq_lens_device=given.seq_lens[:n],
            max_seq_len=given.max_seq_len,
            query_start_loc_cpu=host,
            query_start_loc_device=starts,
            num_decode_tokens=int(host[-1]),
            max_query_len=min(given.max_query_len, most),
            dcp_tot_seq_lens_device=None,
        )
        return metadata(num_decodes=n, causal=given.causal, decode=decode)

    return {
        "vllm.config:get_current_vllm_config": lambda: current[-1],
        "vllm.config:get_current_vllm_config_or_none": lambda: current[-1],
        "vllm.config:set_current_vllm_config": set_current_vllm_config,
        "vllm.envs:VLLM_BATCH_INVARIANT": False,
        f"{backend}:AttentionBackend": answers,
        f"{backend}:AttentionMetadataBuilder": builder,
        f"{backend}:AttentionImpl": class_of(contract["AttentionImpl"], bases=generic),
        f"{backend}:AttentionType": names_of(contract["AttentionType"]),
        f"{backend}:AttentionCGSupport": Enum("AttentionCGSupport", levels),
        f"{backend}:CommonAttentionMetadata": record("CommonAttentionMetadata"),
        f"{latent}:MLACommonBackend": class_of(
            contract["MLACommonBackend"],
            bases=(answers,),
            get_supported_head_sizes=lambda cls: [320, 512, 576],
            is_mla=lambda cls: True,
        ),
        f"{latent}:MLACommonMetadata": metadata,
        f"{latent}:MLACommonDecodeMetadata": record("MLACommonDecodeMetadata", has_defaults=False),
        f"{latent}:MLACommonMetadataBuilder": class_of(
            contract["MLACommonMetadataBuilder"],
            bases=(builder, *generic),
            build=build,
            build_for_cudagraph_capture=lambda self, common_attn_metadata: self.build(
                0, common_attn_metadata
            ),
        ),
        f"{latent}:MLACommonImpl": class_of(contract["MLACommonImpl"], bases=generic),
        f"{latent}:QueryLenSupport": Enum("QueryLenSupport", contract["QueryLenSupport"]["names"]),
        f"{prefill}.base:MLAPrefillBackend": class_of(
            contract["MLAPrefillBackend"],
            prepare_metadata=lambda self, prefill_metadata: setattr(
                self, "_prefill_metadata", prefill_metadata
            ),
        ),
        f"{prefill}.registry:MLAPrefillBackendEnum": prefills,
        f"{prefill}.registry:register_mla_prefill_backend": register_mla_prefill_backend,
        "vllm.v1.attention.backends.registry:AttentionBackendEnum": backends,
        "vllm.v1.attention.backends.registry:register_backend": register_backend,
    }


def _registry(described: dict[str, Any]) -> tuple[Any, Any]:
    """Return an enumeration of back ends, and a function that assigns classes to them."""
    overridden: dict[Any, str] = {}

    class Backends(Enum):
        FLASH_ATTN = "vllm.of_its_own.FlashAttention"
        CUSTOM = None

        def is_overridden(self) -> bool:
            return self in overridden

        def get_path(self) -> str:
            return overridden.get(self) or self.value

    assert {one.name for one in Backends} <= set(described["names"])
    assert {"is_overridden", "get_path"} <= set(methods(described))
    return Backends, overridden.__setitem__


def _sglang() -> dict[str, Any]:
    contract = _record("sglang")
    choices, registered = ["triton"], {}

    def register_attention_backend(name: str) -> Any:
        return lambda made: registered.setdefault(name, made)

    def for_batch(
        cls: Any, forward_batch: Any, *, swa_loc: Any = None, full_loc: Any = None
    ) -> Any:
        made = cls()
        made.loc, made.swa_loc = forward_batch.out_cache_loc, swa_loc
        return made

    assert parameters(methods(contract["KVWriteLoc"])["for_batch"]) == [
        *("cls", "forward_batch", "*", "swa_loc=", "full_loc=")
    ]
    # The members that batches of these tests have, with the questions that a back end asks.
    mode = Enum("ForwardMode", {name: auto() for name in contract["ForwardMode"]["names"]})
    prompts = {"EXTEND", "MIXED", "TARGET_VERIFY", "SPLIT_PREFILL", "DLLM_EXTEND"}
    asked = {
        "is_idle": {"IDLE"},
        "is_decode": {"DECODE"},
        "is_decode_or_idle": {"DECODE", "IDLE"},
        "is_extend": prompts,
        "is_target_verify": {"TARGET_VERIFY"},
        "is_dllm_extend": {"DLLM_EXTEND"},
    }
    assert set(asked) <= set(methods(contract["ForwardMode"]))
    for name, those in asked.items():
        setattr(mode, name, lambda self, those=frozenset(those): self.name in those)
    alone = SimpleNamespace(attn_cp_size=1, attn_dcp_size=1)
    layers, memory = "sglang.srt.layers", "sglang.srt.mem_cache"
    return {
        "sglang.srt.arg_groups.choices:ATTENTION_BACKEND_CHOICES": choices,
        "sglang.srt.arg_groups.choices:add_attention_backend_choices": choices.extend,
        f"{layers}.attention.attention_registry:register_attention_backend": (
            register_attention_backend
        ),
        f"{layers}.attention.attention_registry:ATTENTION_BACKENDS": registered,
        f"{layers}.attention.base_attn_backend:AttentionBackend": class_of(
            contract["AttentionBackend"]
        ),
        f"{layers}.radix_attention:AttentionType": names_of(contract["AttentionType"]),
        f"{memory}.memory_pool:KVWriteLoc": type(
            "KVWriteLoc", (), {"for_batch": classmethod(for_batch)}
        ),
        f"{memory}.swa_memory_pool:SWAKVPool": type("SWAKVPool", (), {}),
        "sglang.srt.model_executor.forward_batch_info:ForwardMode": mode,
        "sglang.srt.runtime_context:get_parallel": lambda: alone,
    }


def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing look at the elements of a tensor, as each look would wait for a GPU."""

    def refuse(self: torch.Tensor, *given: Any) -> Any:
        raise AssertionError("the host looked at a tensor's elements")

    for name in ("item", "tolist", "__bool__", "__int__", "__index__", "cpu", "numpy", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
