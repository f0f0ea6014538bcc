"""Load a task by name: one literal table, one entry for a new task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from workbench.core.errors import ConfigError, did_you_mean
from workbench.tasks.digits import load_digits
from workbench.tasks.embedded import load_sentiment, load_sentiment_rating
from workbench.tasks.glue import GLUE, load_glue
from workbench.tasks.own import OWN, load_own
from workbench.tasks.prompts.as_task import PROMPTED, load_prompted
from workbench.tasks.prompts.templates import PROMPTS
from workbench.tasks.task import Task

EMBEDDED: dict[str, Callable[[Path | None], Task]] = {
    "sentiment": load_sentiment,
    "sentiment-rating": load_sentiment_rating,
    "digits": load_digits,
}
TASKS = (*EMBEDDED, *GLUE, *PROMPTED, *OWN)


def load_task(
    name: str,
    *,
    data: Path | str | None = None,
    columns: str = "",
    train_samples: int | None = None,
    validation_samples: int | None = None,
    test_samples: int | None = None,
) -> Task:
    """Return a task: sentiment, sentiment-rating and digits (pictures) need no network; all others take `data` or the hub.

    data: a folder (see load_glue, load_prompt_task), own data (see load_own); None takes the embedded data or the hub.
    columns: of own data.  *_samples: at most so many, by a fixed seed.
    Raises ConfigError for an unknown name or an empty split, MissingDataError if the data cannot be had.
    """
    if name in EMBEDDED:
        folder = None if data is None else Path(data).expanduser()
        task = EMBEDDED[name](folder)
    elif name in GLUE:
        task = load_glue(name, data)
    elif name in PROMPTED:
        task = load_prompted(name, data)
    elif name in OWN:
        task = load_own(name, data, columns)
    else:
        raise unknown_task(name)
    return task.limited(train_samples, validation_samples, test_samples)


def unknown_task(name: str) -> ConfigError:
    """Return the error of a name that is no task's, or of one whose answers are text."""
    if name in PROMPTS:
        return ConfigError(
            f"The task '{name}' was asked for.",
            f"It is {PROMPTS[name].kind.replace('_', ' ')} by the words that follow a prompt, not by a class.",
            "Choose the method p_rge, or another task.",
        )
    return ConfigError(f"The task '{name}' was asked for.", f"Known are {', '.join(TASKS)}.", did_you_mean(name, TASKS))
