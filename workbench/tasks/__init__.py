"""Tasks: data, tokenization, seeded mini-batches and metrics."""

from workbench.tasks.catalogue import TASKS, load_task, unknown_task
