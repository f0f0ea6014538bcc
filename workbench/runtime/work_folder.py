"""Reserve a run's state folder for that run, and report a full disk before or during the run."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from workbench.core.errors import CacheError, ConfigError, WorkbenchError, WriteError
from workbench.core.files import FULL_DISK, missing_folders, nearest_folder, try_lock
from workbench.core.units import size_words

_MOST_REMOVALS = 5
"""How often a run makes its folder again that others, which end, remove."""
_FULL_WORDS = re.compile(
    r"no space left on device|disk quota exceeded", re.IGNORECASE
)  # libraries keep the text, not the error number


@contextlib.contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Lock the folder for this run.  Raises ConfigError if the folder cannot be created or another run uses it."""
    request = f"A run in the folder '{folder}' was asked for."
    created = missing_folders(folder)
    descriptor = None
    try:
        descriptor = _locked(folder, request)
        if descriptor is None:
            created.clear()  # they are the other run's now, perhaps still empty
            raise ConfigError(
                request, "Another run is using it now.", "Wait for it to end, or choose another with --workdir."
            )
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):  # leave no empty folders behind
            for place in created:
                place.rmdir()  # while it is locked: a run that begins now sees that it is gone, and makes it again
        if descriptor is not None:
            os.close(descriptor)


def _locked(folder: Path, request: str) -> int | None:
    """Make and lock a folder; return its descriptor, None if another run has it.  Raises ConfigError."""
    for is_last in (*[False] * _MOST_REMOVALS, True):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            descriptor = os.open(folder, os.O_RDONLY)
        except (OSError, ValueError) as error:  # ValueError: a path with a null byte
            if isinstance(error, FileNotFoundError) and not is_last:
                continue  # another run has ended and removed it
            problem = f"It cannot be written to: {getattr(error, 'strerror', error)}."
            raise ConfigError(request, problem, "Choose another with --workdir or WORKBENCH_CACHE.") from error
        if not try_lock(descriptor):
            os.close(descriptor)
            return None
        if is_last or (folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat())):
            break
        os.close(descriptor)
    return descriptor


def require_disk(folder: Path, nbytes: int) -> None:
    """Raise CacheError if `nbytes` plus a tenth do not fit on the folder's disk."""
    free = shutil.disk_usage(nearest_folder(folder)).free
    if free < 1.1 * nbytes:
        raise CacheError(
            f"The activation cache needs {size_words(nbytes)} more in '{folder}', and a tenth to spare.",
            f"{size_words(free)} are free.",
            "Free some space, use fewer samples, or point --workdir or WORKBENCH_CACHE to another disk.",
        )


def is_full_disk(error: BaseException) -> bool:
    """Return whether an error, of the system or of a library, means that a disk is full."""
    return (isinstance(error, OSError) and error.errno in FULL_DISK) or bool(_FULL_WORDS.search(str(error)))


@contextlib.contextmanager
def reporting_full_disk(folder: Path) -> Iterator[None]:
    """Raise CacheError if the block fails because the folder's disk is full."""
    try:
        yield
    except Exception as error:
        if not is_full_disk(error) or (isinstance(error, WorkbenchError) and not isinstance(error, WriteError)):
            raise
        free = shutil.disk_usage(nearest_folder(folder)).free
        raise CacheError(
            f"The run was writing to '{folder}'.",
            f"The disk is full ({size_words(free)} are free).",
            "Free some space and continue with --resume (resume=True), or choose another disk with --workdir.",
        ) from error
