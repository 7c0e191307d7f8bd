"""The knobs of a kernel (`TileConfig`), and the tiles that cover a head dim."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
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


_ALWAYS = ("block_m", "block_n", "num_warps", "num_stages")


@dataclass(frozen=True, kw_only=True, order=True)
class TileConfig:
    """The tiles and launch options of a kernel. Prints as the call that recreates it."""

    block_m: int
    """Query rows per tile."""
    block_n: int
    """Key-value rows per tile. In kernels that join splits: splits per step. In the preprocess
    kernel, which reads no keys: 16."""
    num_warps: int = 4
    """Warps per program, Triton's option."""
    num_stages: int = 2
    """Software pipeline depth, Triton's option."""
    block_d: int = 0
    """Columns of a head-dim slice; 0 for kernels that hold head dims whole."""
    descriptors: bool = False
    """True if streamed tiles are loaded through tensor descriptors (see descriptors.py)."""
    heads: int = 1
    """Query heads of a group that share a tile, rounded up to a power of two."""
    split_kv: int = 0
    """Rows per split: of keys, or of queries if keys are stationary. Each split has its own
    programs. 0: not split."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("block_m", (*FEW_ROWS, *BLOCK_SIZES)),
            ("block_n", (*FEW_ROWS, *BLOCK_SIZES)),
            ("block_d", (0, *BLOCK_SIZES)),
            ("heads", HEADS),
            ("split_kv", (0, *SPLITS)),
            ("num_warps", (1, 2, 4, 8, 16)),
            ("num_stages", (1, 2, 3, 4, 5, 6)),
        ):
            value = getattr(self, name)
            if type(value) is not int or value not in allowed:
                raise Unsupported(f"{name} must be one of {allowed}, got {value!r}")
        if type(self.descriptors) is not bool:
            raise Unsupported(f"descriptors must be True or False, got {self.descriptors!r}")

    def __repr__(self) -> str:
        slice_ = f", block_d={self.block_d}" if self.block_d else ""
        described = ", descriptors=True" if self.descriptors else ""
        packed = f", heads={self.heads}" if self.heads > 1 else ""
        split = f", split_kv={self.split_kv}" if self.split_kv else ""
        return (
            f"TileConfig(block_m={self.block_m}, block_n={self.block_n}{slice_}, "
            f"num_warps={self.num_warps}, num_stages={self.num_stages}{described}{packed}{split})"
        )

    @property
    def rows(self) -> int:
        """Rows of a tile of scores: the query rows of all its heads."""
        return self.block_m * self.heads

    @property
    def values(self) -> dict[str, Any]:
        """The knobs by name, as files hold them. Knobs that few kernels have are left out at their
        defaults."""
        usual = {field.name: field.default for field in fields(self)}
        return {
            name: value
            for name, value in asdict(self).items()
            if value != usual[name] or name in _ALWAYS
        }

    @property
    def key(self) -> str:
        """Short text: `m128n64w8s3`, `m128n64d32w8s3`, `m128n64w8s3t` with tensor descriptors, or
        `m2h8n64k1024w4s3` with 8 heads per tile and 1024 rows per split.
        `TileConfig.parse(config.key) == config`."""
        packed = f"h{self.heads}" if self.heads > 1 else ""
        slice_ = f"d{self.block_d}" if self.block_d else ""
        split = f"k{self.split_kv}" if self.split_kv else ""
        described = "t" if self.descriptors else ""
        sides = f"m{self.block_m}{packed}n{self.block_n}{slice_}{split}"
        return f"{sides}w{self.num_warps}s{self.num_stages}{described}"

    @classmethod
    def parse(cls, text: str) -> TileConfig:
        """Parse a text such as `m128n64w8s3`. Raises Unsupported."""
        match = re.fullmatch(
            r"m(\d{1,4})(?:h(\d{1,4}))?n(\d{1,4})(?:d(\d{1,4}))?(?:k(\d{1,5}))?"
            r"w(\d{1,2})s(\d{1,2})(t?)",
            text.strip(),
        )
        if not match:
            raise Unsupported(f"expected a config such as m128n64w8s3, got {text!r}")
        *numbers, described = match.groups(default="0")
        block_m, heads, block_n, block_d, split_kv, num_warps, num_stages = map(int, numbers)
        return cls(
            block_m=block_m,
            block_n=block_n,
            num_warps=num_warps,
            num_stages=num_stages,
            block_d=block_d,
            descriptors=described == "t",
            heads=heads if match[2] else 1,
            split_kv=split_kv,
        )


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


def threads_of(arch: str, num_warps: int) -> int:
    """Return the number of threads of a program: a warp has 64 on AMD's GPUs, 32 on NVIDIA's."""
    return (64 if arch.startswith("gfx") else 32) * num_warps
