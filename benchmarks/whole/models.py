"""Models of transformers with random weights, and synthetic batches for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

Family = Literal["gpt2", "bert", "llama", "classifier"]
Feature = Literal["documents", "window", "dropout", "checkpointing", "compile"]
FEATURES: tuple[Feature, ...] = "documents", "window", "dropout", "checkpointing", "compile"
WINDOW, DOCUMENTS, DROPOUT = 256, 8, 0.1
"""Keys of a window, documents of a sequence, and the probability of dropout."""
MASKED = 0.15
"""Share of tokens that a masked language model predicts."""


@dataclass(frozen=True)
class Model:
    """A model's shape."""

    family: Family
    layers: int
    width: int
    heads: int
    heads_kv: int
    inner: int
    """Width between the two products of an MLP."""
    vocabulary: int

    def make(self, attention: str, seqlen: int, features: frozenset[Feature], seed: int = 0) -> Any:
        """Return the model with the same random weights for each attention, in training mode.

        Raises ValueError for features that transformers' modules do not have."""
        make = {
            "gpt2": self._gpt2,
            "bert": self._bert,
            "llama": self._llama,
            "classifier": self._classifier,
        }[self.family]
        kind, config = make(seqlen, features)
        torch.manual_seed(seed)
        model = kind._from_config(config, attn_implementation=attention)
        if "checkpointing" in features:
            model.activation_checkpointing_enable({"use_reentrant": False})
        return model.train()

    def _gpt2(self, seqlen: int, features: frozenset[Feature]) -> tuple[Any, Any]:
        from transformers import GPT2Config, GPT2LMHeadModel

        _refuse(features, "window", "GPT-2 has no layers with a window; take llama")
        dropped = DROPOUT if "dropout" in features else 0.0
        return GPT2LMHeadModel, GPT2Config(
            vocab_size=self.vocabulary, n_positions=seqlen, n_embd=self.width, n_layer=self.layers,
            n_head=self.heads, n_inner=self.inner, attn_pdrop=dropped, resid_pdrop=dropped,
            embd_pdrop=dropped, bos_token_id=1, eos_token_id=2, use_cache=False,
        )  # fmt: skip

    def _llama(self, seqlen: int, features: frozenset[Feature]) -> tuple[Any, Any]:
        from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

        sizes: dict[str, Any] = {
            "vocab_size": self.vocabulary, "max_position_embeddings": seqlen,
            "hidden_size": self.width, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.heads_kv,
            "intermediate_size": self.inner, "use_cache": False,
            "attention_dropout": DROPOUT if "dropout" in features else 0.0,
        }  # fmt: skip
        if "window" in features:  # the same layers
            return MistralForCausalLM, MistralConfig(**sizes, sliding_window=WINDOW)
        return LlamaForCausalLM, LlamaConfig(**sizes)

    def _bert(self, seqlen: int, features: frozenset[Feature]) -> tuple[Any, Any]:
        from transformers import BertConfig, BertForMaskedLM

        for feature in ("window", "documents"):
            _refuse(features, feature, f"BERT takes no {feature}; take classifier or llama")
        return BertForMaskedLM, BertConfig(**self._encoder(seqlen, features))

    def _classifier(self, seqlen: int, features: frozenset[Feature]) -> tuple[Any, Any]:
        from transformers import (
            BertConfig,
            BertForSequenceClassification,
            ModernBertConfig,
            ModernBertForSequenceClassification,
        )

        _refuse(features, "documents", "a classifier reads one document; take llama or gpt2")
        if "window" not in features:
            sizes = self._encoder(seqlen, features)
            return BertForSequenceClassification, BertConfig(**sizes, num_labels=2)
        dropped = DROPOUT if "dropout" in features else 0.0
        return ModernBertForSequenceClassification, ModernBertConfig(
            vocab_size=self.vocabulary, max_position_embeddings=seqlen, hidden_size=self.width,
            num_hidden_layers=self.layers, num_attention_heads=self.heads,
            intermediate_size=self.inner, local_attention=WINDOW, attention_dropout=dropped,
            layer_types=["sliding_attention"] * self.layers, num_labels=2,
            pad_token_id=0, cls_token_id=1, sep_token_id=2,
        )  # fmt: skip

    def _encoder(self, seqlen: int, features: frozenset[Feature]) -> Mapping[str, Any]:
        dropped = DROPOUT if "dropout" in features else 0.0
        return {
            "vocab_size": self.vocabulary, "max_position_embeddings": seqlen,
            "hidden_size": self.width, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "intermediate_size": self.inner,
            "attention_probs_dropout_prob": dropped, "hidden_dropout_prob": dropped,
        }  # fmt: skip

    def batch(
        self, step: int, batch: int, seqlen: int, features: frozenset[Feature], device: str
    ) -> dict[str, torch.Tensor]:
        """Return the inputs of a training step, the same for each attention."""
        generator = torch.Generator().manual_seed(1000 + step)
        # Low numbers are frequent, as words are: there is something to learn.
        uniform = torch.rand(batch, seqlen, generator=generator)
        ids = 3 + ((self.vocabulary - 3) * uniform**3).long()
        given = {"input_ids": ids}
        if self.family == "classifier":
            given["labels"] = (ids < self.vocabulary // 8).sum(1) % 2
        elif self.family == "bert":
            chosen = torch.rand(batch, seqlen, generator=generator) < MASKED
            chosen[:, 0] = True
            given["labels"] = torch.where(chosen, ids, -100)
            given["input_ids"] = torch.where(chosen, 1, ids)
        else:
            given["labels"] = ids
        if "documents" in features:
            # Documents of different lengths, which positions that restart keep apart.
            weights = 0.5 + torch.rand(DOCUMENTS, generator=generator)
            ends = (weights.cumsum(0) / weights.sum() * seqlen).long().clamp(1, seqlen)
            places = torch.arange(seqlen)
            number = torch.bucketize(places, ends[:-1], right=True)
            starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1]])
            given["position_ids"] = (places - starts[number]).expand(batch, -1)
        return {name: tensor.to(device) for name, tensor in given.items()}


def _refuse(features: frozenset[Feature], feature: str, reason: str) -> None:
    if feature in features:
        raise ValueError(reason)


MODELS = {
    "gpt2": Model("gpt2", 12, 768, 12, 12, 3072, 50257),
    "gpt2-tiny": Model("gpt2", 2, 64, 4, 4, 128, 256),
    "bert": Model("bert", 12, 768, 12, 12, 3072, 30522),
    "bert-large": Model("bert", 24, 1024, 16, 16, 4096, 30522),
    "bert-tiny": Model("bert", 2, 64, 4, 4, 128, 256),
    "llama": Model("llama", 8, 768, 12, 4, 2048, 8192),
    "llama-tiny": Model("llama", 2, 64, 4, 2, 128, 256),
    "classifier": Model("classifier", 4, 256, 4, 4, 1024, 256),
    "classifier-tiny": Model("classifier", 2, 64, 4, 4, 128, 256),
    "path-x": Model("classifier", 4, 128, 4, 4, 256, 256),
}
"""Shapes by name: GPT-2 small with 124 million parameters, BERT base and large, a decoder shaped as
Llama with three queries to a key, encoders that classify long sequences, and small ones of each
family."""
