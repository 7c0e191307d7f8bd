"""The workload catalogue: attention layers of real models, by name.

What a problem cannot say yet stands in `note`, so that no table claims more than was run.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilegen.kernels.spec import Direction
from tilegen.problem import AttentionProblem

TRAINED: tuple[Direction, ...] = ("forward", "backward")
SERVED: tuple[Direction, ...] = ("forward",)

SOFT_CAP = "the model also caps scores, 50 * tanh(s / 50), which is left out here"
SINKS = "the model also has one attention sink per head, which is left out here"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One attention layer at one length."""

    name: str
    problem: AttentionProblem
    source: str
    """Model or table that the shape comes from."""
    directions: tuple[Direction, ...] = TRAINED
    """Passes that the model needs: a layer that only serves has no backward."""
    note: str = ""
    """Difference of the problem from what the model computes; empty for none."""

    @property
    def tokens(self) -> int:
        """Query tokens of one call, all sequences of the batch together."""
        return self.problem.batch * self.problem.seqlen_q


_parse = AttentionProblem.parse


def _layer(
    name: str,
    problem: str,
    source: str,
    directions: tuple[Direction, ...] = TRAINED,
    note: str = "",
) -> Workload:
    return Workload(
        name=name, problem=_parse(problem), source=source, directions=directions, note=note
    )


CATALOGUE: tuple[Workload, ...] = (
    _layer("gpt2", "b16 hq12 q1024 d64 bf16 causal",
           "GPT-2 small: 12 heads of 64, context 1024"),
    _layer("bert-large", "b32 hq16 q512 d64 bf16 full",
           "BERT large: 16 heads of 64, length 512",
           note="without the padding mask: all sequences at full length"),
    _layer("llama3-8b-2k", "b4 hq32 hkv8 q2048 d128 bf16 causal",
           "Llama 3 8B: 32 query and 8 key-value heads of 128"),
    _layer("llama3-8b-8k", "b1 hq32 hkv8 q8192 d128 bf16 causal",
           "Llama 3 8B at its training length"),
    _layer("llama3-8b-32k", "b1 hq32 hkv8 q32768 d128 bf16 causal",
           "Llama 3.1 8B, long context"),
    _layer("llama3-70b-8k", "b2 hq64 hkv8 q8192 d128 bf16 causal",
           "Llama 3.1 70B; a row of NVIDIA's cudnn-frontend llama3.1 tables"),
    _layer("llama3-70b-tp8-prompt-2k", "b1 hq8 hkv1 q2048 d128 bf16 causal",
           "Llama 3 70B on one of eight tensor-parallel ranks, a whole prompt", directions=SERVED),
    _layer("mistral-7b-16k", "b1 hq32 hkv8 q16384 d128 bf16 window(4095,0)",
           "Mistral 7B v0.1: sliding window of 4096 tokens, itself included"),
    _layer("gemma2-9b-local-8k", "b1 hq16 hkv8 q8192 d256 bf16 window(4095,0)",
           "Gemma 2 9B, the layers with a window of 4096", note=SOFT_CAP),
    _layer("gemma2-9b-global-8k", "b1 hq16 hkv8 q8192 d256 bf16 causal",
           "Gemma 2 9B, the layers between those", note=SOFT_CAP),
    _layer("gpt-oss-window-8k", "b2 hq64 hkv8 q8192 d64 bf16 window(127,0)",
           "gpt-oss: 64 query and 8 key-value heads of 64, window of 128 in every other layer",
           note=SINKS),
    _layer("gpt-oss-global-8k", "b2 hq64 hkv8 q8192 d64 bf16 causal",
           "gpt-oss, the layers between those", note=SINKS),
    _layer("window-128-32k", "b2 hq128 q32768 d64 bf16 window(127,0)",
           "128 heads of 64, window of 128; a row of NVIDIA's cudnn-frontend gpt_oss tables"),
    _layer("qwen2.5-7b-8k", "b1 hq28 hkv4 q8192 d128 bf16 causal",
           "Qwen 2.5 7B: 28 query and 4 key-value heads, groups of 7"),
    _layer("qwen3.5-d256-8k", "b1 hq32 hkv2 q8192 d256 bf16 causal",
           "32 query and 2 key-value heads of 256; NVIDIA's cudnn-frontend qwen35 tables"),
    _layer("deepseek-v3-4k", "b1 hq128 q4096 d192/128 bf16 causal",
           "DeepSeek V3: 128 heads, keys of 192 and values of 128 after decompression"),
    _layer("deepseek-v3-absorbed-4k", "b1 hq128 hkv1 q4096 d576/512 bf16 causal latent",
           "DeepSeek V2 and V3 with the projections absorbed: 128 query heads on one latent of 512 "
           "and 64 rotary columns (arXiv 2405.04434, section 2.1)",
           directions=SERVED),
    _layer("palm-540b-2k", "b1 hq48 hkv1 q2048 d256 bf16 causal",
           "PaLM 540B: 48 query heads of 256 on one key-value head (arXiv 2204.02311, table 1)"),
    _layer("gemma-7b-8k", "b1 hq16 q8192 d256 bf16 causal",
           "Gemma 7B: 16 heads of 256 (arXiv 2403.08295, table 1)"),
    _layer("sd-vae-512", "b4 hq1 q4096 d512 bf16 full",
           "Stable Diffusion's autoencoder at 512 pixels: one head of 512 over 64 * 64 latents"),
    _layer("sdxl-vae-1024-fp32", "b1 hq1 q16384 d512 fp32 full",
           "SDXL's autoencoder at 1024 pixels, in fp32 since fp16 overflows: 128 * 128 latents",
           directions=SERVED),
    _layer("vit-l16-224", "b64 hq16 q197 d64 bf16 full",
           "ViT-L/16 at 224 pixels: 14 * 14 + 1 tokens"),
    _layer("vit-l14-336", "b32 hq16 q577 d64 bf16 full",
           "ViT-L/14 at 336 pixels: 24 * 24 + 1 tokens"),
    _layer("vit-b16-512", "b32 hq12 q1025 d64 bf16 full",
           "ViT-B/16 at 512 pixels: 32 * 32 + 1 tokens"),
    _layer("siglip-so400m", "b32 hq16 q729 d72 bf16 full",
           "SigLIP so400m/14 at 384 pixels: 27 * 27 tokens, heads of 72"),
    _layer("sdxl-cross-1024", "b1 hq10 q4096 kv77 d64 bf16 full",
           "SDXL's UNet at 1024 pixels: 10 heads of 64, 64 * 64 latents onto 77 tokens of text"),
    _layer("wan-14b-480p", "b1 hq40 q32760 d128 bf16 full",
           "Wan 2.1 14B, 81 frames of 832 * 480: 21 * 30 * 52 tokens, 40 heads of 128"),
    _layer("prefill-q256-kv128k", "b1 hq8 hkv1 q256 kv131072 d128 bf16 causal(bottom_right)",
           "Llama 3 70B on one of eight tensor-parallel ranks, last 256 tokens of 128k",
           directions=SERVED),
    _layer("prefill-q256-kv128k-64h", "b1 hq64 hkv8 q256 kv131072 d128 bf16 causal(bottom_right)",
           "Llama 3 70B on one GPU, last 256 tokens of 128k", directions=SERVED),
    _layer("suffix-q256-kv32k", "b1 hq8 hkv1 q256 kv32768 d128 bf16 causal(bottom_right)",
           "Llama 3 70B on one of eight tensor-parallel ranks, fine-tuned on the last 256 tokens "
           "behind a cached prefix of 32k"),
    _layer("packed-documents-32k", "b16 hq32 hkv8 q2048 d128 bf16 causal",
           "32k tokens of documents packed into one sequence, as in language-model pretraining",
           note="16 equal documents, one per batch entry; mask-documents has them in one sequence"),
)  # fmt: skip

