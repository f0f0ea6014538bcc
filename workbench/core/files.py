"""Write files completely or not at all, and report in one sentence if a path cannot be written."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from workbench.core.errors import WriteError

_OPEN_HERE = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")
_NAMED = {"/dev/stdout": 1, "/dev/stderr": 2}
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
LIMITS = {
    errno.EFBIG: "Raise the limit on the size of a file (ulimit -f unlimited).",
    errno.EMFILE: "Raise the limit on open files (ulimit -n 1024).",
    errno.ENFILE: "Close other programs: the whole system has too many open files.",
}
"""By error number, what to do about a limit of the system."""


def advice(number: int | None) -> str:
    """Return what to do about a file that the system refuses to open or write.  number: the error's number."""
    if number in FULL_DISK:
        return "Free some space, or choose another place."
    return LIMITS.get(number or 0, "Choose another place.")


@contextlib.contextmanager
def whole_file(path: Path | str) -> Iterator[Path]:
    """Yield the path of an empty temporary file; when the block ends, the file is on the disk and replaces `path`.

    If the block fails or is interrupted, the old file is unchanged.  A link stays a link: its target is replaced.
    A new file gets its permissions from the umask, an old one keeps them.
    A character device (/dev/null, a terminal) and an open output of this process (/dev/stdout) are written directly.
    Raises WriteError for a folder, a pipe, a socket or a disk, and if the system refuses.
    """
    path = Path(path)
    with reporting_refusal(path):
        target, through = _target(path)
        if through is None:
            target.parent.mkdir(parents=True, exist_ok=True)
        folder = target.parent if through is None else Path(tempfile.gettempdir())
        part = folder / f"{target.name[:64]}.{secrets.token_hex(4)}.part"
        descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if through is None else 0o600)
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        os.close(descriptor)
        try:
            yield part
            if through is None:
                _replace(target, part, mode)
            else:
                with (
                    open(part, "rb") as source,
                    open(through, "ab", buffering=0, closefd=isinstance(through, Path)) as sink,
                ):
                    shutil.copyfileobj(source, sink)
        finally:
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def quick_file(path: Path, former: Path | None = None) -> Iterator[Path]:
    """Yield the path of a temporary file; when the block ends, it replaces `path`, without waiting for the disk.

    It outlives this process, however that ends, but perhaps not a power failure.  If the block fails, the old file is
    unchanged.
    former: a file whose place on the disk it takes.  The temporary file then has that file's content, which is to be
    overwritten: this needs no space on a full disk, and is quicker (14 MB: 9 ms instead of 29).  A link is not
    followed.
    """
    part = path.with_name(f"{path.name}.part")
    with reporting_refusal(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            remove(part)
            if former is None or former.is_symlink() or not former.is_file():
                part.touch()
            else:
                os.replace(former, part)
            yield part
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def require_writable(*paths: Path | str | None) -> None:
    """Raise WriteError if whole_file would refuse one of the paths.  Call it before the work whose result
    goes there.
    """
    for path in (path for path in paths if path is not None):
        with contextlib.suppress(_OnlyTried), whole_file(path):
            raise _OnlyTried


def make_folder(folder: Path | str) -> Path:
    """Make a folder and its parents, and return it.  Raises WriteError if a file has that name or the
    system refuses.
    """
    folder = Path(folder)
    with reporting_refusal(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that it holds, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def place_folder(complete: Path, path: Path) -> None:
    """Give a folder of a cache its name.  If another process was faster, its folder, which is the same, stays.

    Raises OSError.
    """
    try:
        os.rename(complete, path)
    except OSError:
        if not path.is_dir():
            raise


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open folder until it is closed, and return whether that was possible: no other process has it.

    A lock on the folder itself leaves no file behind, and ends with the process in any case.  On a file system without
    locks nobody has one.
    shared: the lock of somebody who only looks.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # the file system has no locks
    return True


def files_digest(paths: Iterable[Path]) -> str:
    """Return a digest of files, in this order, each read once and in parts."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _OnlyTried(Exception):
    pass


@contextlib.contextmanager
def reporting_refusal(path: Path) -> Iterator[None]:
    """Raise WriteError if the system refuses what the block does with a file."""
    try:
        yield
    except OSError as error:
        named = str(error.filename or path)
        where = "" if named == str(path) or named.endswith(".part") else f": '{named}'"
        raise WriteError(
            f"Writing '{path}' was asked for.", f"{error.strerror or error}{where}.", advice(error.errno)
        ) from error


def _target(path: Path) -> tuple[Path, Path | int | None]:
    """Return the file that a path refers to, and the target to write directly: a device, an open descriptor,
    or None.
    """
    opened = _OPEN_HERE.fullmatch(str(path))
    if opened or str(path) in _NAMED:
        descriptor = int(opened[1]) if opened else _NAMED[str(path)]
        os.fstat(descriptor)  # raises if it is closed
        return path, descriptor
    try:
        status = path.stat()
    except FileNotFoundError:
        return Path(os.path.realpath(path)), None
    kind = stat.S_IFMT(status.st_mode)
    request = f"Writing '{path}' was asked for."
    if kind == stat.S_IFDIR:
        raise WriteError(request, "It is a folder.", "Name a file in it.")
    if kind not in (stat.S_IFREG, stat.S_IFCHR):
        names = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFBLK: "a disk"}
        raise WriteError(request, f"It is {names.get(kind, 'something else')}, not a file.", "Name a file.")
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return (Path(os.path.realpath(path)), None) if kind == stat.S_IFREG else (path, path)


def _replace(target: Path, part: Path, mode: int) -> None:
    """Move a finished file over another, with its permissions or else `mode`, in an order that survives a power
    failure.
    """
    os.chmod(part, stat.S_IMODE(target.stat().st_mode) if target.exists() else mode)
    with open(part, "rb") as written:
        os.fsync(written.fileno())
    os.replace(part, target)
    sync_folder(target.parent)


def nearest_folder(path: Path) -> Path:
    """Return a folder, or its nearest existing parent."""
    return next(place for place in (path, *path.absolute().parents) if place.is_dir())


def missing_folders(path: Path) -> list[Path]:
    """Return a folder and its parents that do not exist, the innermost first."""
    return [place for place in (path, *path.parents) if not os.path.lexists(place)]
