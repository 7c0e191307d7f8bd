"""The knobs of a kernel (`TileConfig`), and the tiles that cover a head dim."""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, field, fields
from operator import attrgetter
from typing import Any, Literal

from tilegen.errors import Unsupported

Kernel = str
"""The name of an emitted kernel; templates/README.md lists them."""
Family = str
"""The name of a family: how a pass is computed."""

Dim = Literal["qk", "v"]
"""A head dim: that of q and k, or that of v."""

BLOCK_SIZES = (16, 32, 64, 128, 256)
FEW_ROWS = (1, 2, 4, 8)
"""Query rows of tiles that hold several heads; also the rows, and the splits, of kernels that join
splits."""
NUM_WARPS = (4, 8)
NUM_STAGES = (1, 2, 3, 4)
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
SPLITS = tuple(1 << i for i in range(4, 25))
ROWS_OF_GROUP, WARPS_OF_GROUP = 64, 4
"""Stationary rows of a computing warpgroup, in kernels whose warpgroups have roles, and its
warps."""


@dataclass(frozen=True)
class Option:
    """A knob of kernels: what it may be, how it is written, and which kernels have it.

    To add one, add a field to TileConfig with its option here, its letter to LETTERS, and read it
    in the template. Parsing, printing, checks, files of records and headers follow. Give the
    kernels that have it their values in `KernelSpec.knobs`, and search them in
    choose/search_space.py.
    """

    letter: str
    """The letter before its value in the notation; a flag is its letter alone."""
    allowed: tuple[int, ...]
    """Values, for any kernel; (False, True) for a flag."""
    is_tile: bool = False
    """Whether it is a part of the tile: other knobs leave the traffic as it is."""
    needs: tuple[tuple[str, str], ...] = ()
    """Properties of a KernelSpec without which the knob stays at its default, each with the words
    of the error."""

    @property
    def is_flag(self) -> bool:
        """Whether the knob is true or false."""
        return self.allowed == (False, True)


def _option(letter: str, *allowed: int, default: Any = MISSING, **facts: Any) -> Any:
    return field(default=default, metadata={"option": Option(letter, allowed, **facts)})


_LOOPS = "persists", "computes one tile of rows per program"
LETTERS = "mhndkwstpu"
"""The letters of the knobs in the order of the notation."""
_FORCED = ("block_m", "block_n", "num_warps", "num_stages")
"""Knobs that are always written."""


@dataclass(frozen=True, kw_only=True, order=True)
class TileConfig:
    """The tiles and launch options of a kernel. Prints as the call that recreates it."""

    block_m: int = _option("m", *FEW_ROWS, *BLOCK_SIZES, 3 * ROWS_OF_GROUP, is_tile=True)
    """Query rows per tile; 192 are the rows of three warpgroups."""
    block_n: int = _option("n", *FEW_ROWS, *BLOCK_SIZES, is_tile=True)
    """Key-value rows per tile. In kernels that join splits: splits per step. In the preprocess
    kernel, which reads no keys: 16."""
    block_d: int = _option(
        "d", 0, *BLOCK_SIZES, default=0, is_tile=True, needs=(("sliced", "holds head dims whole"),)
    )
    """Columns of a head-dim slice; 0 for kernels that hold head dims whole."""
    num_warps: int = _option("w", 1, 2, 4, 8, 12, 16, default=4)
    """Warps per program, Triton's option. In kernels whose warpgroups have roles, those that
    compute: Triton's option is then the four of the first role (`launched_warps`)."""
    num_stages: int = _option("s", 1, 2, 3, 4, 5, 6, default=2)
    """Software pipeline depth, Triton's option."""
    descriptors: bool = _option(
        "t", False, True, default=False, needs=(("described", "has no tensor descriptors"),)
    )
    """True if streamed tiles are loaded through tensor descriptors (see descriptors.py)."""
    heads: int = _option(
        "h",
        *HEADS,
        default=1,
        is_tile=True,
        needs=(("parts", "does not split"), ("packs", "holds one head")),
    )
    """Query heads of a group that share a tile, rounded up to a power of two."""
    split_kv: int = _option(
        "k", 0, *SPLITS, default=0, is_tile=True, needs=(("parts", "does not split"),)
    )
    """Rows per split: of keys, or of queries if keys are stationary. Each split has its own
    programs. 0: not split."""
    persistent: int = _option("p", 0, 78, 114, 132, default=0, needs=(_LOOPS,))
    """Programs that compute one tile of rows after another, as many as the GPU has SMs. 0: each
    tile has its own program."""
    turns: bool = _option("u", False, True, default=False, needs=(_LOOPS,))
    """True if two computing warpgroups issue their matrix products in turn, so that the softmax of
    one runs during the products of the other."""

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if type(value) is not type(option.allowed[-1]) or value not in option.allowed:
                shown = "True or False" if option.is_flag else f"one of {option.allowed}"
                raise Unsupported(f"{name} must be {shown}, got {value!r}")

    def __repr__(self) -> str:
        shown = (f"{name}={value}" for name, value in self.values.items())
        return f"TileConfig({', '.join(shown)})"

    @property
    def rows(self) -> int:
        """Rows of a tile of scores: the query rows of all its heads."""
        return self.block_m * self.heads

    @property
    def consumers(self) -> int:
        """Computing warpgroups of a program, in kernels whose warpgroups have roles."""
        return self.num_warps // WARPS_OF_GROUP

    @property
    def values(self) -> dict[str, Any]:
        """The knobs by name, as files hold them. Knobs that few kernels have are left out at their
        defaults."""
        values = ((name, getattr(self, name)) for name in OPTIONS)
        return {name: value for name, value in values if value != _DEFAULTS.get(name)}

    @property
    def tile(self) -> tuple[int, ...]:
        """The knobs on which traffic and launches depend."""
        return _tile(self)

    @property
    def key(self) -> str:
        """Short text: `m128n64w8s3`, `m128n64d32w8s3`, `m128n64w8s3t` with tensor descriptors, or
        `m2h8n64k1024w4s3` with 8 heads per tile and 1024 rows per split.
        `TileConfig.parse(config.key) == config`."""
        values = {OPTIONS[name].letter: value for name, value in self.values.items()}
        written = ((letter, values[letter]) for letter in LETTERS if letter in values)
        return "".join(letter if value is True else f"{letter}{value}" for letter, value in written)

    @classmethod
    def parse(cls, text: str) -> TileConfig:
        """Parse a text such as `m128n64w8s3`. Raises Unsupported."""
        match = _NOTATION.fullmatch(text.strip())
        if not match:
            raise Unsupported(f"expected a config such as m128n64w8s3, got {text!r}")
        given = ((name, match[name]) for name in OPTIONS if match[name])
        values: dict[str, Any] = {
            name: OPTIONS[name].is_flag or int(value) for name, value in given
        }
        return cls(**values)


