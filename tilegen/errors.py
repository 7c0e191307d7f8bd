"""All errors that tilegen raises on purpose. Messages name the expected value, the actual value,
and the remedy."""


class TilegenError(Exception):
    """Base class: `except TilegenError` catches all errors of tilegen."""


class InvalidProblem(TilegenError, ValueError):
    """The arguments do not describe an attention problem: shapes, dtypes or notation are wrong."""


class Unsupported(TilegenError):
    """A well-formed request that tilegen cannot serve."""


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
