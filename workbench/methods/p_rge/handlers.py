"""What each operation of a step does on one rank: the runtime's dispatch table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workbench.core.errors import DivergedError
from workbench.core.schedule import STEP, Op
from workbench.core.seeds import query_seed
from workbench.methods.p_rge.compute import StageCompute
from workbench.methods.p_rge.layout import QueryStep
from workbench.methods.p_rge.session import RankJob
from workbench.models.zeroth_order import StepLog, gradients_of
from workbench.runtime.executor import Handler
from workbench.tasks.prompts import PromptBatch


class QueryHandlers:
    """One step's operations on one rank.

    wants_pause: asked when losses are sent; a word behind them tells the others, so that all stop after the same step.
    losses: by part, as far as this rank knows them.  record: of the step, once it is made.
    """

    def __init__(
        self,
        rank: int,
        rank_job: RankJob,
        query_step: QueryStep,
        compute: StageCompute,
        batch: PromptBatch,
        step: int,
        *,
        wants_pause: Callable[[], bool],
    ) -> None:
        self._rank, self._job, self._step, self._compute, self._batch = rank, rank_job, query_step, compute, batch
        self._number, self._wants_pause = step, wants_pause
        self.losses: dict[int, float] = {}
        self.record: StepLog | None = None
        self.pauses = False

    def table(self) -> dict[str, Handler]:
        """Return the handlers by operation kind."""
        return {"F": self._forward, STEP: self._update}

    def _forward(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        queries = self._step.queries(op.part)
        incoming = next((content for value, content in zip(op.reads, reads, strict=True) if value.name == "act"), None)
        found = self._compute.forward(self._job, self._step.passings[self._rank], incoming, self._batch, self._number, queries)
        if not self._compute.model.is_last:
            return (found,)
        self._know(op.part, found)
        return (torch.cat([found, torch.tensor([float(self._wants_pause())])]),)

    def _update(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        for value, content in zip(op.reads, reads, strict=True):
            if value.name == "loss":
                self._know(value.part, content[:-1])
                self.pauses = self.pauses or bool(content[-1])
        self.record = record_of(self._job, self._number, self.losses)
        self._compute.apply(self.record)
        return (None,)

    def _know(self, part: int, losses: Tensor) -> None:
        self.losses |= {part + index: loss for index, loss in enumerate(losses.tolist())}


def record_of(rank_job: RankJob, step: int, losses: dict[int, float]) -> StepLog:
    """Return the step that is made from the losses of some queries, both parts of each (Algorithm 1, lines 10 to 14).

    Raises DivergedError for a loss that is not finite.
    """
    queries = sorted({part // 2 for part in losses})
    pairs = torch.tensor([losses[2 * query + sign] for query in queries for sign in (0, 1)], dtype=torch.float32)
    if not bool(torch.isfinite(pairs).all()):
        raise DivergedError(
            f"Training with learning_rate = {rank_job.job.learning_rate:g} was asked for.",
            f"It diverged: a loss of step {step + 1} is {float(pairs[~torch.isfinite(pairs)][0])}.",
            "Lower learning_rate or epsilon.",
        )
    return StepLog(
        step=step,
        seeds=tuple(query_seed(rank_job.estimator.seed, step, query) for query in queries),
        gradients=gradients_of(pairs, rank_job.estimator.epsilon),
        learning_rate=rank_job.estimator.learning_rate,
    )
