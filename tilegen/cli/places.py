"""Locations of records as command-line arguments: `own`, `shipped`, a folder or a URL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tilegen.errors import Unsupported

if TYPE_CHECKING:
    from tilegen.store import Location

PLACE = "folder or URL, own, or shipped"


def location(text: str) -> Location:
    """Return a location, which need not exist yet."""
    from tilegen.environment import place
    from tilegen.store import Location, locations

    for known in locations():
        if text in ("own", "shipped") and known.origin == text:
            return known
    return Location(place(text), "shared")


def source(text: str) -> Location:
    """Return a location that exists. Raises Unsupported for a missing folder, and Unreachable for a
    URL that does not answer."""
    return _there(location(text))


def sources(texts: Sequence[str] | None) -> list[Location]:
    """Return the named locations, by default all that a look-up reads. Raises as `source` does."""
    from tilegen.store import locations

    return [source(text) for text in texts] if texts else [_there(place) for place in locations()]


def answering(texts: Sequence[str] | None) -> list[Location]:
    """Return `sources(texts)`. Without `texts`, skip missing shared folders with a warning."""
    from tilegen.store import locations
    from tilegen.store.places import pass_over
    from tilegen.store.remote import Unreachable

    if texts:
        return sources(texts)
    present: list[Location] = []
    for place in locations():
        if place.origin == "shared" and place.folder is not None and not is_folder(place.folder):
            pass_over(place, Unreachable("is not a folder"))
        else:
            present.append(place)
    return present


def shared() -> list[Location]:
    """Return the shared locations. Raises Unsupported if there is none, or one is missing."""
    from tilegen.store import locations

    if places := [_there(place) for place in locations() if place.origin == "shared"]:
        return places
    raise Unsupported("expected a location, or one in TILEGEN_CACHE_PATH; found neither")


def check_file(file: Path) -> None:
    """Raise Unsupported for a path that no file can be written to. Commands create folders only for
    stores and bundles."""
    if is_folder(file):
        raise Unsupported(f"expected a file to write, got the folder {str(file)!r}")
    if not is_folder(file.absolute().parent):
        raise Unsupported(
            f"expected a folder to write {file.name!r} into, found none at "
            f"{str(file.absolute().parent)!r}; make it first"
        )


def is_folder(path: Path) -> bool:
    """Check whether `path` is a folder; False also if the system cannot check."""
    try:
        return path.is_dir()
    except OSError:  # such as a name that is too long
        return False


def _there(place: Location) -> Location:
    from tilegen.store import places
    from tilegen.store.remote import Unreachable

    if place.folder is None:
        try:
            places.names(place, "records")
        except Unreachable as error:
            raise Unreachable(f"location {place.address()!r} {error}") from error
    elif place.origin == "shared" and not is_folder(place.folder):
        raise Unsupported(
            f"expected a folder of records at {place.address()!r}, found none; check how it is "
            "spelt, and whether it is mounted"
        )
    return place
