"""The output of a run: a line of JSON for each problem, and a summary."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.differential.problems import Problem
from tests.differential.trial import Outcome

OUTCOMES = ("right", "refused", "wrong", "crashed")
FORMS: dict[str, str] = {
    "a user's mask": r"predicate\(",
    "a ready-made mask": r"\b(causal|sliding_window|prefix_lm|global_tokens|streaming|kv_lengths"
    r"|dilated|documents|tree|neighborhood|block_sparse|from_bool)\(",
    "masks joined": r"\) [&|] [a-z~(]+.*\(|~[a-z]+\(",
    "a user's score": r"score\(",
    "a ready-made score": r"\b(softcap|alibi|relative_bias|bias|temperature|sinks)\(",
    "// or %": r"//|%|remainder|div\(",
    "division": r"[^/]/[^/]",
    "powers": r"\*\*",
    "bits and shifts": r"[&^|] \d|<<|>>|\^",
    "products past 32 bits": r"73856093|1000000 \*",
    "choices, min, max, clamp": r"where|minimum|maximum|clamp",
    "elementary functions": r"torch\.(exp|log|sqrt|sin|cos|tanh|sigmoid|erf|sign|floor)|functional",
    "look-ups": r"t\d+\[",
    "nested look-ups": r"t\d+\[t\d+\[",
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One problem's outcome."""

    seed: int
    number: int
    outcome: str
    detail: str
    seconds: float
    family: str
    dtype: str
    forms: list[str]
    problem: str
    shrunk: str = ""
    shrunk_detail: str = ""
    compiled: bool = False

    @classmethod
    def of(
        cls,
        seed: int,
        number: int,
        problem: Problem,
        outcome: Outcome,
        compiled: bool,
        shrunk: tuple[Problem, Outcome] | None,
    ) -> Line:
        """Return the line of a problem; `shrunk` is a simpler one that fails alike."""
        return cls(
            seed=seed,
            number=number,
            outcome=outcome.what,
            detail=outcome.detail,
            seconds=round(outcome.seconds, 3),
            family=problem.family,
            dtype=problem.dtype,
            forms=forms(problem),
            problem=str(problem),
            shrunk=str(shrunk[0]) if shrunk else "",
            shrunk_detail=shrunk[1].detail if shrunk else "",
            compiled=compiled,
        )

    def __str__(self) -> str:
        head = f"{self.seed}:{self.number} {self.outcome} ({self.seconds:.1f} s)"
        if self.outcome in ("right", "refused"):
            return f"{head} {self.detail}".rstrip()
        return (
            f"{head} {self.shrunk_detail or self.detail}\n  {command(self.shrunk or self.problem)}"
        )


def lost(seed: int, number: int, detail: str) -> Line:
    """Return the line of a problem whose process ended before its time."""
    return Line(
        seed=seed, number=number, outcome="crashed", detail=detail, seconds=0.0, family="unknown",
        dtype="unknown", forms=[], problem=f"draw({seed}, {number})",
    )  # fmt: skip


def command(problem: str) -> str:
    """Return the shell command that runs one problem again."""
    return f"python -m tests.differential --problem {shlex.quote(problem)}"


def forms(problem: Problem) -> list[str]:
    """Return the forms that occur in a problem, as counted in the summary."""
    text = f"{problem.mask} {problem.score}"
    results = [name for name, pattern in FORMS.items() if re.search(pattern, text)]
    extra = {
        "lengths of padded batches": bool(problem.kv_lengths),
        "batch-invariant": problem.invariant,
        "packed requests": problem.call in ("varlen", "packed pages"),
        "keys in pages": problem.page > 0,
        "values in keys": problem.latent,
        "torch.compile": problem.compiled,
        "dropout": problem.dropout > 0,
        "trained tables": bool(problem.trained),
        "tables changed in place": problem.changed,
        "gradients": problem.backward,
        "gradients through lse": problem.trains_lse,
        "strides": len(set(problem.layouts)) > 1,
        "grouped heads": problem.heads != problem.heads_kv,
        "d_qk and d_v apart": problem.head_dim != problem.head_dim_v,
    }
    return results + [name for name, holds in extra.items() if holds]


def append(path: Path, line: Line) -> None:
    """Add a line to a file, whole."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(line)) + "\n")


def read(paths: Iterable[Path]) -> list[Line]:
    """Return the lines of files, one for each problem: the last; a torn line is none."""
    by_name: dict[tuple[int, int], Line] = {}
    for path in paths:
        for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                line = Line(**json.loads(text))
            except (ValueError, TypeError):
                continue
            by_name[line.seed, line.number] = line
    return list(by_name.values())


def summary(lines: list[Line]) -> str:
    """Return the counts of a run as Markdown."""
    return "\n".join(_summary(lines)) + "\n"


def _summary(lines: list[Line]) -> Iterator[str]:
    seeds = sorted({line.seed for line in lines})
    compiled = sum(line.compiled for line in lines)
    counts = Counter(line.outcome for line in lines)
    told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
    seconds = sum(line.seconds for line in lines)
    yield f"{len(lines)} problems of seed {', '.join(map(str, seeds))}: {told}."
    yield f"{compiled} of them were compiled for sm_90 too. {seconds / 3600:.1f} hours of one core."
    groups = {
        "kernels": lambda line: [line.family],
        "dtype": lambda line: [line.dtype],
        "what occurs": lambda line: line.forms,
    }
    for title, names_of in groups.items():
        table = {name: Counter[str]() for line in lines for name in names_of(line)}
        for line in lines:
            for name in names_of(line):
                table[name][line.outcome] += 1
        yield f"\n| {title} | {' | '.join(OUTCOMES)} |\n| --- |{' --- |' * len(OUTCOMES)}"
        for name in sorted(table):
            yield f"| {name} | {' | '.join(str(table[name][one]) for one in OUTCOMES)} |"
    reasons = Counter(_reason(line.detail) for line in lines if line.outcome == "refused")
    if reasons:
        yield "\n| refused because | problems |\n| --- | --- |"
        yield from (f"| {reason} | {count} |" for reason, count in reasons.most_common())
    failed = [line for line in lines if line.outcome in ("wrong", "crashed")]
    if failed:
        yield "\nFailures:\n"
        yield from (f"- `{line.shrunk or line.problem}`: {line.detail[:150]}" for line in failed)


def _reason(detail: str) -> str:
    """Return a refusal without the details of a problem."""
    short = re.split(r", got |; ", detail)[0]
    return re.sub(r"\s+", " ", short.replace("|", "\\|"))[:120]
