"""Models with random weights: a Llama-shaped decoder that generates over a paged cache, and small
models of transformers, one layer or two of each kind of attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

import tilegen

VOCABULARY, WIDTH, HEADS, HEADS_KV, DIM, LAYERS = 53, 32, 4, 2, 16, 2
PAGE = 16
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of a layer: (layer, q, k, v), each (tokens, heads, dim), gives (tokens, heads, dim)."""


@dataclass
class Decoder:
    """Random weights; `logits` are those of each token."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        sizes = {"embed": (VOCABULARY, WIDTH), "q": (WIDTH, HEADS * DIM), "o": (HEADS * DIM, WIDTH)}
        sizes |= {name: (WIDTH, HEADS_KV * DIM) for name in "kv"}
        sizes |= {"up": (WIDTH, 48), "gate": (WIDTH, 48), "down": (48, WIDTH)}
        for layer in range(LAYERS):
            for name, size in sizes.items():
                random = torch.randn(size, generator=generator)
                self.weights[f"{name}{layer}"] = random * (1.0 if name in ("embed", "o") else 0.4)

    def logits(self, tokens: torch.Tensor, places: torch.Tensor, attend: Attend) -> torch.Tensor:
        w = self.weights
        x = w["embed0"][tokens]
        for layer in range(LAYERS):
            h = rms_norm(x, (WIDTH,))
            q, k, v = ((h @ w[f"{one}{layer}"]).unflatten(-1, (-1, DIM)) for one in "qkv")
            read = attend(layer, turned(q, places), turned(k, places), v)
            x = x + read.flatten(1) @ w[f"o{layer}"]
            h = rms_norm(x, (WIDTH,))
            x = x + (silu(h @ w[f"gate{layer}"]) * (h @ w[f"up{layer}"])) @ w[f"down{layer}"]
        return rms_norm(x, (WIDTH,)) @ w["embed0"].T


def turned(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return rotary embeddings of (tokens, heads, dim) at their places."""
    angles = places[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def dense(model: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    """Return the tokens that follow a prompt, all computed anew at each step."""
    tokens = list(prompt)

    def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    for _ in range(count):
        every = torch.arange(len(tokens))
        tokens.append(int(model.logits(torch.tensor(tokens), every, attend)[-1].argmax()))
    return tokens[len(prompt) :]


@dataclass
class Served:
    """Requests over one paged cache."""

    model: Decoder
    requests: int
    pages_each: int = 4

    def __post_init__(self) -> None:
        pages = self.requests * self.pages_each
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(6))
        self.table = order.view(self.requests, self.pages_each)
        self.cache = torch.full((LAYERS, 2, pages, PAGE, HEADS_KV, DIM), float("nan"))
        self.lengths = torch.zeros(self.requests, dtype=torch.int64)

    def step(
        self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]] | None = None
    ) -> list[torch.Tensor]:
        """Return the logits of each request's new tokens, any number of them, in one call a layer;
        tokens with `parents` form a tree."""
        counts = torch.tensor([len(one) for one in tokens])
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        self.lengths = self.lengths + counts
        mask = tilegen.causal("bottom_right")
        depths = [torch.arange(count) for count in counts]
        if parents is not None:
            widest = int(counts.max())
            padded = [[*one, *[-1] * (widest - len(one))] for one in parents]
            seen = tilegen.ancestors(torch.tensor(padded))
            mask = tilegen.tree(seen)
            depths = [one.sum(-1)[:count] - 1 for one, count in zip(seen, counts, strict=True)]
        before = self.lengths - counts
        places = torch.cat([n + depth for n, depth in zip(before, depths, strict=True)])

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            pages = self.cache[layer]
            tilegen.append_paged(
                k, v, pages[0], pages[1], self.table, self.lengths, q_starts=starts
            )
            return tilegen.attention_paged(
                *(q, pages[0], pages[1], self.table, self.lengths),
                q_starts=starts,
                max_q_length=int(counts.max()),
                mask=mask,
            )

        flat = torch.tensor([token for one in tokens for token in one])
        return [*self.model.logits(flat, places, attend).split(counts.tolist())]

    def forget(self, dropped: Sequence[int]) -> None:
        """Drop the last tokens of each request: drafts that were wrong."""
        self.lengths = self.lengths - torch.tensor(dropped)


