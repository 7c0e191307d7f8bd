"""Generate with models of transformers and each attention: time to first token, and per token.

Greedy and beam search are transformers' own; `paged` serves four requests at once over a paged
cache with tilegen, and one after the other with the others. Tokens are compared with those of
eager attention; in bf16, where they may part, logits are, on the same tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer

from benchmarks.environment import Environment, Minutes, gpu_folder, path_of_calls
from benchmarks.rows import in_time, keep, read, same_values
from benchmarks.whole import paged
from benchmarks.whole.models import MODELS
from benchmarks.whole.training import load
from benchmarks.whole.turns import Gib, Threads, Tiny, Turns, limits

Way = Literal["greedy", "beam", "paged"]
WAYS: tuple[Way, ...] = "greedy", "beam", "paged"
ATTENTIONS = "tilegen", "eager", "sdpa"
ROUNDS = 5
BEAMS, REQUESTS, CHUNK, DRAFTS = 4, 4, 256, 4
MOST_OF_SDPA = 2.0
"""Error of logits in bf16 that is right, of SDPA's."""


@dataclass(frozen=True, kw_only=True)
class GenerateRow(Environment):
    """Generation of a case with one attention."""

    case: str
    threads: int
    attention: str
    status: str
    first_ms: float | None = None
    """Time to the first token, the mean over requests, the median over rounds."""
    per_token_ms: float | None = None
    """Time of each further token; over a paged cache all time over all tokens."""
    first_over_tilegen: float | None = None
    per_token_over_tilegen: float | None = None
    same_tokens: float | None = None
    """Share of tokens before the first that differs from eager attention's."""
    logits_error: float | None = None
    """Largest difference of logits from eager attention in fp32, on the same tokens."""
    logits_of_sdpa: float | None = None
    """That error over SDPA's."""
    accepted: float | None = None
    """Share of drafts that were right."""
    detail: str = ""


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
                first_s=statistics.mean(firsts),
                per_token_s=served.seconds / (case.new * len(firsts)),
                accepted=served.accepted / served.drafted if served.drafted else None,
            )
        start = time.perf_counter()
        tokens, clocks = zip(*map(self._generate, self.prompts), strict=True)
        last = clocks[-1][-1]
        if case.way == "paged":  # all time, as above: the prompts of some are others' waiting
            per_token = (last - start) / (case.new * len(clocks))
        else:
            per_token = (last - clocks[0][0]) / max(1, case.new - 1)
        first = statistics.mean(times[0] - start for times in clocks)
        return Generated(tokens=list(tokens), first_s=first, per_token_s=per_token)

    def _generate(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        """Return the tokens after a prompt, and when the logits of each were there."""
        from transformers import GenerationConfig, LogitsProcessorList

        times: list[float] = []

        def note(input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
            if scores.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter())
            return scores

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
            logits_processor=LogitsProcessorList([note]),
        )
        return out[0, len(prompt) :].tolist(), times

    @torch.no_grad()
    def logits(self, tokens: list[list[int]]) -> Any:
        """Return the logits of given tokens after the first prompt, in fp32."""
        ids = torch.tensor([self.prompts[0] + tokens[0]], device=self.device)
        logits = self.model(ids, use_cache=False).logits[0, len(self.prompts[0]) - 1 : -1]
        return logits.float().cpu().numpy()


def cases(*, tiny: bool) -> list[Case]:
    """Return the cases of the table."""
    if tiny:
        small = Case(model="llama-tiny", way="greedy", prompt=48, new=12, dtype="fp32")
        return [replace(small, way=way) for way in WAYS]
    both = product((("llama", 1024), ("gpt2", 512)), ("fp32", "bf16"), WAYS)
    return [
        Case(model=model, way=way, prompt=prompt, new=32, dtype=dtype)
        for (model, prompt), dtype, way in both
        if way != "paged" or model == "llama"  # GPT-2 has no place for a step's arguments
    ]


