"""What a kernel may be tuned over: `TileConfig`, the names of the kernels, and what makes a config
legal."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from tilegen.errors import Unsupported

Kernel = Literal["fwd", "bwd_preprocess", "bwd_dkdv", "bwd_dq"]
"""fwd: out and lse. bwd_preprocess: delta = rowsum(out * dout). bwd_dkdv, bwd_dq: the gradients."""

KERNELS: tuple[Kernel, ...] = get_args(Kernel)

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

    def __post_init__(self) -> None:
        for name, allowed in (
            ("block_m", BLOCK_SIZES),
            ("block_n", BLOCK_SIZES),
            ("num_warps", (1, 2, 4, 8, 16)),
            ("num_stages", (1, 2, 3, 4, 5, 6)),
        ):
            value = getattr(self, name)
            if type(value) is not int or value not in allowed:
                raise Unsupported(f"{name} must be one of {allowed}, got {value!r}")

    @property
    def key(self) -> str:
        """Short text, `m128n64w8s3`; `TileConfig.parse(config.key) == config`."""
        return f"m{self.block_m}n{self.block_n}w{self.num_warps}s{self.num_stages}"

    @classmethod
    def parse(cls, text: str) -> TileConfig:
        """Return the config that `m128n64w8s3` describes. Raises Unsupported."""
        match = re.fullmatch(r"m(\d{1,4})n(\d{1,4})w(\d{1,2})s(\d{1,2})", text.strip())
        if not match:
            raise Unsupported(f"expected a config such as m128n64w8s3, got {text!r}")
        block_m, block_n, num_warps, num_stages = map(int, match.groups())
        return cls(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)


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
