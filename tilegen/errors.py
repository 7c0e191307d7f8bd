"""All errors that tilegen raises on purpose. Messages name what was expected, what was found, and
what to do."""


class TilegenError(Exception):
    """Base class: `except TilegenError` catches all errors of tilegen."""


class InvalidProblem(TilegenError, ValueError):
    """The arguments do not describe an attention problem (shapes, dtypes, notation)."""


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
    """A file of records, trials or a manifest that cannot be used: unreadable, not JSON, or with a
    field that is missing, ill-typed or out of range."""
