"""The folder that `generate` writes: nothing half-written, and a stopped run goes on."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from tilegen.bundles.manifest import MANIFEST, Binary, Manifest, binary_from, binary_values
from tilegen.compiling.compiler import CompiledKernel
from tilegen.disk import cannot_write, write_whole
from tilegen.errors import InvalidRecord
from tilegen.store.fields import Fields, parse_json
from tilegen.store.files import read_bytes, text_of

if TYPE_CHECKING:
    from tilegen.emit.identity import RenderedKernel

NOTES = ".unfinished.jsonl"
"""Binaries that no manifest names yet: the versions, then one binary a line."""

MAX_FILE = 2**26
"""Limit of a binary or source that is read [bytes]."""
MAX_MANIFEST = 2**28
"""Limit of a manifest that is read [bytes]."""


class Folder:
    """A bundle that is being written. Methods may be called from several threads.

    Files are named after what they hold, so that the manifest that is there stays true until the
    next one takes its place.
    """

    def __init__(self, path: Path, versions: dict[str, str]) -> None:
        self.path = path
        self.versions = versions
        self._lock = Lock()
        left = [found for found in (self._manifest(), self._notes()) if found]
        self._files = {name for _, some in left for one in some for name in (one.file, one.source)}
        usable = [one for of, some in left if of == versions for one in some]
        self._known = {(one.digest, one.arch): one for one in usable if self._is_whole(one)}
        lines = [versions, *map(binary_values, self._known.values())]
        write_whole(path / NOTES, "".join(f"{json.dumps(line)}\n" for line in lines).encode())

    def known(self, rendered: RenderedKernel, arch: str) -> Binary | None:
        """Return the binary of a kernel that an earlier run left whole."""
        return self._known.get((rendered.digest, arch))

    def compiled(self, binary: Binary, rendered: RenderedKernel) -> CompiledKernel:
        """Return a known binary as the compiler gave it."""
        return CompiledKernel(
            rendered=rendered,
            arch=binary.arch,
            binary=(self.path / binary.file).read_bytes(),
            reported=binary.resources,
            scratch_pointers=len(binary.arguments) - len(rendered.signature),
            seconds=0.0,
        )

    def add(self, binary: Binary, code: bytes, source: bytes) -> Binary:
        """Write the files of a binary, note it down, and return it."""
        write_whole(self.path / binary.source, source)
        write_whole(self.path / binary.file, code)
        with self._lock:
            self._files |= {binary.file, binary.source}
            try:
                with (self.path / NOTES).open("a", encoding="utf-8") as notes:
                    notes.write(f"{json.dumps(binary_values(binary))}\n")
            except OSError as error:
                raise cannot_write(self.path / NOTES, error) from error
        return binary

    def finish(self, manifest: Manifest) -> Path:
        """Write the manifest, remove the files it does not name, and return its path."""
        path = self.path / MANIFEST
        write_whole(path, manifest.to_json().encode())
        named = {name for one in manifest.binaries for name in (one.file, one.source)}
        for name in self._files - named:
            (self.path / name).unlink(missing_ok=True)
        (self.path / NOTES).unlink(missing_ok=True)  # another run may have finished before
        return path

    def _manifest(self) -> tuple[dict[str, str], list[Binary]] | None:
        """Return the versions and binaries of the manifest that is there."""
        try:
            manifest = Manifest.from_json(text_of(read(self.path / MANIFEST, MAX_MANIFEST) or b""))
        except InvalidRecord:
            return None
        return dict(manifest.versions), list(manifest.binaries)

    def _notes(self) -> tuple[dict[str, str], list[Binary]] | None:
        """Return the versions and binaries that a stopped run noted; its last line may be torn."""
        if (data := read(self.path / NOTES, MAX_MANIFEST)) is None:
            return None
        text = data.decode("utf-8", errors="replace")
        found: list[Fields] = []
        for line in text.splitlines():
            with suppress(InvalidRecord):
                found.append(parse_json(line))
        binaries: list[Binary] = []
        for one in found[1:]:
            with suppress(InvalidRecord):
                binaries.append(binary_from(one))
        return (found[0].values, binaries) if found else None

    def _is_whole(self, one: Binary) -> bool:
        return (
            sha256_of(self.path / one.file) == one.sha256
            and sha256_of(self.path / one.source) == one.source_sha256
        )


def sha256_of(path: Path) -> str:
    """Return the hexadecimal digest of a file, or an empty text where it cannot be read."""
    data = read(path)
    return "" if data is None else hashlib.sha256(data).hexdigest()


def read(path: Path, limit: int = MAX_FILE) -> bytes | None:
    """Read a regular file of a bundle; None where it cannot be read. Never waits."""
    with suppress(InvalidRecord):
        return read_bytes(path, limit)
    return None
