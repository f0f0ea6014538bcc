"""The two sides of the runtime benchmark: PAC+'s first epoch by our executor, and by torch.distributed.pipelining.

Both train the same stage computation on the same batches with the same pacing and optimizer, so their losses are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from workbench.methods.common.layers import layers_seconds
from workbench.methods.common.session import RankSession
from workbench.methods.pac_plus.compute import StageCompute
from workbench.methods.pac_plus.handlers import PacPlusHandlers
from workbench.methods.pac_plus.rank_job import PacPlusRankJob
from workbench.methods.training.handlers import share_of
from workbench.methods.training.steps import PlannedStep
from workbench.models.parallel_adapter import task_loss
from workbench.runtime.flat_optimizer import FlatAdamW
from workbench.runtime.pacing import Pacer
from workbench.tasks.tokenize import Batch, collate


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineBench:
    """The job as PAC+'s ranks get it, one mini-batch that is repeated, and how often."""

    rank_job: PacPlusRankJob
    planned: PlannedStep
    rounds: int
    steps: int


class Side:
    """What both sides have: a rank's stage, its optimizer, the micro-batches, and what its operations cost."""

    def __init__(self, bench: PipelineBench, session: RankSession, compute: StageCompute, optimizer: FlatAdamW) -> None:
        self.bench, self.session, self.compute, self.optimizer = bench, session, compute, optimizer
        self.index = bench.rank_job.plan.stage_of(session.rank)
        assert self.index is not None
        stage = bench.rank_job.plan.stages[self.index]
        self.layers = bench.rank_job.profile.layers[session.rank][stage.start : stage.stop]
        self.last = len(bench.rank_job.plan.stages) - 1
        self.batches: list[Batch] = [collate(bench.rank_job.split, micro) for micro in bench.planned.samples]

    def seconds(self, kind: str) -> float:
        """Return an operation's seconds on this device; all micro-batches have one shape."""
        shape = self.bench.planned.shape
        return layers_seconds(self.layers, kind, shape.sizes[0], shape.lengths[0])


class Ours(Side):
    """The workbench's executor on the hybrid 1F1B schedule."""

    def __init__(self, bench: PipelineBench, session: RankSession, compute: StageCompute, optimizer: FlatAdamW) -> None:
        super().__init__(bench, session, compute, optimizer)
        self._programs = bench.rank_job.programs()

    def step(self) -> float:
        """Train one mini-batch; return its mean loss on the last stage, 0 elsewhere."""
        bench, session = self.bench, self.session
        rank_job = bench.rank_job
        share = share_of(session.rank, rank_job.plan, bench.planned, rank_job.split)
        handlers = PacPlusHandlers(compute=self.compute, optimizer=self.optimizer, epoch=0, layers=self.layers, **share)
        done = session.run(self._programs.hybrid(bench.planned.shape), handlers.table())
        return float(sum(content for value, content in done.outputs.items() if value.name == "loss"))


class Torchs(Side):
    """torch.distributed.pipelining's Schedule1F1B on the same stage computation."""

    def __init__(self, bench: PipelineBench, session: RankSession, compute: StageCompute, optimizer: FlatAdamW) -> None:
        super().__init__(bench, session, compute, optimizer)
        assert self.index is not None
        module = _StageModule(compute, is_last=self.index == self.last)
        stage = _PacedStage(module, self.index, self.last + 1, torch.device("cpu"))
        stage.pace(session.pacer, self.seconds("F") + self.seconds("SF"), self.seconds("SB"))
        kind, total = bench.rank_job.adapter.kind, bench.planned.shape.samples

        def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
            return task_loss(logits, labels, kind, reduction="sum") / total

        self._schedule = Schedule1F1B(stage, len(self.batches), loss_fn=loss_of, scale_grads=False)
        self._ids = torch.cat([batch.input_ids for batch in self.batches])
        self._labels = torch.cat([batch.labels for batch in self.batches])

    def step(self) -> float:
        """Train one mini-batch; return its mean loss on the last stage, 0 elsewhere."""
        losses: list[Tensor] = []
        options: dict[str, Any] = {"target": self._labels, "losses": losses} if self.index == self.last else {}
        self._schedule.step(*((self._ids,) if self.index == 0 else ()), **options)
        self.optimizer.step()
        return float(sum(losses)) if losses else 0.0


class _StageModule(nn.Module):
    """A stage as torch's pipeline asks for it: ids -> (hidden, side) -> ... -> logits.  The hidden state carries no gradient."""

    def __init__(self, compute: StageCompute, *, is_last: bool) -> None:
        super().__init__()
        self.adapter = compute.adapter
        self._compute, self._is_last = compute, is_last

    def forward(self, hidden_or_ids: Tensor, side: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Run backbone and side network on a micro-batch without padding."""
        mask = torch.ones(hidden_or_ids.shape[:2], dtype=torch.int64)
        output, taps = self._compute.backbone_forward(hidden_or_ids, mask)
        side = self.adapter(side, taps, mask)
        if not self._is_last:
            return output, side
        return self.adapter.head(side, taps[-1], mask, torch.arange(len(mask)), 0)


class _PacedStage(PipelineStage):
    """torch's stage with its chunks paced like our operations."""

    def pace(self, pacer: Pacer, forward_s: float, backward_s: float) -> None:
        self._pacer, self._forward_s, self._backward_s = pacer, forward_s, backward_s

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        return self._pacer.run(lambda: super(_PacedStage, self).forward_one_chunk(*args, **options), self._forward_s).result

    def backward_one_chunk(self, *args: Any, **options: Any) -> Any:
        return self._pacer.run(lambda: super(_PacedStage, self).backward_one_chunk(*args, **options), self._backward_s).result
