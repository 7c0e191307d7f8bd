"""The knobs of a kernel: `TileConfig`; and how head dims are covered by tiles."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tilegen.errors import Unsupported

Kernel = str
"""The name of an emitted kernel; templates/README.md says what each computes."""
Family = str
"""The name of a family: how a pass is computed."""

Dim = Literal["qk", "v"]
"""A head dim: that of q and k, or that of v."""

BLOCK_SIZES = (16, 32, 64, 128, 256)
NUM_WARPS = (4, 8)
NUM_STAGES = (1, 2, 3, 4)


@dataclass(frozen=True, kw_only=True, order=True)
class TileConfig:
    """One tile choice. Prints as the call that re-creates it."""

    block_m: int
    """Query rows per tile."""
    block_n: int
    """Key-value rows per tile; the preprocess kernel has none and keeps it at 16."""
    num_warps: int = 4
    """Warps per program, Triton's option."""
    num_stages: int = 2
    """Software pipeline depth, Triton's option."""
    block_d: int = 0
    """Columns of a head-dim slice; 0 for kernels that hold head dims whole."""
    descriptors: bool = False
    """True: streamed tiles are loaded through tensor descriptors (see descriptors.py)."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("block_m", BLOCK_SIZES),
            ("block_n", BLOCK_SIZES),
            ("block_d", (0, *BLOCK_SIZES)),
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
        return (
            f"TileConfig(block_m={self.block_m}, block_n={self.block_n}{slice_}, "
            f"num_warps={self.num_warps}, num_stages={self.num_stages}{described})"
        )

    @property
    def key(self) -> str:
        """Short text, `m128n64w8s3`, `m128n64d32w8s3`, or `m128n64w8s3t` with tensor descriptors;
        `TileConfig.parse(config.key) == config`."""
        slice_ = f"d{self.block_d}" if self.block_d else ""
        described = "t" if self.descriptors else ""
        sides = f"m{self.block_m}n{self.block_n}{slice_}"
        return f"{sides}w{self.num_warps}s{self.num_stages}{described}"

    @classmethod
    def parse(cls, text: str) -> TileConfig:
        """Return the config that `m128n64w8s3` describes. Raises Unsupported."""
        match = re.fullmatch(
            r"m(\d{1,4})n(\d{1,4})(?:d(\d{1,4}))?w(\d{1,2})s(\d{1,2})(t?)", text.strip()
        )
        if not match:
            raise Unsupported(f"expected a config such as m128n64w8s3, got {text!r}")
        *numbers, described = match.groups(default="0")
        block_m, block_n, block_d, num_warps, num_stages = map(int, numbers)
        return cls(
            block_m=block_m,
            block_n=block_n,
            num_warps=num_warps,
            num_stages=num_stages,
            block_d=block_d,
            descriptors=described == "t",
        )


def head_dim_chunks(head_dim: int) -> tuple[int, ...]:
    """Return one or two power-of-two widths (at least 16) that cover `head_dim` with the least
    padding.

    Tensor-core tiles have power-of-two sides: 80 is split into 64 + 16 rather than padded to 128.
    Ties go to one piece, since a second one costs its own loads and matrix products.
    """
    widths = [1 << i for i in range(4, 21)]
    one = next(width for width in widths if width >= head_dim)
    pairs = [(a, b) for a in widths for b in widths if b <= a <= one and a + b >= head_dim]
    best = min(pairs, key=sum)
    return best if sum(best) < one else (one,)


def threads_of(arch: str, config: TileConfig) -> int:
    """Return the threads of one program."""
    return (64 if arch.startswith("gfx") else 32) * config.num_warps