HEAD = ("llama3-8b-8k", "gpt-oss-window-8k", "bert-large", "deepseek-v3-4k", "prefill-q256-kv128k")
"""Names of the workloads that are tuned and measured first: causal, windowed, full, unequal head
dims, few rows."""


MASKED: tuple[Workload, ...] = tuple(
    Workload(
        name=f"mask-{name}",
        problem=_parse(f"b1 hq16 hkv16 q{length} kv{length} d64 bf16 {mask}"),
        source="a family of masks at 16 heads of 64, as attention-gym measures them",
        note="typical tensors stand for those of a batch" if "@" in mask else "",
    )
    for name, length, mask in (
        ("full", 32768, "full"),
        ("causal", 32768, "causal"),
        ("window", 32768, "window(1023,0)"),
        ("prefix", 32768, "prefix_lm(4096)"),
        ("global", 32768, "global(128)|window(512,512)"),
        ("streaming", 32768, "causal&(kv_prefix(4)|window(1023,-1))"),
        ("documents", 32768, "causal&documents(@q:2048)"),
        ("interleaved", 32768, "causal&same_id(@q:2048,@k:2048)"),
        ("dilated", 32768, "dilated(4)&window(4095,0)"),
        ("blocks", 32768, "block_sparse(@:10,128)"),
        ("blocks-by-head", 32768, "block_sparse(@h:10,128)"),
        ("neighborhood", 32768, "neighborhood(128x256,13x13)"),
    )
)
"""Every form a mask can take, for comparing with FlexAttention; `benchmarks.run --masks`."""


LARGE_HEAD_DIMS = ("256", "320", "512", "576/512", "768", "1024")
LARGE_FP32_DIMS = ("256", "320", "512")
SHAPES: tuple[AttentionProblem, ...] = tuple(
    _parse(f"b4 hq16 hkv4 q4096 kv4096 d{dims} {dtype} {mask}")
    for mask in ("causal", "full")
    for dtype, widths in (("bf16", LARGE_HEAD_DIMS), ("fp32", LARGE_FP32_DIMS))
    for dims in widths
)
"""Problems of no model that the kernels which slice head dims exist for: these kernels must be
legal here too."""


def head() -> tuple[Workload, ...]:
    """Return the workloads named in HEAD, in that order."""
    by_name = {workload.name: workload for workload in CATALOGUE}
    return tuple(by_name[name] for name in HEAD)
