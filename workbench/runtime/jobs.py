"""Run one job function on an engine and bring its result, or its error, back whole (runs inside the engine)."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from workbench.runtime.context import EventChannel, RankContext
from workbench.runtime.memory import lift_all_budgets

DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a job on one rank.  error: the exception, None if it returned; text: the remote traceback."""

    rank: int
    result: Any = None
    error: BaseException | None = None
    text: str = ""


def identify() -> int:
    """Return the engine's process number."""
    return os.getpid()


def run_job(request: bytes, function: Callable[[RankContext, Any], Any] | bytes, events: str) -> bytes:
    """Call the job's function with its context and payload; return a pickled Outcome.

    request: pickled (RankContext, payload).  function: pickled by reference, or the function itself when it lives in a
    notebook.  events: address of the parent's event channel.  Whatever the function left set or open is put right.
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
    except BaseException as error:  # the engine must live on whatever the function does, sys.exit included
        answer = pickled_error(rank, error)
    finally:
        lift_all_budgets()
        # Only a function that used torch.distributed can have left a group open.
        if "torch.distributed" in sys.modules:
            from workbench.runtime.process_group import close_group

            close_group()
        if channel is not None:
            channel.send(DONE, None)
            channel.close()
    return answer


def pickled_error(rank: int, error: BaseException) -> bytes:
    """Return a pickled Outcome with the error, or with a stand-in for one that cannot be pickled."""
    text = "".join(traceback.format_exception(error))
    try:
        # Contexts and causes may hold what cannot be pickled; the text keeps them for the reader.
        answer = pickle.dumps(Outcome(rank=rank, error=error, text=text))
        pickle.loads(answer)
        return answer
    except Exception:
        stand_in = RuntimeError(f"{type(error).__name__}: {error}")
        return pickle.dumps(Outcome(rank=rank, error=stand_in, text=text))
