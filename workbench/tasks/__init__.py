"""Tasks: data, tokenization, seeded mini-batches and metrics.  load_task finds one by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from workbench.core.errors import ConfigError, did_you_mean
from workbench.core.methods import declaration_of, registered
from workbench.core.once import once
from workbench.core.serial import user_path
from workbench.tasks.benchmarks import SOURCES, SUPERGLUE, has_superglue, load_benchmark
from workbench.tasks.embedded import load_digits, load_sentiment, load_sentiment_rating
from workbench.tasks.instructions import load_instruction_tuning, load_instructions
from workbench.tasks.own import FROM_FILES, OWN_TASKS, load_own
from workbench.tasks.published import GLUE, load_glue
from workbench.tasks.question_answering import load_question_answering, load_questions, load_token_classification
from workbench.tasks.task import OWN_PROMPT, Task, as_prompts
from workbench.tasks.wording import PROMPTS

EMBEDDED: dict[str, Callable[[Path | None], Task]] = {
    "sentiment": load_sentiment,
    "sentiment-rating": load_sentiment_rating,
    "digits": load_digits,
    "questions": load_questions,
    "instructions": load_instructions,
}
TASKS = (*EMBEDDED, *GLUE, *SUPERGLUE, *FROM_FILES)
PROMPT_TASKS = (*PROMPTS, OWN_PROMPT)
"""Tasks that load_task returns as next-word prediction."""


@once
def load_task(
    name: str,
    *,
    data: Path | str | None = None,
    columns: str = "",
    class_names: Sequence[str] = (),
    whole: bool = False,
    prompted: bool = False,
    train_samples: int | None = None,
    validation_samples: int | None = None,
    test_samples: int | None = None,
) -> Task:
    """Return a task.

    sentiment, sentiment-rating, digits (images), questions and instructions need no network; all others need `data` or
    the hub.
    data: a folder (see load_glue, load_benchmark), own data (see load_own, load_question_answering,
    load_token_classification, load_instruction_tuning); None uses the embedded data or the hub.
    columns: columns of own data.  class_names: a model's class names, to which the labels and tags of own data are
    matched.
    whole: whether each split has all rows of own data, in their order.
    prompted: whether to return the task as next-word prediction (see as_prompts); PROMPT_TASKS can be.
    *_samples: maximum number of samples, chosen with a fixed seed.
    Raises ConfigError for an unknown name or an empty split, MissingDataError if the data is unavailable.
    """
    if prompted and name not in PROMPT_TASKS:
        raise unknown_prompt_task(name)
    if name in EMBEDDED:
        folder = None if data is None else user_path(data, "The data")
        task = EMBEDDED[name](folder)
    elif name in SUPERGLUE or (prompted and name in SOURCES and (name not in GLUE or has_superglue(name, data))):
        task = load_benchmark(name, data)
    elif name in GLUE:
        task = load_glue(name, data)
    elif name in OWN_TASKS:
        task = load_own(name, data, columns, class_names, whole=whole)
    elif name == "question_answering":
        task = load_question_answering(data, columns, whole=whole)
    elif name == "token_classification":
        task = load_token_classification(data, columns, class_names, whole=whole)
    elif name == "instruction_tuning":
        task = load_instruction_tuning(data, columns, whole=whole)
    else:
        raise unknown_task(name)
    if prompted:
        task = as_prompts(task)
    return task.limited(train_samples, validation_samples, test_samples)


def unknown_prompt_task(name: str) -> ConfigError:
    """Return the error for a task that has no prompt."""
    problem = f"Prompts are known for {', '.join(PROMPT_TASKS)}."
    return ConfigError(
        f"The task '{name}' was asked for as next-word prediction.", problem, did_you_mean(name, PROMPT_TASKS)
    )


def unknown_task(name: str) -> ConfigError:
    """Return the error for an unknown task name, or for a task whose answers are text."""
    if name in PROMPTS:
        kind = PROMPTS[name].kind.replace("_", " ")
        other = "the task question_answering" if kind == "question answering" else "another task"
        problem = f"It is {kind} by the words that follow a prompt, not by a class."
        methods = " or ".join(method for method in registered() if declaration_of(method).load_prompted)
        return ConfigError(f"The task '{name}' was asked for.", problem, f"Choose the method {methods}, or {other}.")
    return ConfigError(f"The task '{name}' was asked for.", f"Known are {', '.join(TASKS)}.", did_you_mean(name, TASKS))
