"""Store measured profiles on disk, keyed by machine, versions, model and settings."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from workbench.assets.fetch import cache_folder
from workbench.core.errors import ConfigError, WriteError
from workbench.core.files import try_lock
from workbench.core.serial import from_builtins, text_digest, to_builtins, write_text
from workbench.core.units import duration_words

T = TypeVar("T")

FORMAT = 2
VERSIONED = ("torch", "transformers", "numpy")


THREADS_VARIABLE = "WORKBENCH_THREADS"


def measuring_threads() -> int:
    """Return the threads with which layers are measured: one, or those of a run on this real device
    (WORKBENCH_THREADS).
    """
    return int(os.environ.get(THREADS_VARIABLE) or 1)


def host_fingerprint() -> dict[str, str]:
    """Return everything about this machine that a measurement depends on: processor, cores, system, Python and library
    versions.
    """
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": ".".join(map(str, sys.version_info[:2])),
        **{name: _version(name) for name in VERSIONED},
        **({"threads": str(measuring_threads())} if measuring_threads() > 1 else {}),
    }


def cached(
    key: Mapping[str, Any],
    measure: Callable[[], T],
    kind: type[T],
    *,
    folder: Path | None = None,
    refresh: bool = False,
    now: Callable[[], float] = time.time,
    wait: Callable[[], None] | None = None,
    distrust: Callable[[], str] | None = None,
) -> tuple[T, str]:
    """Return the measurement cached under `key` on this machine, or measure and cache it; also return a note on its
    source and age.

    key: everything that the measurement depends on besides the machine (model, sizes, settings), as JSON values.  kind:
    the measurement's class.  An unreadable file is measured again.  If the folder cannot be written, only the note says
    so.
    wait: called before another run's measurement in this folder is waited for: two at once disturb each other.  The
    other's is taken if it has the same key.  None waits for nobody, as a measurement must that may need another one.
    distrust: called after the measurement; returns why it is used but not stored, or nothing.
    """
    conditions, path = _place(key, folder)
    profile, note = (None, "asked for") if refresh else _stored(path, conditions, kind, now)
    if profile is not None:
        return profile, note
    with contextlib.nullcontext(False) if wait is None else _locked(path.parent, wait) as had_to_wait:
        if had_to_wait and not refresh:
            profile, note = _stored(path, conditions, kind, now)
            if profile is not None:
                return profile, note
        profile = measure()
        if distrust is not None and (reason := distrust()):
            return profile, f"Profile measured now ({note}), and not stored: {reason}"
        text = json.dumps(
            {"format": FORMAT, "whole": conditions, "measured_at": now(), "profile": to_builtins(profile)}
        )
        try:
            write_text(path, text + "\n")
        except WriteError as error:
            return profile, f"Profile measured now ({note}); it could not be stored in '{path.parent}': {error.found}"
    return profile, f"Profile measured now ({note})."


def _stored(
    path: Path, conditions: dict[str, Any], kind: type[T], now: Callable[[], float]
) -> tuple[T, str] | tuple[None, str]:
    """Return a stored measurement and a note on its age, or None and why there is none."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored.get("format") != FORMAT or stored.get("whole") != json.loads(json.dumps(conditions)):
            raise ValueError("made by another version")
        profile = from_builtins(stored["profile"], kind, source=f"'{path}'")
        measured_at = stored["measured_at"]
        age, day = duration_words(max(0.0, now() - measured_at)), datetime.fromtimestamp(measured_at)
        return profile, f"Profile measured {age} ago on this machine ({day:%Y-%m-%d %H:%M})."
    except FileNotFoundError:
        return None, "none was stored"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        return None, f"the stored one was unreadable: {error}"


@contextlib.contextmanager
def _locked(folder: Path, wait: Callable[[], None]) -> Iterator[bool]:
    """Let one run at a time measure, and yield whether another one did."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # writing says so
        yield False
        return
    try:
        had_to_wait = not try_lock(descriptor)
        if had_to_wait:
            wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield had_to_wait
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for a child that was forked meanwhile
        os.close(descriptor)


def forget(key: Mapping[str, Any], *, folder: Path | None = None) -> None:
    """Remove the measurement cached under `key` on this machine, if there is one."""
    with contextlib.suppress(OSError):
        _place(key, folder)[1].unlink()


def _place(key: Mapping[str, Any], folder: Path | None) -> tuple[dict[str, Any], Path]:
    """Return everything that a measurement depends on, and its file."""
    conditions = {"host": host_fingerprint(), "key": dict(key)}
    digest = text_digest(json.dumps(conditions, sort_keys=True), 20)
    return conditions, (folder or cache_folder() / "profiles") / f"{digest}.json"


@cache
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for name in ("model name", "Hardware", "Model"):
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return platform.processor() or platform.machine()
