"""Find a job's model and prompts, and determine the trainable parameters and the settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.names import FloatType
from workbench.core.once import once
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.methods.base import require_plan
from workbench.methods.common.result import model_encoder
from workbench.methods.common.scaling import profiled_length
from workbench.methods.option_values import read_options, require_width
from workbench.methods.p_rge.adaptive import Setting
from workbench.methods.p_rge.estimator_table import ESTIMATORS, EstimatorRule
from workbench.methods.p_rge.options import METHOD, PRGEOptions
from workbench.methods.p_rge.packing import computed_length
from workbench.methods.p_rge.zeroth_order import TrainableConfig, ZerothOrderConfig
from workbench.models.configuration import ModelFacts, model_facts
from workbench.models.configuration import require_known as require_known_model
from workbench.models.quantization import QuantizationConfig
from workbench.planners.problem import Problem
from workbench.schedules.costs import Crossing
from workbench.tasks import PROMPT_TASKS, load_task, unknown_prompt_task
from workbench.tasks.prompts import EncodedPrompts, require_room
from workbench.tasks.prompts.encoding import PromptEncoder
from workbench.tasks.task import (
    Prompt,
    PromptSample,
    Task,
    with_label_words,
    with_mobizo_evaluation,
    with_mobizo_prompt,
)
from workbench.tasks.tokenize import padded_length


@dataclass(frozen=True, kw_only=True)
class PreparedJob:
    """A job with all data that is known before planning: task, tokenized prompts, the model's shape, the trainable
    parameters.
    """

    job: Job
    options: PRGEOptions
    task: Task
    train: EncodedPrompts
    facts: ModelFacts
    trainable: TrainableConfig

    @property
    def all_notes(self) -> tuple[str, ...]:
        """Return the note that says what a score by MobiZO's rule is worth."""
        if self.options.evaluation == "p_rge":
            return ()
        return (
            "The score is the best of all epochs on the split that is reported (MobiZO's rule), so it is optimistic; "
            "validation_samples has no effect.",
        )

    @property
    def rule(self) -> EstimatorRule:
        """Return the entry of the estimator table."""
        return ESTIMATORS[self.options.estimator]

    @property
    def activation_type(self) -> FloatType:
        """Return the dtype of activations (see PRGEOptions.compute_dtype)."""
        precision, compute_dtype = self.options.precision, self.options.compute_dtype
        if precision == "int8" or precision == "nf4":  # separate comparisons, so that mypy narrows the type
            return compute_dtype or "float32"
        return compute_dtype or precision

    @property
    def quantization(self) -> QuantizationConfig | None:
        """Return how weights are stored of another dtype than the activations; None: unchanged."""
        if self.options.precision == self.activation_type:
            return None
        return QuantizationConfig(storage=self.options.precision, compute=self.activation_type)

    @property
    def setting(self) -> Setting:
        """Return the requested settings."""
        return Setting(self.options.queries, self.job.batch_size)

    @cached_property
    def typical_length(self) -> int:
        """Return the mean number of tokens computed for a row in a batch of E random samples, for planning."""
        lengths, size = sorted(self.train.lengths), self.job.batch_size
        # The mean of the maximum of E independent draws.
        count = len(lengths)
        mean = sum(length * ((place + 1) ** size - place**size) / count**size for place, length in enumerate(lengths))
        padded = padded_length([round(mean)])
        return computed_length([round(sum(lengths) / count)] * size, padded, self.packing_width)

    @property
    def packing_width(self) -> int:
        """Return the hidden size of a model that may compute batches without padding, 0 for others."""
        return self.facts.hidden_size if self.facts.is_causal else 0

    @property
    def crossing(self) -> Crossing:
        """Return the hidden states sent from stage to stage; a decoder's length varies from step to step."""
        return Crossing(
            hidden_size=self.facts.hidden_size,
            dtype=self.activation_type,
            num_encoder_layers=self.facts.num_encoder_layers,
        )

    @property
    def longest(self) -> int:
        """Return the largest padded length of a batch for which the model's table of positions suffices."""
        return min(padded_length(self.train.lengths), self.facts.max_length)

    @property
    def profiled_length(self) -> int:
        """Return the largest sequence length to measure."""
        return profiled_length(self.longest, self.facts.max_length)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of steps in which every sample is used once, with the requested E."""
        return -(-len(self.train) // self.job.batch_size)

    def steps_on(self, world_size: int) -> int:
        """Return the steps of the whole run, the same on any number of devices."""
        return self.num_steps

    @property
    def num_steps(self) -> int:
        """Return the steps of the whole run."""
        return self.job.epochs * self.steps_per_epoch if self.options.steps is None else self.options.steps

    def problem(self, profile: Profile, cluster: Cluster, setting: Setting) -> Problem[Profile]:
        """Return the problem of planning a step of typical length."""
        return Problem(
            profile,
            cluster,
            queries=self.rule.num_queries(setting.queries),
            batch_size=setting.batch_size,
            sequence_length=self.typical_length,
            memory_length=self.longest,
            estimator=self.options.estimator,
            execution=self.options.execution,
        )

    def zeroth_order(self, setting: Setting) -> ZerothOrderConfig:
        """Return the settings of a step's gradient estimate."""
        return estimate(self.options, self.job, setting.queries)

    def identity(self) -> dict[str, Any]:
        """Return the settings that a log must have to be continued; the division among devices is not included."""
        job, options = self.job, self.options
        return {
            "method": METHOD,
            "model": job.model,
            "shape": asdict(self.facts),
            "task": job.task,
            "prompts": self.train.digest(),
            "trainable": self.trainable.identity,
            "seed": job.seed,
            "learning_rate": job.peak_learning_rate,
            "epsilon": options.epsilon,
            "estimator": [
                options.estimator,
                options.direction_rank,
                options.subspace_steps,
                *([options.momentum] if self.rule.has_momentum else []),
            ],
            "setting": [*self.setting, options.precision],
        }


