"""Locations of records as the command line names them: `own`, `shipped`, a folder or a URL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tilegen.errors import Unsupported

if TYPE_CHECKING:
    from tilegen.store import Location

PLACE = "folder or URL, own, or shipped"


def location(text: str) -> Location:
    """Return a place that may still have to be made."""
    from tilegen.settings import place
    from tilegen.store import Location, locations

    for known in locations():
        if text in ("own", "shipped") and known.origin == text:
            return known
    return Location(place(text), "shared")


def source(text: str) -> Location:
    """Return a place that is there. Raises Unsupported for a folder that is not, Unreachable for a
    URL that does not answer."""
    return _there(location(text))


def sources(texts: Sequence[str] | None) -> list[Location]:
    """Return the places that are named, or else all that a look-up asks, as `source` does."""
    from tilegen.store import locations

    return [source(text) for text in texts] if texts else [_there(one) for one in locations()]


def answering(texts: Sequence[str] | None) -> list[Location]:
    """Return `sources(texts)`; where none is named, those that are not there are passed over with a
    warning."""
    from tilegen.store import locations
    from tilegen.store.places import pass_over
    from tilegen.store.reach import Unreachable

    if texts:
        return sources(texts)
    found: list[Location] = []
    for one in locations():
        if one.origin == "shared" and one.folder is not None and not is_folder(one.folder):
            pass_over(one, Unreachable("is not a folder"))
        else:
            found.append(one)
    return found


def shared() -> list[Location]:
    """Return the shared places, all of which are there. Raises Unsupported."""
    from tilegen.store import locations

    if found := [_there(one) for one in locations() if one.origin == "shared"]:
        return found
    raise Unsupported("expected a location, or one in TILEGEN_CACHE_PATH; found neither")


def check_file(file: Path) -> None:
    """Raise Unsupported for a path that no file can be written to: commands make no folders beside
    stores and bundles."""
    if is_folder(file):
        raise Unsupported(f"expected a file to write, got the folder {str(file)!r}")
    if not is_folder(file.absolute().parent):
        raise Unsupported(
            f"expected a folder to write {file.name!r} into, found none at "
            f"{str(file.absolute().parent)!r}; make it first"
        )


def is_folder(path: Path) -> bool:
    """True where a folder is at `path`; False also where the system refuses to look."""
    try:
        return path.is_dir()
    except OSError:  # such as a name that is too long
        return False


def _there(one: Location) -> Location:
    from tilegen.store import places
    from tilegen.store.reach import Unreachable

    if one.folder is None:
        try:
            places.names(one, "records")
        except Unreachable as error:
            raise Unreachable(f"location {one.address()!r} {error}") from error
    elif one.origin == "shared" and not is_folder(one.folder):
        raise Unsupported(
            f"expected a folder of records at {one.address()!r}, found none; check how it is "
            "spelt, and whether it is mounted"
        )
    return one
