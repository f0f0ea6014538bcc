"""Find a job's model and data, and validate RingAda's options; the unfreezing policy (RingAda, Algorithm 1)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.methods.base import of_batch, require_plan
from workbench.methods.option_values import read_options, require_width
from workbench.methods.ringada.options import RingAdaOptions, Unfreezing
from workbench.methods.training.policy import plateaus
from workbench.methods.training.prepare import (
    PreparedTechnique,
    load_samples,
    require_task_and_model,
    technique_settings,
)
from workbench.models.configuration import model_facts
from workbench.models.techniques import TechniqueConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When adapters are unfrozen, from the top, like a learning rate scheduler.

    'steps', 'rounds': one more every so many of them.  'all': from the beginning.  'plateau', 'gradient_norm': one more
    when in `patience` rounds the mean loss, or the gradient norm of the trained adapters, has not fallen `threshold`
    below its lowest since the last unfreezing.  Their course is not known before the run: they are planned and
    simulated as if they were 'steps'.
    """

    num_layers: int
    unfreezing: Unfreezing = "steps"
    depth: int = 1
    every: int = 40
    patience: int = 2
    threshold: float = 0.01

    @property
    def is_adaptive(self) -> bool:
        """Return whether it depends on the results of earlier rounds."""
        return self.unfreezing in ("plateau", "gradient_norm")

    def first_unfrozen(self, round_number: int, step: int) -> int:
        """Return the lowest trained layer in a mini-batch, N_TM - Dep^r.  step: mini-batches before it in the whole
        run.
        """
        passed = (round_number if self.unfreezing == "rounds" else step) // self.every
        return self._above(self.num_layers if self.unfreezing == "all" else passed)

    def adapted(self, brought: Sequence[float]) -> tuple[int, ...]:
        """Return the lowest trained layer of each round of an adaptive policy, and of the next one.  brought: loss or
        norm by round.
        """
        ends = plateaus(brought, self.patience, self.threshold)
        return tuple(self._above(bisect_right(ends, count)) for count in range(len(brought) + 1))

    def _above(self, passed: int) -> int:
        return max(0, self.num_layers - self.depth - passed)


def rounds_per_epoch(num_samples: int, samples_per_round: int) -> int:
    """Return the number of rounds that train on about as many samples as there are."""
    return max(1, round(num_samples / samples_per_round))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob(PreparedTechnique):
    """A RingAda job with everything known before planning.

    owned: the rows of each device's samples by name, once they are known; a device that is absent later keeps its own.
    """

    options: RingAdaOptions
    owned: Mapping[str, tuple[int, ...]] | None = None

    def steps_on(self, world_size: int) -> int:
        """Return the rounds of the whole run (see PreparedTraining)."""
        return self.job.epochs * rounds_per_epoch(
            len(self.train), self.job.batch_size * self.options.local_iterations * world_size
        )

    @property
    def policy(self) -> Policy:
        """Return the unfreezing policy."""
        options = self.options
        return Policy(
            num_layers=self.facts.num_layers,
            unfreezing="all" if options.federated else options.unfreezing,
            depth=options.depth,
            every=options.unfreeze_every,
            patience=options.patience,
            threshold=options.threshold,
        )


def require_known(job: Job) -> RingAdaOptions:
    """Return the options.  Raises ConfigError at once for an unknown option, task or model."""
    options = read_options("ringada", RingAdaOptions, job.options)
    if options.technique == "parallel" and options.federated:
        request = "The option federated of ringada was asked for with technique = 'parallel'."
        raise ConfigError(request, "A network next to the model is trained on the ring alone.", "Leave one out.")
    require_task_and_model(job)
    return options


def prepare(job: Job) -> PreparedJob:
    """Load and tokenize the task and read the model's shape.  Raises ConfigError or MissingDataError."""
    options = require_known(job)
    facts = model_facts(job.model)
    require_width("ringada", "bottleneck", options.bottleneck, job.model, 4 * facts.hidden_size)
    if options.depth > facts.num_layers:
        request = f"The option depth = {options.depth} of ringada was asked for."
        raise ConfigError(request, f"'{job.model}' has {facts.num_layers} layers.", "Lower it.")
    if options.technique == "parallel" and options.cache and facts.num_encoder_layers is not None:
        request = f"The option cache of ringada was asked for with technique = 'parallel' and '{job.model}'."
        raise ConfigError(
            request, "The cache keeps the layers of one stack, and this has an encoder and a decoder.", "Leave one out."
        )
    samples: dict[str, Any] = load_samples(job, facts)
    if samples["task"].kind == "text_generation":
        request, problem = (
            f"The task '{job.task}' was asked for with the method ringada.",
            "It trains a head, and words have the model's own.",
        )
        raise ConfigError(request, problem, "Choose a method that trains words.")
    config = TechniqueConfig(
        technique=options.technique,
        bottleneck=options.bottleneck,
        reduction=options.reduction,
        **technique_settings(samples, options.dropout),
    )
    prepared = PreparedJob(options=options, config=config, **samples)
    if not prepared.policy.is_adaptive:
        return prepared
    note = f"The policy '{options.unfreezing}' goes by what the run brings; it is predicted as one adapter every"
    return replace(prepared, notes=(f"{note} {options.unfreeze_every} mini-batches, and no layer is moved meanwhile.",))


def check_plan(prepared: PreparedJob, cluster: Cluster, plan: Plan) -> None:
    """Raise ConfigError for a plan that was made for another model, cluster or batch, or with several devices at one
    stage.
    """
    federated = prepared.options.federated
    for first, _ in plan.later:
        check_plan(prepared, cluster, plan.at(first))
    shared = [stage for stage in plan.stages if len(stage.shares) > 1 and not federated]
    others = [
        of_batch(plan, prepared.job),
        (bool(shared), "A ring has one device at each stage.", "Give each device layers of its own."),
        (
            federated and len(plan.stages) > 1,
            "Federated averaging has the whole model on each device.",
            "Make one stage of all layers.",
        ),
    ]
    require_plan(plan, cluster, model=prepared.job.model, num_layers=prepared.facts.num_layers, others=others)
