"""Tasks: data, tokenization, seeded mini-batches and metrics."""

from workbench.tasks.catalogue import TASKS, load_task, unknown_task
from workbench.tasks.task import Split, Task

__all__ = ["TASKS", "Split", "Task", "load_task", "unknown_task"]
