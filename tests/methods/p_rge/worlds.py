"""Small P-RGE runs on the sentiment prompts, with costs that nothing on this machine changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.plans import query_plan
from tests.profiles import grid
from workbench.core import Cluster, Job, Plan
from workbench.core.profile import Bytes, LayerProfile, Profile
from workbench.methods.base import Event, Outcome, Planned
from workbench.methods.p_rge import method as p_rge
from workbench.methods.p_rge.prepare import PreparedJob, prepare
from workbench.methods.p_rge.worker import load_model
from workbench.methods.p_rge.zeroth_order import (
    CausalModel,
    Prge,
    StepLog,
    TrainableConfig,
    load_causal_model,
    read_log,
    replay,
)
from workbench.runtime.engines import EngineCluster
from workbench.tasks.prompts import training_batch

Q, E, STEPS = 4, 2, 7


@cache
def prepared_job(model: str = "tiny-llama", **settings: Any) -> PreparedJob:
    """Return a job of 7 steps of 4 queries of 2 samples; settings of the job, or of the method."""
    fields = {name: settings.pop(name) for name in tuple(settings) if name in Job.__dataclass_fields__}
    options = {"queries": Q, "steps": STEPS, "rank": 2, "epsilon": 1e-2} | settings
    defaults = {
        "task": "sentiment",
        "train_samples": 10,
        "validation_samples": 4,
        "test_samples": 4,
        "learning_rate": 5e-3,
        "max_length": 128,
        "micro_batches": 1,
    }
    return prepare(Job(method="p_rge", model=model, **({"batch_size": E} | defaults | fields), options=options))


def made_up_layers(prepared: PreparedJob, row_s: float = 1e-5) -> tuple[LayerProfile, ...]:
    """Return layers of hand-made costs: row_s for each row and twice that for each pass, next to nothing for noise."""
    sizes = _sizes(prepared.job.model, prepared.trainable, prepared.facts.num_layers)
    return tuple(
        LayerProfile(
            name=f"layer {index}",
            times={"F": grid(3 * row_s, 4 * row_s), "STEP": grid(row_s / 100, row_s / 50)},
            frozen_bytes=250_000,
            trainable_bytes=4 * sum(sizes[index]),
            output_bytes=Bytes(4 * prepared.facts.hidden_size),
            workspace_bytes=Bytes(1000),
        )
        for index in range(prepared.facts.num_layers)
    )


@cache
def _sizes(model: str, trainable: TrainableConfig, num_layers: int) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of every layer's trainable parameters; those after the last layer count as the last layer's."""
    sizes: list[list[int]] = [[] for _ in range(num_layers)]
    for slot in load_causal_model(model, trainable).trainables.slots:
        sizes[slot.layer].append(slot.size)  # HEAD, -1, is the last
    return tuple(map(tuple, sizes))


@contextmanager
def one_pace(row_s: float = 1e-5) -> Iterator[None]:
    """Make every device as fast as the made-up layers say."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p_rge.PRGE, "host_layers", lambda method, prepared, *_, **__: made_up_layers(prepared, row_s))
        yield


def shared(*queries: int, layers: int = 6, batch_size: int = E) -> Plan:
    """Return a plan of the whole model on devices 0, 1, ... with so many queries each; none for 0."""
    shares = {rank: count for rank, count in enumerate(queries) if count}
    return query_plan((layers, shares), batch_size=batch_size)


def chain(*stops: int, ranks: Sequence[int], queries: int = Q, batch_size: int = E) -> Plan:
    """Return a chain of stages that end at `stops`."""
    layers = (stop - start for start, stop in pairwise((0, *stops)))
    return query_plan(*((n, {rank: queries}) for n, rank in zip(layers, ranks, strict=True)), batch_size=batch_size)


def profile_for(prepared: PreparedJob, cluster: Cluster, row_s: float = 1e-5) -> Profile:
    """Return the made-up profile of every device."""
    layers = made_up_layers(prepared, row_s)
    rows = tuple(tuple(layer.scaled(1 / (device.host_share or 1.0)) for layer in layers) for device in cluster.devices)
    return Profile(model=prepared.job.model, method="p_rge", source="scaled", layers=rows)


def run(
    prepared: PreparedJob,
    engines: EngineCluster,
    plan: Plan | None,
    folder: Path,
    *,
    resume: bool = False,
    events: list[Event] | None = None,
    row_s: float = 1e-5,
    on_event: Any = None,
) -> Outcome:
    """Run a job; plan: None asks the planner."""
    method, cluster = p_rge.PRGE(), engines.cluster
    profile = profile_for(prepared, cluster, row_s)
    chosen = plan or method.plan(prepared, profile, cluster)
    method.check(prepared, profile, cluster, chosen, folder=folder)

    def notify(event: Event) -> None:
        if events is not None:
            events.append(event)
        if on_event is not None:
            on_event(event)

    planned = Planned(prepared, profile, cluster, chosen)
    prediction = method.predict(planned)
    return method.execute(planned, prediction, engines, folder=folder, resume=resume, notify=notify)


def in_one_process(prepared: PreparedJob) -> tuple[CausalModel, list[StepLog], list[Tensor]]:
    """Return the model that one process trains, and the steps with their losses."""
    model = load_model(prepared)
    estimator = Prge(model, prepared.zeroth_order(prepared.setting))
    results = [
        estimator.step(training_batch(prepared.train, prepared.job.batch_size, prepared.job.seed, step), step)
        for step in range(prepared.num_steps)
    ]
    return model, [result.log for result in results], [result.losses for result in results]


def trained_by(outcome: Outcome, prepared: PreparedJob) -> tuple[CausalModel, tuple[StepLog, ...]]:
    """Return the model that a run's log makes, and the log."""
    _, records = read_log(Path(outcome.artifacts["log"]))
    model = load_model(prepared)
    replay(model.trainables, records)
    return model, records


def theta(model: CausalModel) -> Tensor:
    """Return all trained values."""
    return torch.cat([tensor.flatten() for tensor in model.trainables.state().values()])


def with_options(prepared: PreparedJob, **options: Any) -> PreparedJob:
    """Return the job with other faults, and other settings of the method."""
    job = replace(prepared.job, faults=options.pop("faults", ""))
    return replace(prepared, job=job, options=replace(prepared.options, **options))
