"""Errors that a user can cause: each says what was asked, what was found and what to do."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any


class WorkbenchError(Exception):
    """Base of every error that a user can cause.

    asked: what the user asked for.  found: what was found instead.  todo: what to do about it.
    The message is one line made of the three.
    """

    def __init__(self, asked: str, found: str = "", todo: str = "") -> None:
        self.asked, self.found, self.todo = asked, found, todo
        super().__init__(" ".join(sentence for sentence in (asked, found, todo) if sentence))

    def __reduce__(self) -> tuple[type[WorkbenchError], tuple[str, str, str]]:
        """Pickle by the three parts, so that an error crosses process boundaries whole."""
        return type(self), (self.asked, self.found, self.todo)

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows of it: its line, without the trace."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(WorkbenchError, ValueError):
    """A job, cluster, model, task or option that cannot be meant."""


class WriteError(ConfigError):
    """A file or folder that cannot be written: it is something else, or the system refuses."""


class ScheduleError(WorkbenchError, ValueError):
    """A schedule that cannot run: the message shows the grid with the faulty operation marked."""


class PlanError(WorkbenchError):
    """No plan fits: the message names the device and the bytes that are missing."""


class MissingDataError(WorkbenchError):
    """A model, dataset or package that is not on this machine and cannot be fetched now."""


class CacheError(WorkbenchError):
    """An activation cache that is stale, truncated, corrupted, or does not fit on the disk."""


class MemoryBudgetError(WorkbenchError):
    """A device needed more memory than its budget while it ran."""


class DeviceLostError(WorkbenchError):
    """A device died or fell silent in the middle of a run: the message names it and the step."""


class StateError(WorkbenchError):
    """Tensors of a run that no device and no checkpoint holds: the message names them."""


class DivergedError(WorkbenchError):
    """Training that left the finite numbers: the message names the step."""


class RuntimeSetupError(WorkbenchError):
    """Engines, links or process groups that could not be set up."""


class GroupNotFormedError(RuntimeSetupError):
    """A group of ranks did not come together; the processes may be in no state to try again."""


def require_numbers(scores: Any, what: str) -> Any:
    """Return a tensor or array of a model's scores.  Raises DivergedError for NaN or +infinity, of which argmax makes an answer."""
    if not bool((scores < math.inf).all()):
        found = "The model's output holds values that are no numbers."
        raise DivergedError(f"{what} were asked for.", found, "Lower the learning rate, or check its weights.")
    return scores


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "Choose one of them.") -> str:
    """Return what to do about an unknown name: take the known one that is spelt most like it, or `otherwise`."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean '{close[0]}'?" if close else otherwise


def check_choice(what: str, value: object, known: Iterable[str]) -> None:
    """Raise ConfigError for a value that is not known.  what: "task", say."""
    names = list(known)
    if value not in names:
        raise ConfigError(f"The {what} '{value}' was asked for.", f"Known are {', '.join(names)}.", did_you_mean(str(value), names))