OPTIONS: dict[str, Option] = {one.name: one.metadata["option"] for one in fields(TileConfig)}
_DEFAULTS = {one.name: one.default for one in fields(TileConfig) if one.name not in _FORCED}
_tile = attrgetter(*(name for name, option in OPTIONS.items() if option.is_tile))


def _pattern() -> re.Pattern[str]:
    by_letter = {option.letter: (name, option) for name, option in OPTIONS.items()}
    text = ""
    for letter in LETTERS:
        name, option = by_letter[letter]
        digits = max(len(str(value)) for value in option.allowed)
        value = letter if option.is_flag else rf"\d{{1,{digits}}}"
        inner = f"(?P<{name}>{value})" if option.is_flag else f"{letter}(?P<{name}>{value})"
        text += inner if name in _FORCED else f"(?:{inner})?"
    return re.compile(text)


_NOTATION = _pattern()


def head_dim_chunks(head_dim: int) -> tuple[int, ...]:
    """Return one or two power-of-two widths (at least 16) that cover `head_dim` with the least
    padding.

    Tensor-core tiles have power-of-two sides, so 80 is split into 64 + 16 rather than padded to
    128. Of equal paddings, a single piece is chosen: a second piece needs its own loads and matrix
    products.
    """
    widths = [1 << i for i in range(4, 21)]
    whole = next(width for width in widths if width >= head_dim)
    pairs = [(a, b) for a in widths for b in widths if b <= a <= whole and a + b >= head_dim]
    best = min(pairs, key=sum)
    return best if sum(best) < whole else (whole,)


def shares_columns(head_dim_qk: int, head_dim_v: int) -> bool:
    """Return True if tiles of values are also tiles of keys, for values that are the first columns
    of keys."""
    keys, values = head_dim_chunks(head_dim_qk), head_dim_chunks(head_dim_v)
    if head_dim_v == head_dim_qk:
        return True
    return keys[: len(values)] == values and sum(values) == head_dim_v < head_dim_qk


def launched_warps(config: TileConfig, *, specialised: bool) -> int:
    """Return Triton's option num_warps: the warps of the first role, if warpgroups have roles."""
    return WARPS_OF_GROUP if specialised else config.num_warps


def threads_of(arch: str, num_warps: int) -> int:
    """Return the number of threads of a program: a warp has 64 on AMD's GPUs, 32 on NVIDIA's."""
    return (64 if arch.startswith("gfx") else 32) * num_warps
