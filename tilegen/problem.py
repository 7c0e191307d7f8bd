"""Problems: `AttentionProblem`, and the short notation that every command and record uses."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from tilegen.errors import InvalidProblem, Unsupported, Word, did_you_mean
from tilegen.kernels.config import Dim, shares_columns
from tilegen.masks.dilation import grouped_length, grouped_mask, step_of
from tilegen.masks.form import Shape
from tilegen.masks.kinds import check_mask
from tilegen.masks.mask import Mask, full
from tilegen.masks.notation import NAMES, parse_mask
from tilegen.masks.score import ScoreForm, parse_score
from tilegen.masks.usual import is_surely_solved

DType = Literal["fp16", "bf16", "fp32"]
DTYPE_BYTES: dict[str, int] = {"fp16": 2, "bf16": 2, "fp32": 4}

MIN_HEAD_DIM = 8
MAX_HEAD_DIM: dict[str, int] = {"fp16": 1024, "bf16": 1024, "fp32": 512}
MAX_LENGTH = 2**28  # row and column indices in kernels are 32-bit, and masks add a few of them
MAX_HEADS = 2**20
PAGES = tuple(1 << i for i in range(9))
"""Numbers of keys that a page of a cache may have."""
MAX_DIGITS = 12
WORDS = (
    Word("bN", "sequences; default: 1", "b4"),
    Word("hqN", "query heads", "hq32"),
    Word("hkvN", "key-value heads, of which hq is a multiple; default: hq", "hkv8"),
    Word("qN", "queries of a sequence", "q4096"),
    Word("kvN", "keys of a sequence; default: q", "kv8192"),
    Word("dN", "head dim", "d128"),
    Word("dN/N", "head dims of queries and keys, and of values", "d192/128"),
    Word("fp16, bf16, fp32", "dtype of q, k and v", "bf16"),
    Word("MASK", "pairs that are kept; default: full; tilegen help masks", "causal"),
    Word(
        "score(EXPRESSION)",
        "change of the scaled logit s, a function of b, h, q and k, too",
        "score(s-abs(q-k)/8)",
    ),
    Word("dropout", "weights are dropped", "dropout"),
    Word("invariant", "results of a request do not depend on the batch", "invariant"),
    Word("pageN", "keys and values in the pages of a cache, N keys each", "page16"),
    Word("latent", "values are the first columns of keys", "latent"),
)
"""The parts of a problem, which may stand in any order."""

INVARIANT = 1, 16, 8192
"""Batch, queries and keys of the size for which kernels of batch-invariant problems are chosen."""


@dataclass(frozen=True, kw_only=True)
class AttentionProblem:
    """An attention call: `softmax(q k^T * scale + mask) v` and its gradients.

    Shapes are (batch, heads, seqlen, head_dim) as in PyTorch SDPA. `num_heads_q` is a multiple of
    `num_heads_kv`; query head h reads key-value head `h // group_size`.
    """

    batch: int = 1
    """Number of sequences."""
    num_heads_q: int
    """Number of query heads, a multiple of the number of key-value heads."""
    num_heads_kv: int
    """Number of key-value heads."""
    seqlen_q: int
    """Number of queries of each head."""
    seqlen_kv: int
    """Number of keys of each head."""
    head_dim_qk: int
    """Width of a query and of a key [elements]."""
    head_dim_v: int
    """Width of a value and of a row of the output [elements]."""
    dtype: DType
    """Type of q, k and v: fp16, bf16 or fp32."""
    mask: Mask = field(default_factory=full)
    """The pairs (query, key) that are computed; by default all."""
    score: ScoreForm | None = None
    """Change of the scores after scaling; None for no change."""
    dropout: bool = False
    """True if weights are dropped; the probability is an argument of each call."""
    invariant: bool = False
    """True if the result of a row depends on its own request only (batch-invariant)."""
    page: int = 0
    """Number of keys in a page, if keys and values are stored in the pages of a cache; otherwise
    0."""
    latent: bool = False
    """True if values are the first columns of keys, as in the absorbed form of multi-head latent
    attention (DeepSeek-V2, arXiv 2405.04434). The forward then loads these columns once."""

    def __post_init__(self) -> None:
        _check_range("batch", self.batch, 1, MAX_HEADS)
        _check_range("num_heads_q", self.num_heads_q, 1, MAX_HEADS)
        _check_range("num_heads_kv", self.num_heads_kv, 1, MAX_HEADS)
        _check_range("seqlen_q", self.seqlen_q, 1, MAX_LENGTH)
        _check_range("seqlen_kv", self.seqlen_kv, 1, MAX_LENGTH)
        if self.num_heads_q % self.num_heads_kv:
            raise InvalidProblem(
                f"num_heads_q must be a multiple of num_heads_kv, "
                f"got {self.num_heads_q} and {self.num_heads_kv}"
            )
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BYTES:
            raise InvalidProblem(
                f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}"
            )
        for name in ("head_dim_qk", "head_dim_v"):
            value, limit = getattr(self, name), MAX_HEAD_DIM[self.dtype]
            _check_range(name, value, 1, 2**20)
            if not MIN_HEAD_DIM <= value <= limit:
                raise Unsupported(
                    f"{name} must be {MIN_HEAD_DIM}..{limit} in {self.dtype}, got {value}; "
                    "use torch.nn.functional.scaled_dot_product_attention for this size"
                )
        if self.page not in (0, *PAGES):
            raise Unsupported(
                f"page must be a power of two of at most {PAGES[-1]} keys, got {self.page!r}"
            )
        if self.latent and not self.num_heads_kv == 1 < self.num_heads_q:
            raise Unsupported(
                "latent needs several query heads on one key-value head, got "
                f"hq{self.num_heads_q} hkv{self.num_heads_kv}"
            )
        if self.latent and not shares_columns(self.head_dim_qk, self.head_dim_v):
            raise Unsupported(
                "latent needs a head_dim_v whose tiles are the first of those of keys, such as "
                f"d576/512 or d192/128, got d{self.head_dim_qk}/{self.head_dim_v}"
            )
        check_mask(self.mask)

    @property
    def pair_lse(self) -> bool:
        """True if kernels store the lse of a row as two numbers, (batch, heads, 2, seqlen_q). A
        changed score may shift a row so far from 0 that fp32 loses the logarithm of its sum."""
        return self.score is not None and self.score.changes

    @property
    def group_size(self) -> int:
        """Number of query heads that share a key-value head."""
        return self.num_heads_q // self.num_heads_kv

    @property
    def head_dims(self) -> dict[Dim, int]:
        """Head dims by name: `qk` for q and k, `v` for v and out."""
        return {"qk": self.head_dim_qk, "v": self.head_dim_v}

    @property
    def shape(self) -> Shape:
        """Sizes that masks and scores depend on."""
        return Shape(self.batch, self.num_heads_q, self.seqlen_q, self.seqlen_kv)

    @property
    def element_bytes(self) -> int:
        """Size of an element of q, k, v and out [bytes]."""
        return DTYPE_BYTES[self.dtype]

    @property
    def key(self) -> str:
        """Canonical notation: `AttentionProblem.parse(problem.key) == problem`."""
        dims = (
            f"{self.head_dim_qk}"
            if self.head_dim_qk == self.head_dim_v
            else f"{self.head_dim_qk}/{self.head_dim_v}"
        )
        return (
            f"b{self.batch} hq{self.num_heads_q} hkv{self.num_heads_kv} "
            f"q{self.seqlen_q} kv{self.seqlen_kv} "
            f"d{dims} {self.dtype} {self.mask.notation}"
            + (f" {self.score.notation}" if self.score else "")
            + (" dropout" if self.dropout else "")
            + (" invariant" if self.invariant else "")
            + (f" page{self.page}" if self.page else "")
            + (" latent" if self.latent else "")
        )

    def __str__(self) -> str:
        return self.key

    def normal(self) -> AttentionProblem:
        """Return the normal form, which calls compute instead; for most problems the same problem.

        With a dilated mask, the rows and columns of each remainder form a group. Each group becomes
        a batch entry, under the rest of the mask (see masks/dilation.py). With keys in pages, the
        mask is rewritten so that it needs no lists of tiles (see masks/usual.py).
        """
        if self.page:
            return self if is_surely_solved(self.mask) else self._without_lists()
        step = step_of(self.mask, self.score, self.batch, invariant=self.invariant)
        if step == 1:
            return self
        groups = self.batch * step
        return replace(
            self,
            batch=groups,
            seqlen_q=grouped_length(self.seqlen_q, step),
            seqlen_kv=grouped_length(self.seqlen_kv, step),
            mask=grouped_mask(self.mask, step, self.seqlen_kv, groups),
        )

    def _without_lists(self) -> AttentionProblem:
        from tilegen.masks.source import unlisted  # loads torch

        mask = unlisted(self.mask)
        return self if mask is self.mask else replace(self, mask=mask)

    @property
    def rewriting(self) -> str:
        """One line that describes the normal form; empty if the problem is in normal form."""
        if (normal := self.normal()) is self:
            return ""
        return f"mask {self.mask} rewritten: what is computed is '{normal}'"

    @property
    def bucket(self) -> AttentionProblem:
        """The problem that stands for this problem in records: its normal form, rounded.

        Lengths are run-time arguments of kernels, so a choice for a bucket is correct for all
        problems in it.
        """
        return self.normal().rounded

    @property
    def rounded(self) -> AttentionProblem:
        """This problem with batch and lengths rounded up to powers of two. All batch-invariant
        problems get the batch and lengths of INVARIANT."""
        if self.invariant:
            batch, rows, columns = INVARIANT
            return replace(self, batch=batch, seqlen_q=rows, seqlen_kv=columns)
        return replace(
            self,
            batch=_power_of_two_at_least(self.batch),
            seqlen_q=_power_of_two_at_least(self.seqlen_q),
            seqlen_kv=_power_of_two_at_least(self.seqlen_kv),
        )

    @classmethod
    def parse(cls, text: str) -> AttentionProblem:
        """Parse the notation of a problem, such as `b4 hq32 hkv8 q4096 kv4096 d128 bf16 causal`.

        `b` defaults to 1, `hkv` to `hq`, `kv` to `q`, the mask to `full`; `d192/128` gives
        head_dim_qk and head_dim_v. With `dropout` weights are dropped, with `invariant` results do
        not depend on the batch, with `page16` keys and values are in pages of 16 keys, and with
        `latent` values are the first columns of keys. Raises InvalidProblem or Unsupported.
        """
        if not isinstance(text, str):
            raise InvalidProblem(f"expected the notation of a problem, got {type(text).__name__}")
        numbers: dict[str, int] = {}
        dtypes: list[str] = []
        masks: list[str] = []
        scores: list[str] = []
        words: dict[str, list[str]] = {"dropout": [], "invariant": [], "latent": []}
        for token in _tokens(text):
            if match := re.fullmatch(r"(b|hq|hkv|q|kv|page)([0-9]+)", token):
                _set_once(numbers, match[1], _number(*match.groups()), text)
            elif match := re.fullmatch(r"d([0-9]+)(?:/([0-9]+))?", token):
                _set_once(numbers, "d", _number("d", match[1]), text)
                numbers["dv"] = _number("d", match[2] or match[1])
            elif token in DTYPE_BYTES:
                dtypes.append(token)
            elif token.startswith("score("):
                scores.append(token)
            elif token in words:
                words[token].append(token)
            else:
                masks.append(token)
        missing = [name for name in ("hq", "q", "d") if name not in numbers]
        strange = [word for word in masks if re.fullmatch(r"[\w.]+", word) and word not in NAMES]
        if strange:
            reason = f"{strange[0]!r} is no part of one{_meant(strange[0])}"
        elif missing:
            reason = f"no {missing[0]}N"
        elif not dtypes:
            reason = f"no dtype, which is one of {', '.join(DTYPE_BYTES)}"
        elif len(dtypes) > 1:
            reason = f"two dtypes, {dtypes[0]} and {dtypes[1]}"
        elif len(masks) > 1:
            reason = f"two masks, {masks[0]} and {masks[1]}; join them by &, | and ~"
        elif len(scores) > 1:
            reason = "two scores"
        elif twice := next((word for word, tokens in words.items() if len(tokens) > 1), ""):
            reason = f"the word {twice} twice"
        else:
            reason = ""
        if reason:
            raise InvalidProblem(
                "expected a problem such as 'b4 hq32 hkv8 q4096 kv4096 d128 bf16 causal', "
                f"got {text!r}: {reason}"
            )
        return cls(
            batch=numbers.get("b", 1),
            num_heads_q=numbers["hq"],
            num_heads_kv=numbers.get("hkv", numbers["hq"]),
            seqlen_q=numbers["q"],
            seqlen_kv=numbers.get("kv", numbers["q"]),
            head_dim_qk=numbers["d"],
            head_dim_v=numbers["dv"],
            dtype=cast("DType", dtypes[0]),
            mask=parse_mask(masks[0]) if masks else full(),
            score=parse_score(scores[0]) if scores else None,
            dropout=bool(words["dropout"]),
            invariant=bool(words["invariant"]),
            page=numbers.get("page", 0),
            latent=bool(words["latent"]),
        )


def _tokens(text: str) -> list[str]:
    """Split a notation at white space, but not inside a mask or a score.

    `causal & ~window(4095, 0)` is a single token, and so is `score(s * 2)`.
    """
    text = re.sub(r"\s*([&|,])\s*", r"\1", text.strip())
    text = re.sub(r"(?<=~)\s+", "", text)
    depth, tokens = 0, ""
    for part in re.split(r"(\s+|[()])", text):
        depth += (part == "(") - (part == ")")
        tokens += part if depth <= 0 or not part.isspace() else ""
    return (text if depth else tokens).split()


_OTHERS = {
    **{"h": "hq", "hk": "hkv", "n": "q", "s": "q", "t": "q", "k": "kv", "dim": "d", "hd": "d"},
    **{"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"},
}
"""Other names of numbers and dtypes, by which people know them."""


def _meant(word: str) -> str:
    """Return the end of the error for a word that is no part of a problem: the part that it stands
    for, if there is one, such as q4096 for s4k."""
    lower = word.lower().removeprefix("torch.")
    if match := re.fullmatch(r"([a-z]+)([0-9]{1,12})([km]?)", lower):
        name, factor = match[1], {"": 1, "k": 1024, "m": 1024**2}[match[3]]
        if (name := _OTHERS.get(name, name)) in ("b", "hq", "hkv", "q", "kv", "d", "page"):
            return f"; did you mean {name}{int(match[2]) * factor}?"
    if lower in _OTHERS:
        return f"; did you mean {_OTHERS[lower]}?"
    return did_you_mean(lower, (*DTYPE_BYTES, *NAMES, "dropout", "invariant", "latent"))


def _number(name: str, digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise InvalidProblem(
            f"expected {name} and a number of at most {MAX_DIGITS} digits, got {len(digits)} digits"
        )
    return int(digits)


def _set_once(numbers: dict[str, int], name: str, value: int, text: str) -> None:
    if name in numbers:
        raise InvalidProblem(f"expected one {name}N, got two in {text!r}")
    numbers[name] = value


def _check_range(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidProblem(f"{name} must be an int in {low}..{high}, got {value!r}")


def _power_of_two_at_least(value: int) -> int:
    return 1 << (value - 1).bit_length()
