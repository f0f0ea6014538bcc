"""A device's layers with their trainable values: made anew from a log of steps whenever a plan asks for other ones."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from workbench.methods.p_rge.prepare import activation_type
from workbench.methods.p_rge.session import RankJob
from workbench.models.quantization import FloatType, QuantizationConfig
from workbench.models.zeroth_order import (
    CausalModel,
    PrecisionWarning,
    Prge,
    StepLog,
    TrainableConfig,
    ZerothOrderConfig,
    load_causal_model,
    load_causal_stage,
    passes_of,
    replay,
)
from workbench.planners.adaptive import Precision
from workbench.planners.query_costs import Passing
from workbench.runtime.memory import release_free_memory
from workbench.tasks.prompts import PromptBatch


def load_model(
    name: str, trainable: TrainableConfig, precision: Precision, span: tuple[int, int] | None = None, compute: FloatType | None = None
) -> CausalModel:
    """Return a model, or its layers [start, stop), frozen in a precision.  Raises as load_causal_model does.

    compute: the type of its activations, see PRGEOptions; weights of another are dequantized layer by layer.
    """
    compute = activation_type(precision, compute)
    quantization = None if precision == compute else QuantizationConfig(storage=precision, compute=compute)
    dtype = getattr(torch, compute)
    if span is None:
        return load_causal_model(name, trainable, quantization=quantization, dtype=dtype)
    return load_causal_stage(name, *span, trainable, quantization=quantization, dtype=dtype)


class StageCompute:
    """Layers [start, stop) on this device, and how many steps of the log are in their trainable values."""

    def __init__(self, rank_job: RankJob, start: int, stop: int) -> None:
        self.start, self.stop, self.precision = start, stop, rank_job.change.setting.precision
        # Also of a whole model: what is read layer by layer needs no more memory while it is read than afterwards.
        self.model = load_model(rank_job.job.model, rank_job.trainable, self.precision, (start, stop), rank_job.compute_dtype)
        self.num_steps = 0
        self._estimators: dict[ZerothOrderConfig, Prge] = {}
        release_free_memory()

    def suits(self, rank_job: RankJob, start: int, stop: int) -> bool:
        """Return whether these are the layers that a job asks for, not further on than it."""
        asked = (start, stop, rank_job.change.setting.precision)
        return (self.start, self.stop, self.precision) == asked and self.num_steps <= len(rank_job.records)

    def catch_up(self, records: Sequence[StepLog]) -> None:
        """Make the steps of a log that are not in theta yet."""
        self.num_steps += replay(self.model.trainables, records[self.num_steps :])

    def apply(self, record: StepLog) -> None:
        """Make a step."""
        self.model.trainables.apply(record)
        self.num_steps += 1

    def _estimator(self, config: ZerothOrderConfig) -> Prge:
        if config not in self._estimators:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PrecisionWarning)  # told once, by the parent
                self._estimators = {config: Prge(self.model, config)}
        return self._estimators[config]

    def forward(
        self, rank_job: RankJob, passing: Passing, incoming: Tensor | None, batch: PromptBatch, step: int, queries: Sequence[int]
    ) -> Tensor:
        """Return the hidden states (2n*E, t, d) of a group of n queries behind these layers, pass after pass, or their losses (2n,).

        incoming: what the stage before returned, None for the first.
        """
        estimator = self._estimator(replace(rank_job.estimator, execution=passing.execution))
        passes = None
        if incoming is not None:
            passes = list(incoming.chunk(len(passes_of(passing.execution, len(queries)))))
        found = estimator.forward_stage(passes, batch, step, queries)
        return estimator.arranged(found, len(queries)) if self.model.is_last else torch.cat(found)