def measure(case: Case, *, threads: int, gib: float) -> Iterator[GenerateRow]:
    """Yield the rows of a case, all attentions timed in turns."""
    errors: dict[str, float] = {}
    with Turns(threads=threads, gib=gib) as turns:
        for name in ATTENTIONS:
            turns.start(name, Generating, case, name, turns.device)
            turns.call(name, "run")
        runs: dict[str, list[Generated]] = {name: [] for name in turns.workers}
        for _, name in product(range(ROUNDS), tuple(runs)):
            if run := turns.call(name, "run"):
                runs[name].append(run)
        if case.way != "paged" and not turns.lost:  # else attention goes over pages alone
            turns.start("exact", Generating, replace(case, dtype="fp32"), "eager", turns.device)
            given = runs["eager"][0].tokens
            logits = {name: turns.call(name, "logits", given) for name in list(turns.workers)}
            if not turns.lost:
                exact = logits["exact"]
                errors = {name: float(np.abs(of - exact).max()) for name, of in logits.items()}
    for name in ATTENTIONS:
        columns = turns.why(name) if name in turns.lost else _columns(name, runs, errors)
        yield GenerateRow(case=case.key, threads=threads, attention=name, **columns)


def _columns(
    name: str, runs: Mapping[str, Sequence[Generated]], errors: Mapping[str, float]
) -> dict[str, Any]:
    """Return the columns of an attention."""
    of_name = runs[name]
    ours, theirs = runs.get("tilegen", ()), runs.get("eager", ())

    def over(what: str) -> float | None:
        both = zip(of_name, ours, strict=False)
        ratios = [getattr(one, what) / getattr(other, what) for one, other in both]
        return statistics.median(ratios) if ratios else None

    return {
        "status": "ok",
        "first_ms": 1e3 * statistics.median(one.first_s for one in of_name),
        "per_token_ms": 1e3 * statistics.median(one.per_token_s for one in of_name),
        "first_over_tilegen": over("first_s"),
        "per_token_over_tilegen": over("per_token_s"),
        "same_tokens": same(of_name[0].tokens, theirs[0].tokens) if theirs else None,
        "logits_error": errors.get(name),
        "logits_of_sdpa": errors[name] / errors["sdpa"] if errors.get("sdpa") else None,
        "accepted": of_name[0].accepted,
        "detail": path_of_calls() if name == "tilegen" else "",
    }


def same(tokens: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens before the first of each request that differs."""
    equal = 0
    for left, other in zip(tokens, expected, strict=True):
        pairs = zip(left, other, strict=True)
        equal += next((i for i, (a, b) in enumerate(pairs) if a != b), len(left))
    return equal / sum(map(len, expected))


def line(row: GenerateRow) -> str:
    """Return a row as a terminal shows it."""
    if row.status != "ok":
        return f"{row.case:42} {row.attention:8} {row.status}: {row.detail}"
    error = "" if row.logits_of_sdpa is None else f", logits off {row.logits_of_sdpa:.2f} of SDPA's"
    accepted = "" if row.accepted is None else f", {100 * row.accepted:.0f} % of drafts right"
    ratios = (row.first_over_tilegen, row.per_token_over_tilegen, row.same_tokens)
    first, each, alike = ("?" if one is None else f"{one:.2f}" for one in ratios)
    return (
        f"{row.case:42} {row.attention:8} first {row.first_ms:8.1f} ms ({first} x), each "
        f"{row.per_token_ms:7.2f} ms ({each} x), same {alike}{error}{accepted}"
    )


def main(
    out: Annotated[Path | None, typer.Option(help="Result file.")] = None,
    minutes: Minutes = 5.0,
    tiny: Tiny = False,
    threads: Threads = 0,
    gib: Gib = 0.0,
) -> None:
    """Generate each case that the result file does not have yet.

    Example: python -m benchmarks.whole generate --tiny --out generate.csv
    """
    path = out or gpu_folder() / "generate.csv"
    each = limits(threads, gib)
    done = same_values(read(path), ("case", "threads"))
    todo = [one for one in cases(tiny=tiny) if (one.key, str(each["threads"])) not in done]
    for case in in_time(todo, minutes):
        keep(path, measure(case, **each), line)