def served(
    model: Decoder, prompts: Sequence[Sequence[int]], count: int, *, chunk: int, drafts: int
) -> list[list[int]]:
    """Return the tokens that follow each prompt: prompts go in by chunks, in the same calls as
    other requests decode; each step verifies `drafts` guesses, every other one wrong on purpose."""
    all_served = Served(model, len(prompts))
    waiting = [list(item) for item in prompts]
    results: list[list[int]] = [[] for _ in prompts]
    right = [dense(model, item, count + drafts) for item in prompts]  # what drafts are made of
    while min(map(len, results)) < count:
        given: list[list[int]] = []
        for item, known, guess in zip(waiting, results, right, strict=True):
            if item:
                given.append([item.pop(0) for _ in range(min(chunk, len(item)))])
                continue
            ahead = guess[len(known) : len(known) + drafts]
            if len(known) % 2:  # a draft that is wrong from its second token on
                ahead = [*ahead[:1], *((token + 1) % VOCABULARY for token in ahead[1:])]
            given.append([known[-1], *ahead])
        dropped: list[int] = []
        for i, logits in enumerate(all_served.step(given)):
            best = logits.argmax(-1).tolist()
            if not results[i]:
                dropped.append(0)
                if not waiting[i]:
                    results[i].append(best[-1])
                continue
            accepted = 1
            while accepted < len(best) and given[i][accepted] == best[accepted - 1]:
                accepted += 1
            results[i] += best[:accepted]
            dropped.append(len(best) - accepted)
        all_served.forget(dropped)
    return [item[:count] for item in results]


def served_by_trees(
    model: Decoder, prompts: Sequence[Sequence[int]], count: int
) -> tuple[list[list[int]], int]:
    """Return the tokens that follow each prompt, and the number of steps: each step goes on with
    the tokens of the last one, behind which a tree of drafts branches, some of them right."""
    all_served = Served(model, len(prompts))
    pending = [list(one) for one in prompts]
    results: list[list[int]] = [[] for _ in prompts]
    right = [dense(model, one, count + 3) for one in prompts]  # what drafts are made of
    steps = 0
    while min(map(len, results)) < count:
        steps += 1
        tokens: list[list[int]] = []
        parents: list[list[int]] = []
        for chain, known, guess in zip(pending, results, right, strict=True):
            next_one, second, third = guess[len(known) :][:3] if len(known) < count else [0, 1, 2]
            wrong, last = (next_one + 1) % VOCABULARY, len(chain) - 1
            # Two children, of the wrong one one, of the right one two, of these one each.
            drafts = [wrong, next_one, second, wrong, second, third, third]
            above = [last, last, last + 1, last + 2, last + 2, last + 4, last + 5]
            size = 2 + 5 * (len(known) % 2)  # trees of a call differ
            tokens.append([*chain, *drafts[:size]])
            parents.append([*range(-1, last), *above[:size]])
        dropped: list[int] = []
        for i, logits in enumerate(all_served.step(tokens, parents)):
            best, at = logits.argmax(-1).tolist(), len(pending[i]) - 1
            dropped.append(len(tokens[i]) - len(pending[i]))
            accepted: list[int] = []
            while at is not None:
                accepted.append(best[at])
                children = [j for j, up in enumerate(parents[i]) if up == at]
                at = next((j for j in children if tokens[i][j] == best[at]), None)
            results[i] += accepted
            pending[i] = accepted
        all_served.forget(dropped)
    return [one[:count] for one in results], steps


TINY_VOCABULARY = 31
SMALL = {
    "vocab_size": TINY_VOCABULARY,
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
    """A model to construct: its class, its configuration, and options of both."""

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
    "vocab_size_per_layer_input": TINY_VOCABULARY,
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
        {"vocab_size": TINY_VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
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
        {"vocab_size": TINY_VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 24, "num_layers": 2,
         "num_heads": 4, "relative_attention_num_buckets": 8, "dropout_rate": 0.0,
         "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2},
    ),
    "whisper": TinyModel(
        "Whisper:WhisperForConditionalGeneration",
        {"vocab_size": TINY_VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2,
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
    ids = torch.randint(3, TINY_VOCABULARY, (batch, tokens), generator=generator)
    make: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
        "vit": lambda: {"pixel_values": torch.randn(batch, 3, 12, 12, generator=generator)},
        "t5": lambda: {"input_ids": ids, "decoder_input_ids": ids[:, :6]},
        "whisper": lambda: {
            "input_features": torch.randn(batch, 8, 20, generator=generator),
            "decoder_input_ids": ids[:, :6],
        },
    }
    return make.get(name, lambda: {"input_ids": ids})()