def require_known(job: Job) -> PRGEOptions:
    """Return the options.  Raises ConfigError at once for an unknown option, task or model, or impossible settings."""
    options = read_options(METHOD, PRGEOptions, job.options)
    if job.task not in PROMPT_TASKS:
        raise unknown_prompt_task(job.task)
    require_known_model(job.model)
    estimate(options, job, options.queries)
    executions = ("auto", *ESTIMATORS[options.estimator].executions)
    if options.execution not in executions:
        raise ConfigError(
            f"execution = {options.execution} with estimator = {options.estimator} was asked for.",
            f"It has: {', '.join(executions)}.",
            "Choose one of them.",
        )
    return options


def estimate(options: PRGEOptions, job: Job, queries: int) -> ZerothOrderConfig:
    """Return the settings of the gradient estimate of a step with q queries."""
    return ZerothOrderConfig(
        queries=queries,
        epsilon=options.epsilon,
        learning_rate=job.peak_learning_rate,
        seed=job.seed,
        estimator=options.estimator,
        direction_rank=options.direction_rank,
        subspace_steps=options.subspace_steps,
        momentum=options.momentum,
    )


def prepare(job: Job) -> PreparedJob:
    """Load the task, tokenize its prompts, and read the model's shape.  Raises ConfigError or MissingDataError."""
    options = require_known(job)
    facts = model_facts(job.model)
    if facts.vocabulary_size == 0:
        request, problem = (
            f"P-RGE of '{job.model}' was asked for.",
            "It reads pictures, and the tasks of P-RGE are texts.",
        )
        raise ConfigError(request, problem, "Choose a model of text, such as SmolLM2-135M, or another method.")
    require_width(METHOD, "rank", options.rank, job.model, facts.hidden_size)
    counts = {name: getattr(job, name) for name in ("train_samples", "validation_samples", "test_samples")}
    task = load_task(job.task, data=job.data, columns=job.columns, prompted=True, **counts)
    if options.prompts == "mobizo":
        task = with_mobizo_prompt(task)
    if options.evaluation == "mobizo":
        task = with_mobizo_evaluation(task)
    if options.words:
        task = with_label_words(task, options.words.split("/"))
    encoder, train = _encoded(task.template, job.model, job.max_length, task.train.prompts)
    if options.loss == "label_words":
        train = train.among_label_words()
    require_room(task, encoder)
    predicts_words = facts.is_causal or facts.num_encoder_layers is not None
    trainable = TrainableConfig(
        technique=options.technique,
        projections=options.projections,
        rank=options.rank,
        alpha=options.alpha,
        num_outputs=0 if predicts_words else len(task.template.words),
        seed=job.seed,
    )
    return PreparedJob(job=job, options=options, task=task, train=train, facts=facts, trainable=trainable)


@once
def _encoded(
    prompt: Prompt, model: str, max_length: int, samples: tuple[PromptSample, ...]
) -> tuple[PromptEncoder, EncodedPrompts]:
    encoder = model_encoder(prompt, model, max_length)
    return encoder, encoder.split(samples)


def setting_of(prepared: PreparedJob, plan: Plan) -> Setting:
    """Return the setting of a plan's steps: the requested one, unless the job adapts."""
    if not prepared.options.adapt:
        return prepared.setting
    queries = sum(share.queries for share in plan.stages[0].shares)
    return Setting(queries - prepared.rule.has_base, plan.micro_batch_size)


def check_plan(prepared: PreparedJob, cluster: Cluster, plan: Plan) -> None:
    """Raise ConfigError for a plan that was made for another model, cluster or number of queries."""
    setting = setting_of(prepared, plan)
    counts = [sum(share.queries for share in stage.shares) for stage in plan.stages]
    num_queries = prepared.rule.num_queries(setting.queries)
    idle = any(share.queries < 1 for stage in plan.stages for share in stage.shares)
    wide = len(plan.stages) > 1 and any(len(stage.shares) > 1 for stage in plan.stages)
    problem = f"Its queries have {plan.micro_batch_size} samples, the job's {setting.batch_size}."
    others = (
        (
            set(counts) != {num_queries},
            f"Its stages have {counts} queries; a step has {num_queries}.",
            "Give every stage all queries.",
        ),
        (idle, "A device of it has no query.", "Leave that device out of the plan."),
        (
            wide,
            "A stage of its chain has several devices.",
            "Give each stage of a chain one device, or each device the whole model.",
        ),
        (
            prepared.rule.tangent and len(plan.stages) > 1,
            "It is a chain of stages, and derivatives are not sent from stage to stage.",
            "Give each device the whole model, or choose another estimator.",
        ),
        (plan.micro_batch_size != setting.batch_size, problem, "Plan for the job's batch_size."),
    )
    require_plan(plan, cluster, model=prepared.job.model, num_layers=prepared.facts.num_layers, others=others)
