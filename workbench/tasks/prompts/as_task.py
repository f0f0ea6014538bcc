"""Classifications whose samples are more than two texts, as a task like any other: the text is the prompt, the class is for a head."""

from __future__ import annotations

from pathlib import Path

from workbench.tasks.glue import GLUE
from workbench.tasks.prompts.loading import load_prompt_task
from workbench.tasks.prompts.samples import PromptSplit
from workbench.tasks.prompts.templates import PROMPTS, Prompt
from workbench.tasks.task import Split, Task

PROMPTED = tuple(name for name, prompt in PROMPTS.items() if prompt.kind == "classification" and name not in (*GLUE, "sentiment"))
"""SuperGLUE's: boolq, wsc, wic and multirc."""
_BEHIND = ("boolq", "multirc")
"""The long passage of these is the second text, so that what is cut when it does not fit is never the question."""


def load_prompted(name: str, data: Path | str | None = None) -> Task:
    """Return one of PROMPTED.  Raises as load_prompt_task does."""
    task = load_prompt_task(name, data=data)
    train, validation, test = (_split(name, samples, task.prompt) for samples in (task.train, task.validation, task.test))
    return Task(
        name=name, kind="classification", num_outputs=len(task.words), metrics=("accuracy", "f1"), source=task.source,
        train=train, validation=validation, test=test,
    )  # fmt: skip


def _split(name: str, samples: PromptSplit, prompt: Prompt) -> Split:
    long = prompt.shortened if name in _BEHIND else None
    return Split(
        texts=tuple(prompt.fill(sample.fields if long is None else {**sample.fields, long: ""}).strip() for sample in samples),
        pairs=None if long is None else tuple(sample.fields[long] for sample in samples),
        labels=tuple(sample.label for sample in samples),
        sample_ids=tuple(sample.sample_id for sample in samples),
    )
