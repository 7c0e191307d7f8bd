"""The folder that `generate` writes: each file atomically, so that a stopped run can continue."""

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
"""Name of the file that lists binaries without a manifest: a line of versions, then a line for
each binary."""

MAX_FILE = 2**26
"""Maximum size of a binary or source [bytes]."""
MAX_MANIFEST = 2**28
"""Maximum size of a manifest [bytes]."""


class Folder:
    """A bundle that is being written. Methods may be called from several threads.

    File names contain digests of the content, so that an earlier manifest stays valid until the new
    manifest replaces it.
    """

    def __init__(self, path: Path, versions: dict[str, str]) -> None:
        self.path = path
        self.versions = versions
        self._lock = Lock()
        self._files: set[str] = set()
        self._known: dict[tuple[str, str], Binary] = {}
        for made_with, binaries in filter(None, (self._manifest(), self._notes())):
            for binary in binaries:
                self._files |= {binary.file, binary.source}
                if made_with == versions and self._is_whole(binary):
                    self._known[binary.digest, binary.arch] = binary
        lines = [versions, *map(binary_values, self._known.values())]
        write_whole(path / NOTES, "".join(f"{json.dumps(line)}\n" for line in lines).encode())

    def known(self, rendered: RenderedKernel, arch: str) -> Binary | None:
        """Return the binary of a kernel if an earlier run completed it; otherwise None."""
        return self._known.get((rendered.digest, arch))

    def compiled(self, binary: Binary, rendered: RenderedKernel) -> CompiledKernel:
        """Read a known binary, as if the compiler had returned it now."""
        return CompiledKernel(
            rendered=rendered,
            arch=binary.arch,
            binary=(self.path / binary.file).read_bytes(),
            reported=binary.resources,
            scratch_pointers=len(binary.arguments) - len(rendered.signature),
            seconds=0.0,
        )

    def add(self, binary: Binary, code: bytes, source: bytes) -> Binary:
        """Write the files of a binary, add it to the notes, and return it."""
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
        """Write the manifest, remove files that it does not name, and return its path."""
        path = self.path / MANIFEST
        write_whole(path, manifest.to_json().encode())
        named = {name for binary in manifest.binaries for name in (binary.file, binary.source)}
        for name in self._files - named:
            (self.path / name).unlink(missing_ok=True)
        (self.path / NOTES).unlink(missing_ok=True)  # another run may have finished before
        return path

    def _manifest(self) -> tuple[dict[str, str], list[Binary]] | None:
        """Read the versions and binaries of the earlier manifest; None without a valid manifest."""
        try:
            manifest = Manifest.from_json(text_of(read(self.path / MANIFEST, MAX_MANIFEST) or b""))
        except InvalidRecord:
            return None
        return dict(manifest.versions), list(manifest.binaries)

    def _notes(self) -> tuple[dict[str, str], list[Binary]] | None:
        """Read the versions and binaries in the notes of a stopped run; None without notes."""
        if (data := read(self.path / NOTES, MAX_MANIFEST)) is None:
            return None
        text = data.decode("utf-8", errors="replace")
        entries: list[Fields] = []
        for line in text.splitlines():
            with suppress(InvalidRecord):  # the last line may have been cut
                entries.append(parse_json(line))
        binaries: list[Binary] = []
        for entry in entries[1:]:
            with suppress(InvalidRecord):
                binaries.append(binary_from(entry))
        return (entries[0].values, binaries) if entries else None

    def _is_whole(self, binary: Binary) -> bool:
        return (
            sha256_of(self.path / binary.file) == binary.sha256
            and sha256_of(self.path / binary.source) == binary.source_sha256
        )


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file; empty if it cannot be read."""
    data = read(path)
    return "" if data is None else hashlib.sha256(data).hexdigest()


def read(path: Path, limit: int = MAX_FILE) -> bytes | None:
    """Read a regular file of a bundle; None if it cannot be read. Never blocks."""
    with suppress(InvalidRecord):
        return read_bytes(path, limit)
    return None


def damage(path: Path, names: list[str]) -> str:
    """Describe files that are not what the manifest of a folder says."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{names[0]}{more} in {path} is missing or not what the manifest says; "
        "copy the bundle again, or generate it again"
    )
