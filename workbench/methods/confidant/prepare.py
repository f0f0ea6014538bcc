"""Find a Confidant job's model and data, as in fine-tuning, and its options."""

from __future__ import annotations

from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.methods.confidant.options import ConfidantOptions
from workbench.methods.fine_tuning.prepare import PreparedJob, checked, prepare_by
from workbench.methods.option_values import read_options


def require_known(job: Job) -> ConfidantOptions:
    """Return the options.  Raises ConfigError for an unknown option, task or model."""
    options = read_options("confidant", ConfidantOptions, job.options)
    if options.schedule != "asynchronous_1f1b" or options.paradigm != "hybrid":
        raise ConfigError(
            f"Confidant with schedule = '{options.schedule}' and paradigm = '{options.paradigm}' was asked for.",
            "Confidant is an asynchronous pipeline.",
            "Leave both out, or use method fine_tuning.",
        )
    return checked(job, options)


def prepare(job: Job) -> PreparedJob:
    """Load and tokenize the task and read the model's shape."""
    return prepare_by(job, require_known(job))
