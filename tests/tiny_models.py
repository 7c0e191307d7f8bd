"""Models of transformers with random weights, small enough for tests: one layer or two of each kind
of attention that its models have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

VOCABULARY = 31
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 4}


@dataclass(frozen=True)
class TinyModel:
    """How a model is made: its class, its configuration, and options of both."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, attention: str, dtype: torch.dtype = torch.float32) -> Any:
        """Return the model with the same random weights for each implementation of attention."""
        import transformers

        config = getattr(transformers, f"{self.name.split(':')[0]}Config")(**self.config)
        torch.manual_seed(0)
        kind = self.name.split(":")[1]
        make = getattr(transformers, kind)._from_config
        model = make(config, attn_implementation=attention, **self.options)
        with torch.no_grad():
            for parameter in model.parameters():  # so that weights of attention are not all alike
                parameter.copy_(torch.randn(parameter.shape) * (0.3 if parameter.ndim > 1 else 0.5))
        return model.to(dtype).eval()


def _layers(*kinds: str) -> dict[str, Any]:
    return {"layer_types": list(kinds)}


GEMMA4 = SMALL | WINDOW | {
    "head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}  # fmt: skip


DECODERS = {
    "llama": TinyModel("Llama:LlamaForCausalLM", SMALL),
    "mistral": TinyModel("Mistral:MistralForCausalLM", SMALL | WINDOW),
    "qwen2": TinyModel("Qwen2:Qwen2ForCausalLM", SMALL),
    "qwen3": TinyModel("Qwen3:Qwen3ForCausalLM", SMALL | {"head_dim": 16}),
    "gemma2": TinyModel(
        "Gemma2:Gemma2ForCausalLM",
        SMALL | WINDOW | {"head_dim": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    ),
    "gemma3": TinyModel(
        "Gemma3Text:Gemma3ForCausalLM",
        SMALL | WINDOW | {"head_dim": 8, "query_pre_attn_scalar": 8}
        | _layers("sliding_attention", "full_attention"),
    ),
    "gemma4": TinyModel(
        "Gemma4Text:Gemma4ForCausalLM",
        GEMMA4 | {"num_kv_shared_layers": 0} | _layers("sliding_attention", "full_attention"),
    ),
    "gemma4_shared": TinyModel(  # the last two layers read keys of the first two
        "Gemma4Text:Gemma4ForCausalLM",
        GEMMA4 | {"num_kv_shared_layers": 2, "num_hidden_layers": 4}
        | _layers(*["sliding_attention", "full_attention"] * 2),
    ),
    "gpt_oss": TinyModel(
        "GptOss:GptOssForCausalLM",
        SMALL | WINDOW | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
        | _layers("sliding_attention", "full_attention"),
        {"experts_implementation": "batched_mm"},
    ),
    "llama4": TinyModel(
        "Llama4Text:Llama4ForCausalLM",
        SMALL | {"head_dim": 8, "attention_chunk_size": 4, "num_local_experts": 1,
                 "intermediate_size_mlp": 24, "num_experts_per_tok": 1}
        | _layers("chunked_attention", "full_attention"),
    ),
    "deepseek_v3": TinyModel(
        "DeepseekV3:DeepseekV3ForCausalLM",
        SMALL | {"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "v_head_dim": 8,
                 "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "first_k_dense_replace": 2},
    ),
    "gpt2": TinyModel(
        "GPT2:GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
         "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 1,
         "eos_token_id": 2, "pad_token_id": 0},
    ),
}  # fmt: skip
"""Models that continue a text, by name."""

OTHERS = {
    "bert": TinyModel(
        "Bert:BertForMaskedLM",
        SMALL | {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
    ),
    "modernbert": TinyModel(
        "ModernBert:ModernBertForMaskedLM",
        SMALL | {"local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 1,
                 "sep_token_id": 2},
    ),
    "vit": TinyModel(
        "ViT:ViTModel",
        SMALL | {"image_size": 12, "patch_size": 4, "attention_probs_dropout_prob": 0.0,
                 "hidden_dropout_prob": 0.0},
    ),
    "t5": TinyModel(
        "T5:T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 24, "num_layers": 2,
         "num_heads": 4, "relative_attention_num_buckets": 8, "dropout_rate": 0.0,
         "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2},
    ),
    "whisper": TinyModel(
        "Whisper:WhisperForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24,
         "decoder_ffn_dim": 24, "num_mel_bins": 8, "max_source_positions": 10,
         "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "decoder_start_token_id": 3},
    ),
}  # fmt: skip
"""Encoders, and models of encoder and decoder, by name."""

COMPILED = ("llama", "qwen3", "mistral", "gemma2", "gpt_oss")
"""Five models of different masks and scores, for whoever compiles models."""


def inputs(name: str, batch: int = 2, tokens: int = 9) -> dict[str, torch.Tensor]:
    """Return the inputs of a model, without padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (batch, tokens), generator=generator)
    make: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
        "vit": lambda: {"pixel_values": torch.randn(batch, 3, 12, 12, generator=generator)},
        "t5": lambda: {"input_ids": ids, "decoder_input_ids": ids[:, :6]},
        "whisper": lambda: {
            "input_features": torch.randn(batch, 8, 20, generator=generator),
            "decoder_input_ids": ids[:, :6],
        },
    }
    return make.get(name, lambda: {"input_ids": ids})()
