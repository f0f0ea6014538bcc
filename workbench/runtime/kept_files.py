"""Write the files that a real device sends for its part of a run into the run's folder, within limits."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import BinaryIO, NamedTuple

from workbench.core.errors import MessageError
from workbench.core.files import whole_file
from workbench.runtime.frames import FilePart, foreign

MOST_FILES = 10_000
MOST_AT_ONCE = 4
"""Files that are begun and not whole yet."""
MOST_TIMES = 64
"""Limit for all files of a device together: this many times the largest allowed file."""


class _PartialFile(NamedTuple):
    file: BinaryIO
    finish: contextlib.ExitStack


class KeptFiles:
    """The files of one device.  folder: the run's folder.  most_bytes: the largest size of a file."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder, self.most_bytes = folder, most_bytes
        self._sizes: dict[str, int] = {}
        self._partial: dict[str, _PartialFile] = {}

    def take(self, part: FilePart) -> None:
        """Write a part of a file.  Raises MessageError for one that does not fit, OSError or WriteError if this machine
        refuses.
        """
        path, end = self._folder / part.path, part.offset + len(part.data)
        self._require(
            end <= self.most_bytes, part, f"would have {end:,} bytes, at most {self.most_bytes:,} are allowed"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".jsonl":
            size = path.stat().st_size if path.exists() else 0
            self._require(part.offset <= size, part, f"continues at byte {part.offset:,} of {size:,}")
            with open(path, "r+b" if part.offset else "wb") as log:
                log.seek(part.offset)
                log.write(part.data)
                log.truncate()
            self._count(part, end)
            return
        if not part.offset:
            self._abandon(part.path)
            self._require(
                len(self._partial) < MOST_AT_ONCE, part, f"is begun before {MOST_AT_ONCE} others are complete"
            )
            with contextlib.ExitStack() as opening:
                file = opening.enter_context(open(opening.enter_context(whole_file(path)), "wb"))
                self._partial[part.path] = _PartialFile(file, opening.pop_all())
        partial = self._partial.get(part.path)
        expected = 0 if partial is None else partial.file.tell()
        if partial is None or part.offset != expected:
            raise self._error(part, f"continues at byte {part.offset:,} instead of {expected:,}")
        partial.file.write(part.data)
        self._count(part, end)
        if part.is_last:
            self._partial.pop(part.path).finish.close()

    def close(self) -> None:
        """Remove incomplete files."""
        for name in list(self._partial):
            self._abandon(name)

    def _count(self, part: FilePart, nbytes: int) -> None:
        self._sizes[part.path] = nbytes
        if len(self._sizes) > MOST_FILES or sum(self._sizes.values()) > MOST_TIMES * self.most_bytes:
            self._sizes = {
                name: size
                for name, size in self._sizes.items()
                if name in self._partial or (self._folder / name).exists()
            }
            most = MOST_TIMES * self.most_bytes
            self._require(len(self._sizes) <= MOST_FILES, part, f"is one more than {MOST_FILES:,} files")
            self._require(sum(self._sizes.values()) <= most, part, f"takes all its files above {most:,} bytes")

    def _abandon(self, name: str) -> None:
        partial = self._partial.pop(name, None)
        if partial is not None:
            error = self._error(None, "is not complete")
            with contextlib.suppress(MessageError):
                partial.finish.__exit__(MessageError, error, None)

    def _require(self, fits: bool, part: FilePart, why: str) -> None:
        if not fits:
            raise self._error(part, why)

    def _error(self, part: FilePart | None, why: str) -> MessageError:
        return foreign("a part of a file", f"'{'' if part is None else part.path}' {why}")
