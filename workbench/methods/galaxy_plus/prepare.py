"""Find a job's model and data: each sample of the test split is one request with one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.ranges import Tokens
from workbench.methods.galaxy_plus.requests import Request
from workbench.methods.options import read_options
from workbench.models.facts import ModelFacts
from workbench.models.loading import load_tokenizer, model_facts
from workbench.models.loading import require_known as require_known_model
from workbench.models.sharding import ModelLayout, model_layout
from workbench.tasks import TASKS, load_task, unknown_task
from workbench.tasks.task import Task
from workbench.tasks.tokenize import TokenizedSplit, collate, tokenize

METHOD = "galaxy_plus"
System = Literal["galaxy_plus", "galaxy", "megatron_lm", "sequence_parallel", "edgeshard", "local"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceOptions:
    """Settings of single-shot inference, given in Job.options.

    system: 'galaxy_plus' splits inside the layers by two schemes, 'galaxy' by scheme 1 alone; 'megatron_lm', 'sequence_parallel',
    'edgeshard' (a pipeline) and 'local' (the fastest device) are the baselines (section IV-A).
    planner: of galaxy_plus: 'own', or 'algorithm_1' as printed.  overlap, both_ways: see InferencePlan; by default the planner decides.
    tile_tokens: size of the ring's tiles; by default the planner decides, 0 leaves them whole.  scheme: 1 or 2 for all layers.
    generate: new tokens for each request, 0 returns hidden states.  warmup: unmeasured requests before the measured ones.
    compare: number of answers to compare with the local model's.
    """

    system: System = "galaxy_plus"
    planner: Literal["own", "algorithm_1"] = "own"
    overlap: bool | None = None
    both_ways: bool | None = None
    tile_tokens: Tokens | None = None
    scheme: Literal[1, 2] | None = None
    generate: Tokens = 0
    warmup: Tokens = 2
    compare: Tokens = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob:
    """A job with everything known before planning: task, tokens, the model's shape."""

    job: Job
    options: InferenceOptions
    task: Task
    test: TokenizedSplit
    facts: ModelFacts
    layout: ModelLayout

    @property
    def num_requests(self) -> int:
        """Return the requests that are measured."""
        return len(self.test)

    @property
    def decoder_length(self) -> int | None:
        """Return the tokens that the decoder reads in addition to the encoder's, None without a decoder."""
        return 1 if self.layout.has_decoder else None

    @property
    def typical_length(self) -> int:
        """Return the mean number of tokens, for planning."""
        return max(1, round(sum(self.test.lengths) / len(self.test)))

    @property
    def longest(self) -> int:
        """Return the tokens for which a device needs memory: the longest request's, and the new ones."""
        grows = 0 if self.layout.has_decoder else self.options.generate
        return max(self.test.lengths) + grows

    def lengths(self, number: int) -> tuple[int, ...]:
        """Return a request's tokens in each stack."""
        length = self.test.lengths[number]
        return (length,) if self.decoder_length is None else (length, self.decoder_length)

    def request(self, number: int) -> Request:
        """Return a request in the form that the first device receives."""
        return request_of(self.test, number)


def request_of(split: TokenizedSplit, number: int) -> Request:
    """Return a sample as a request, without padding, because it is processed alone."""
    batch = collate(split, (number,), length=split.lengths[number])
    if split.start_id is None:
        return Request(length=split.lengths[number], ids=batch.input_ids)
    return Request(length=split.lengths[number], ids=batch.input_ids, decoder_length=1, decoder_ids=torch.full((1, 1), split.start_id))


def require_known(job: Job) -> None:
    """Raise ConfigError at once for an unknown option, task or model."""
    read_options(METHOD, InferenceOptions, job.options)
    if job.task not in TASKS:
        raise unknown_task(job.task)
    require_known_model(job.model)


def prepare(job: Job) -> PreparedJob:
    """Load and tokenize the task's test split and read the model's shape.

    Raises ConfigError or MissingDataError; ConfigError for a family that cannot be split, and for text from a model that generates none.
    """
    options = read_options(METHOD, InferenceOptions, job.options)
    facts = model_facts(job.model)
    layout = model_layout(job.model)
    _check_options(job, options, layout)
    task = load_task(job.task, data=job.data, columns=job.columns).limited(None, None, job.test_samples)
    room = facts.max_length - (0 if layout.has_decoder else options.generate)
    if room < 1:
        raise ConfigError(
            f"{options.generate} new tokens of '{job.model}' were asked for.",
            f"It knows {facts.max_length} positions, the prompt's among them.",
            "Ask for fewer.",
        )
    test = tokenize(task.test, load_tokenizer(job.model), max_length=min(job.max_length, room))
    return PreparedJob(job=job, options=options, task=task, test=test, facts=facts, layout=layout)


def _check_options(job: Job, options: InferenceOptions, layout: ModelLayout) -> None:
    def refuse(asked: Any, found: str, todo: str) -> ConfigError:
        return ConfigError(f"The option {asked} of {METHOD} was asked for.", found, todo)

    if options.system != "galaxy_plus" and (options.scheme or options.planner != "own"):
        raise refuse(f"system = {options.system}", "Schemes and planners are galaxy_plus's to choose.", "Leave scheme and planner out.")
    if options.generate:
        if not (layout.family.is_causal or layout.has_decoder):
            raise refuse(f"generate = {options.generate}", f"'{job.model}' has no language model head.", "Choose GPT-2, OPT, Llama or T5.")
        if options.system == "sequence_parallel":
            raise refuse(f"generate = {options.generate}", "Sequence parallelism cannot divide a single token.", "Choose another system.")
