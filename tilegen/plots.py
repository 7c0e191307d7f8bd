"""Files of plots, which matplotlib draws (the extra `plot`)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilegen.disk import write_whole
from tilegen.errors import Unsupported

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_file(file: Path, formats: Sequence[str]) -> None:
    """Check that a plot can be written to a file, whose name ends in one of `formats`. Raises
    Unsupported."""
    if file.suffix not in formats:
        raise Unsupported(f"expected a plot to end in {', '.join(formats)}, got {str(file)!r}")
    if not file.absolute().parent.is_dir():
        raise Unsupported(f"no folder {str(file.absolute().parent)!r} to write the plot to")
    try:
        import_module("matplotlib")
    except ImportError as error:
        raise Unsupported("--plot needs matplotlib: pip install 'tilegen[plot]'") from error


def save(figure: Figure, file: Path, **options: Any) -> None:
    """Write a figure to a file, whole or not at all."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=file.suffix.removeprefix("."), **options)
    write_whole(file, drawn.getvalue())
