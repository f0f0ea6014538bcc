"""The outcome of a device's job, and which of several errors explains the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.core.errors import DeviceLostError, WorkbenchError


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a job on one rank.  error: the exception, None if the job returned; text: the remote traceback."""

    rank: int
    result: Any = None
    error: BaseException | None = None
    text: str = ""


_PEERS_FAULT = 3


def root_cause(failures: Mapping[int, BaseException], died: frozenset[int] = frozenset()) -> int:
    """Return the rank whose error explains the other errors.

    A process that died has priority, then a device's report about itself, then reports about peers.
    """
    return min(failures, key=lambda rank: (rank not in died, _remoteness(failures[rank]), rank))


def only_peers_blamed(failures: Mapping[int, BaseException]) -> bool:
    """Return whether every error reports an unresponsive peer, and none a fault of the reporting device."""
    return all(_remoteness(error) == _PEERS_FAULT for error in failures.values())


def error_of(outcome: Outcome, name: str) -> BaseException:
    """Return a rank's error with the device named: in the first part of a WorkbenchError, otherwise in a note."""
    error = outcome.error
    assert error is not None
    if isinstance(error, WorkbenchError):
        if f"'{name}'" not in str(error):
            named = type(error)(f"On device '{name}': {error.asked}", error.found, error.todo)
            named.add_note(outcome.text)
            return named
        error.add_note(outcome.text)
        return error
    error.add_note(f"On device '{name}' (rank {outcome.rank}):\n{outcome.text}")
    return error


def tells_of_peer(error: BaseException) -> bool:
    """Return whether an error, ours or gloo's, reports the loss of another device."""
    if isinstance(error, DeviceLostError):
        return True
    text = f"{type(error).__name__}: {error}".lower()
    from_gloo = any(mark in text for mark in ("gloo", "connection", "peer", "timed out"))
    return not isinstance(error, WorkbenchError) and (from_gloo or text.startswith(("dist", "runtimeerror: dist")))


def _remoteness(error: BaseException) -> int:
    """Rank an error: 1 a WorkbenchError about this device, 2 another exception, 3 a peer's fault."""
    if tells_of_peer(error):
        return _PEERS_FAULT
    return 1 if isinstance(error, WorkbenchError) else 2
