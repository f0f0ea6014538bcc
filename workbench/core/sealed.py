"""Seal the files that a run reads back: each names its owner and carries a digest, so that a changed, truncated or
swapped file is never used silently.

A log is a text file of JSON lines [content, digest].  Its first line names the owner; the digest of a line covers all
lines up to it.
A document is a log with one line after the owner.  Large binary content has a checksum that starts from the owner's
name.
Nothing here is secret: seals show damage and mistakes, not forgery.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from workbench.core.errors import ConfigError, DamagedError
from workbench.core.files import reporting_refusal, whole_file
from workbench.core.serial import NOT_JSON, from_json, shown
from workbench.core.units import with_capital

T = TypeVar("T")
Content = bytes | memoryview


NO_FILE = "it is not a file"


def owner_of(run: str, path: Path) -> str:
    """Return the name under which a run owns a file.  run: the run's fingerprint."""
    return f"{path.name} of run {run[:16]}"


def checksum(start: str | int, content: Content = b"") -> int:
    """Return the CRC-32 of some content.  start: its owner's name, or the checksum of the content before it."""
    before = zlib.crc32(start.encode()) if isinstance(start, str) else start
    return zlib.crc32(content, before)


def digest(before: str, content: Content) -> str:
    """Return a digest of some content and of everything before it.  before: the previous digest, or ''."""
    return hashlib.blake2b(content, key=before.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """The intact beginning of a log.

    owner: None if the first line is not intact.  contents: contents of the lines after it, as JSON.  nbytes: length of
    the intact lines in the file.  seal: the last one's digest.  damage: the fault of the next line; '' if there is no
    line, or if a crash cut it off.
    """

    owner: Any = None
    contents: tuple[bytes, ...] = ()
    nbytes: int = 0
    seal: str = ""
    damage: str = ""


class SealedLog:
    """Writes a log.  Every line is a value as JSON.  A crash can only cut off the last line.

    Raises WriteError if the system refuses.
    """

    def __init__(self, path: Path, owner: Any, *, intact: Lines | None = None, syncs: bool = False) -> None:
        """Begin a log, or continue after its intact lines.  syncs: whether to wait until every line is on the disk."""
        self.path, self._syncs, self._seal = path, syncs, ""
        with reporting_refusal(path):
            if intact is not None and intact.nbytes:
                os.truncate(path, intact.nbytes)
                self._seal = intact.seal
            else:
                path.write_bytes(b"")
                self.append(owner)

    def append(self, value: Any) -> None:
        """Write a line."""
        line, self._seal = _line(self._seal, value)
        with reporting_refusal(self.path), open(self.path, "ab") as file:
            file.write(line)
            if self._syncs:
                file.flush()
                os.fsync(file.fileno())


def first_line(owner: Any) -> bytes:
    """Return the first line of an owner's log."""
    return _line("", owner)[0]


def read_lines(path: Path) -> Lines:
    """Return a log's intact lines.  Raises DamagedError if it is no file (a folder, a pipe, a link to nothing), and
    OSError.
    """
    if not path.is_file() and os.path.lexists(path):
        raise damaged(path, NO_FILE)
    return lines_of(path.read_bytes())


def lines_of(data: bytes) -> Lines:
    """Return the intact lines of a log's content."""
    contents: list[bytes] = []
    nbytes, seal, damage = 0, "", ""
    complete, newline, _ = data.rpartition(b"\n")
    for number, line in enumerate(complete.split(b"\n") if newline else (), start=1):
        try:
            content, line_seal = msgspec.json.decode(line, type=tuple[msgspec.Raw, str])
        except NOT_JSON:
            damage = f"line {number} was changed after it was written"
            break
        if line_seal != (expected := digest(seal, content)):
            damage = f"line {number} was changed after it was written, or lines before it were"
            break
        contents.append(bytes(content))
        nbytes, seal = nbytes + len(line) + 1, expected
    owner = msgspec.json.decode(contents[0]) if contents else None
    return Lines(owner=owner, contents=tuple(contents[1:]), nbytes=nbytes, seal=seal, damage=damage)


def require_owner(path: Path, stored_owner: Any, owner: Any) -> None:
    """Raise DamagedError if a file has another owner."""
    if stored_owner != msgspec.to_builtins(owner):
        raise damaged(path, f"it belongs to {shown(stored_owner) if stored_owner else 'nobody'}")


def damaged(path: Path, why: str) -> DamagedError:
    """Return the error for a file that cannot be used.  why: a clause, such as 'line 3 was changed'."""
    return DamagedError(
        f"'{path.name}' was to be read.",
        f"{with_capital(why)}.",
        "It is not used; its content has to be computed again.",
    )


def write_sealed(path: Path, owner: Any, value: Any) -> None:
    """Write a document completely or not at all.  Raises WriteError."""
    first, seal = _line("", owner)
    with whole_file(path) as part:
        part.write_bytes(first + _line(seal, value)[0])


def read_sealed(path: Path, owner: Any, kind: type[T]) -> T:
    """Return a document's value.  Raises DamagedError if it was changed or truncated, or belongs to another owner, and
    OSError.
    """
    lines = read_lines(path)
    if lines.damage or len(lines.contents) != 1 or path.stat().st_size != lines.nbytes:
        raise damaged(path, lines.damage or "it was cut")
    require_owner(path, lines.owner, owner)
    try:
        return from_json(lines.contents[0], kind, source=f"'{path}'")
    except ConfigError as error:  # written by another version
        raise damaged(path, f"it does not read: {error.found.rstrip('.')}") from error


def _line(before: str, value: Any) -> tuple[bytes, str]:
    content = msgspec.json.encode(value)
    seal = digest(before, content)
    return b'[%b,"%b"]\n' % (content, seal.encode()), seal
