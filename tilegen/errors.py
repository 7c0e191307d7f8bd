"""All errors that tilegen raises on purpose. Messages name the expected value, the actual value,
and the remedy."""


class TilegenError(Exception):
    """Base class: `except TilegenError` catches all errors of tilegen."""


class InvalidProblem(TilegenError, ValueError, RuntimeError):
    """The arguments do not describe an attention problem: shapes, dtypes or notation are wrong.
    Also a ValueError, as FlexAttention raises, and a RuntimeError, as SDPA and flash-attn raise."""


class Unsupported(TilegenError, NotImplementedError):
    """A well-formed request that tilegen cannot serve. Also a NotImplementedError, which is a
    RuntimeError, as PyTorch raises."""


class BuildFailed(TilegenError):
    """An emitted kernel could not be compiled, or its binary could not be loaded or launched."""


class WrongResult(TilegenError):
    """A kernel disagrees with the reference by more than the tolerance rule allows, or reads or
    writes outside its tensors (found by TILEGEN_CHECK=bounds)."""


class NoRecord(TilegenError):
    """There is no tuning record for a problem, or tuning found no config that runs."""


class InvalidRecord(TilegenError, ValueError):
    """A file of records, trials or a manifest cannot be used: it is unreadable or not JSON, or a
    field is missing, ill-typed or out of range."""
