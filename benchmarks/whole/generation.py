"""Generation with one implementation of attention: transformers' own loops, and a paged one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

import torch

from benchmarks.whole import paged
from benchmarks.whole.models import MODELS
from benchmarks.whole.training import load

Way = Literal["greedy", "beam", "paged"]
BEAMS, REQUESTS, CHUNK, DRAFTS = 4, 4, 256, 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case of generation, without the attention that computes it."""

    model: str
    way: Way
    prompt: int
    """Tokens of the prompt; requests over a paged cache have this many and fewer."""
    new: int
    dtype: str

    @property
    def key(self) -> str:
        """The case in a line."""
        return f"{self.model} {self.way} prompt{self.prompt} new{self.new} {self.dtype}"


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Tokens of each request, and their times."""

    tokens: list[list[int]]
    first_s: float
    """Time to the first token, the mean over requests [s]."""
    per_token_s: float
    """Time of each token after the first [s]; of all requests together, over their tokens."""
    accepted: float | None = None
    """Share of drafts that were right."""


class _Clock:
    """Notes the time of each step's logits."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        if scores.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return scores


class Generating:
    """A model with random weights, and prompts."""

    def __init__(self, case: Case, attention: str, device: str) -> None:
        load(attention, device)
        self.case, self.device = case, device
        self.is_paged = case.way == "paged" and attention == "tilegen"
        if self.is_paged:
            paged.register()
            attention = paged.NAME
        kind = MODELS[case.model]
        model = kind.make(attention, case.prompt + case.new, frozenset())
        dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
        self.model = model.to(device, dtype).eval()
        ids = kind.batch(0, 1, case.prompt, frozenset(), "cpu")["input_ids"][0].tolist()
        requests = REQUESTS if case.way == "paged" else 1
        self.prompts = [ids[: len(ids) * (i + 1) // requests] for i in range(requests)]

    def run(self) -> Generated:
        """Generate tokens after each prompt."""
        case = self.case
        if self.is_paged:
            served = paged.serve(self.model, self.prompts, case.new, chunk=CHUNK, drafts=DRAFTS)
            firsts = [one.first_s for one in served.requests]
            return Generated(
                tokens=[one.tokens for one in served.requests],
                first_s=sum(firsts) / len(firsts),
                per_token_s=served.seconds / (case.new * len(firsts)),
                accepted=served.accepted / served.drafted if served.drafted else None,
            )
        start = time.perf_counter()
        every = [self._generate(prompt) for prompt in self.prompts]
        tokens, clocks = zip(*every, strict=True)
        firsts = [clock.times[0] - start for clock in clocks]
        last = clocks[-1].times[-1]
        if case.way == "paged":  # all time, as above: the prompts of some are others' waiting
            per_token = (last - start) / (case.new * len(clocks))
        else:
            per_token = (last - clocks[0].times[0]) / max(1, case.new - 1)
        first = sum(firsts) / len(firsts)
        return Generated(tokens=list(tokens), first_s=first, per_token_s=per_token)

    def _generate(self, prompt: list[int]) -> tuple[list[int], _Clock]:
        from transformers import GenerationConfig, LogitsProcessorList

        clock = _Clock()
        ids = torch.tensor([prompt], device=self.device)
        config = GenerationConfig(
            max_new_tokens=self.case.new,
            do_sample=False,
            num_beams=BEAMS if self.case.way == "beam" else 1,
            use_cache=True,
            eos_token_id=None,
            pad_token_id=0,
        )
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            logits_processor=LogitsProcessorList([clock]),
        )
        return out[0, len(prompt) :].tolist(), clock

    @torch.no_grad()
    def logits(self, tokens: list[list[int]]) -> Any:
        """Return the logits of given tokens after the first prompt, in fp32."""
        ids = torch.tensor([self.prompts[0] + tokens[0]], device=self.device)
        logits = self.model(ids, use_cache=False).logits[0, len(self.prompts[0]) - 1 : -1]
        return logits.float().cpu().numpy()
