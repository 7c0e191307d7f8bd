"""Every error tilegen raises on purpose; each says what was expected, found, and what to do."""


class TilegenError(Exception):
    """Base class: `except TilegenError` catches everything below."""


class InvalidProblem(TilegenError, ValueError):
    """The arguments do not describe an attention problem (shapes, dtypes, notation)."""


class Unsupported(TilegenError):
    """A well-formed request that tilegen cannot serve."""


class BuildFailed(TilegenError):
    """Triton could not compile an emitted kernel."""


class WrongResult(TilegenError):
    """A kernel disagrees with the reference by more than the tolerance rule allows."""


class NoRecord(TilegenError):
    """No tuning record matches; the message names the closest ones and how they differ."""


class InvalidRecord(TilegenError, ValueError):
    """A record file that cannot be trusted: unreadable, ill-typed or out of range."""
