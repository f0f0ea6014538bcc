"""Run a job function on an engine and return its result or error; choose the root cause among several ranks' errors."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from workbench.core.errors import DeviceLostError, WorkbenchError
from workbench.runtime.context import EventChannel, RankContext
from workbench.runtime.memory import lift_all_budgets

DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a job on one rank.  error: the exception, None if the job returned; text: the remote traceback."""

    rank: int
    result: Any = None
    error: BaseException | None = None
    text: str = ""


def identify() -> int:
    """Return the engine's process number."""
    return os.getpid()


def run_job(request: bytes, function: Callable[[RankContext, Any], Any] | bytes, events: str) -> bytes:
    """Call the job's function with its context and payload; return a pickled Outcome.

    request: pickled (RankContext, payload).  function: pickled by reference, or the function itself if a notebook defines it.
    events: address of the parent's event channel.  Global settings and groups that the function left behind are reset.
    """
    rank = -1
    channel: EventChannel | None = None
    try:
        context, payload = pickle.loads(request)
        rank = context.rank
        channel = EventChannel(events, rank, context.generation)
        call = pickle.loads(function) if isinstance(function, bytes) else function
        outcome = Outcome(rank=rank, result=call(replace(context, channel=channel), payload))
        answer = pickle.dumps(outcome)
    except BaseException as error:  # the engine must survive whatever the function does, including sys.exit
        answer = pickled_error(rank, error)
    finally:
        lift_all_budgets()
        # A group can only be open if the function used torch.distributed.
        if "torch.distributed" in sys.modules:
            from workbench.runtime.process_group import close_group

            close_group()
        if channel is not None:
            channel.send(DONE, None)
            channel.close()
    return answer


def pickled_error(rank: int, error: BaseException) -> bytes:
    """Return a pickled Outcome with the error, or with a substitute if the error cannot be pickled."""
    text = "".join(traceback.format_exception(error))
    try:
        # Contexts and causes may contain objects that cannot be pickled; the text preserves them for the reader.
        answer = pickle.dumps(Outcome(rank=rank, error=error, text=text))
        pickle.loads(answer)
        return answer
    except Exception:
        stand_in = RuntimeError(f"{type(error).__name__}: {error}")
        return pickle.dumps(Outcome(rank=rank, error=stand_in, text=text))


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
    """Return whether an error, ours or gloo's, says that another device is lost."""
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
