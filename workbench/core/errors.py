"""Errors that a user can cause: each reports the request, the problem and what to do."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any


class WorkbenchError(Exception):
    """Base class of all errors that a user can cause.

    asked: the user's request.  found: the problem with it.  todo: the remedy.
    The message is one line that joins the three.
    """

    def __init__(self, asked: str, found: str = "", todo: str = "") -> None:
        self.asked, self.found, self.todo = asked, found, todo
        super().__init__(" ".join(sentence for sentence in (asked, found, todo) if sentence))

    def __reduce__(self) -> tuple[type[WorkbenchError], tuple[str, str, str]]:
        """Pickle the three parts, so that an error crosses process boundaries unchanged."""
        return type(self), (self.asked, self.found, self.todo)

    def _render_traceback_(self) -> list[str]:
        """Return the error as a notebook shows it: its message, without the traceback."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(WorkbenchError, ValueError):
    """An invalid job, cluster, model, task or option."""


class WriteError(ConfigError):
    """A file or folder that cannot be written: it is of another type, or the system refuses."""


class ScheduleError(WorkbenchError, ValueError):
    """A schedule that cannot run: the message shows the grid with the faulty operation marked."""


class PlanError(WorkbenchError):
    """No plan fits: the message names the device and the bytes that are missing."""


class MissingDataError(WorkbenchError):
    """A model, dataset or package that is not on this machine and cannot be fetched now."""


class CacheError(WorkbenchError):
    """An activation cache that is stale, truncated, corrupted, or does not fit on the disk."""


class DamagedError(WorkbenchError):
    """A file of a run that was changed, cut or swapped since it was written; the message names it."""


class MemoryBudgetError(WorkbenchError):
    """A device needed more memory than its budget while it ran."""


class DeviceLostError(WorkbenchError):
    """A device died or stopped answering during a run; the message names it and the step."""


class StateError(WorkbenchError):
    """Tensors of a run that are on no device and in no snapshot; the message names them."""


class DivergedError(WorkbenchError):
    """Training whose loss or weights became infinite or NaN; the message names the step."""


class RuntimeSetupError(WorkbenchError):
    """Engines, links or process groups that could not be set up."""


class MessageError(RuntimeSetupError):
    """Bytes from another process that are not a declared message, or exceed its ranges or sizes."""


class GroupNotFormedError(RuntimeSetupError):
    """A group of ranks could not be formed; the processes may be unable to try again."""


def installation(extra: str) -> str:
    """Return how to install an extra of the workbench, which is on no package index: anybody could take its name."""
    return f"pip install '.[{extra}]' in the project's folder"


def require_numbers(scores: Any, what: str) -> Any:
    """Return a model's scores unchanged.  Raises DivergedError for NaN or +infinity, for which argmax would still give
    an answer.
    """
    if not bool((scores < math.inf).all()):
        problem = "The model's output holds values that are not numbers."
        raise DivergedError(f"{what} were asked for.", problem, "Lower the learning rate, or check its weights.")
    return scores


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "Choose one of them.") -> str:
    """Return advice about an unknown name: the known names that begin with its three or more letters (up to three
    names) and the one whose spelling differs by a letter or so, or else the one with the closest spelling, or
    `otherwise`.
    """
    names = list(known)
    matches = [known_name for known_name in names if len(name) > 2 and known_name.startswith(name)]
    if 1 <= len(matches) <= 3:  # memory_gb is meant as memory_mb, not as memory_gb_per_s
        close = list(dict.fromkeys([*difflib.get_close_matches(name, names, n=1, cutoff=0.85), *matches]))
    else:
        close = difflib.get_close_matches(name, names, n=1)
    return f"Did you mean {' or '.join(map(repr, close))}?" if close else otherwise


def check_choice(what: str, value: object, known: Iterable[str]) -> None:
    """Raise ConfigError if the value is not one of `known`.  what: the kind of the value, for example "task"."""
    names = list(known)
    if value not in names:
        raise ConfigError(
            f"The {what} '{value}' was asked for.", f"Known are {', '.join(names)}.", did_you_mean(str(value), names)
        )
