"""A planned step, and the operations that all methods share on a rank: split activations, sum gradients, update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.core.once import once
from workbench.core.plan import Plan
from workbench.core.profile import Layers
from workbench.core.proportions import proportional_ranges
from workbench.core.schedule import ALLREDUCE, STEP, Op
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.optimization import backpropagate
from workbench.models.parallel_adapter import IGNORED, task_loss
from workbench.models.techniques import TechniqueConfig
from workbench.runtime.executor import Contents, Handler
from workbench.runtime.flat_optimizer import FlatAdamW
from workbench.schedules.costs import context_bytes
from workbench.schedules.pieces import StepLayout
from workbench.tasks.batching import epoch_batches
from workbench.tasks.tokenize import Batch, TokenizedSplit, collate, padded_length


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """sizes[m]: samples of part m of a mini-batch.  lengths[m]: its padded sequence length in tokens.

    A part is a micro-batch; in an epoch from the activation cache it is a rank's share, of 0 samples if the rank has
    none.
    """

    sizes: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def samples(self) -> int:
        """Return the samples of the mini-batch."""
        return sum(self.sizes)

    @property
    def lowest_trained(self) -> int | None:
        """Return the lowest layer that is trained at its end; None if the method unfreezes no layers."""
        return None

    @property
    def continues(self) -> StepShape | None:
        """Return the step that this one continues without a drain; None if it begins with an empty pipeline."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A step of a phase.  samples[m]: the positions in the split of part m of the mini-batch."""

    samples: tuple[tuple[int, ...], ...]
    shape: StepShape

    @classmethod
    def of(cls, samples: Sequence[Sequence[int]], lengths: Sequence[int]) -> PlannedStep:
        """Return the step made of these parts.  lengths: tokens of every sample of the split."""
        padded = tuple(padded_length([lengths[sample] for sample in part]) if part else 0 for part in samples)
        return cls(samples=tuple(map(tuple, samples)), shape=StepShape(sizes=tuple(map(len, samples)), lengths=padded))


def cut_mini_batch(mini_batch: Sequence[int], micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """Split a mini-batch into `micro_batches` parts of nearly equal size; empty parts are dropped."""
    ranges = proportional_ranges(len(mini_batch), (1,) * micro_batches)
    return tuple(tuple(mini_batch[first:end]) for first, end in ranges if end > first)


@once
def planned_epoch(
    lengths: Sequence[int], batch_size: int, micro_batches: int, *, seed: int, epoch: int
) -> tuple[PlannedStep, ...]:
    """Return an epoch's mini-batches, split into micro-batches."""
    return tuple(
        PlannedStep.of(cut_mini_batch(batch, micro_batches), lengths)
        for batch in epoch_batches(lengths, batch_size, seed, epoch)
    )


def typical_steps(
    steps: Sequence[PlannedStep], batch_size: int, typical_length: int, num_steps: int
) -> dict[int, PlannedStep]:
    """Return the `num_steps` full mini-batches whose length is closest to a typical one, by their numbers in the epoch;
    they are the same for every plan.
    """
    numbered = list(enumerate(steps))
    full_steps = [(number, step) for number, step in numbered if step.shape.samples == batch_size] or numbered
    return dict(sorted(full_steps, key=lambda pair: abs(max(pair[1].shape.lengths) - typical_length))[:num_steps])


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The last stage's view of some samples.

    labels: (n,).  sample_ids: (n,), for the dropout.  total: number of samples in the mini-batch.
    """

    labels: Tensor
    sample_ids: Tensor
    epoch: int
    total: int

    @classmethod
    def made_up(cls, kind: str, batch: int, length: int, target_length: int = 0) -> Targets:
        """Return placeholders, all zero, for measurements: `batch` samples of `length` tokens, whose last quarter is a
        generated text.
        """
        wide = {
            "sequence_to_sequence": target_length,
            "question_answering": 2,
            "token_classification": length,
            "text_generation": length,
        }
        shape = (batch, wide[kind]) if kind in wide else (batch,)
        labels = torch.zeros(shape, dtype=torch.float32 if kind == "regression" else torch.int64)
        if kind == "text_generation":
            labels[:, : 3 * length // 4] = IGNORED
        return cls(labels=labels, sample_ids=torch.arange(batch), epoch=0, total=batch)

    def loss(self, logits: Tensor, config: TechniqueConfig | ParallelAdapterConfig) -> Tensor:
        """Return the loss: the sum over these samples divided by the mini-batch's samples."""
        return task_loss(logits, self.labels, config.kind, reduction="sum", label_std=config.label_std) / self.total


@dataclass(slots=True)
class StageContext:
    """Forward results for the backward pass: one autograd graph.

    hidden: the input, a leaf; None if its gradient is not needed.  output: the stage's, or the loss in the last.
    nbytes: as profiled, because autograd does not report them.
    """

    hidden: Tensor | None
    output: Tensor
    nbytes: int = 0

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        """Accumulate the trained parameters' gradients; return the gradient of the input.

        gradient: gradient of the output, None for a loss.
        """
        backpropagate(self.output, gradient)
        return None if self.hidden is None else self.hidden.grad


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHandlers:
    """The operations of one step on one rank; a method adds its own operations.

    batches[m]: this rank's samples of micro-batch m.  total: number of samples in the mini-batch.  compute: the rank's
    layers.
    layout: a pipeline's layout, None if nothing crosses between stages.  layers: the stage's profile, for the bytes
    that are not measured.
    """

    rank: int
    batches: Sequence[Batch]
    total: int
    compute: Any
    optimizer: FlatAdamW
    epoch: int
    layout: StepLayout | None = None
    layers: Layers = ()

    def common(self) -> dict[str, Handler]:
        """Return the handlers shared by all methods, by operation kind."""
        return {ALLREDUCE: lambda op, reads: (self.optimizer.gradients,), STEP: self.update}

    def targets(self, op: Op) -> Targets | None:
        """Return the targets of a forward operation, None before the last stage."""
        if all(value.name != "loss" for value in op.writes):
            return None
        batch = self.batches[op.microbatch]
        return Targets(labels=batch.labels, sample_ids=batch.sample_ids, epoch=self.epoch, total=self.total)

    def forwarded(self, op: Op, context: Any) -> Contents:
        """Return the outputs of a forward operation.

        context: context of the backward pass; its output is sent in pieces, or is the loss.
        """
        context.nbytes = context_bytes(self.layers, *self.batches[op.microbatch].attention_mask.shape)
        return self.written(op, context.output.detach(), ctx=context, loss=context.output.detach())

    def written(self, op: Op, tensor: Tensor | None, **named: Any) -> Contents:
        """Return the outputs of an operation: `named` by name; every other value gets its piece of `tensor`."""
        return tuple(
            named[value.name] if value.name in named else self._piece(op, value, tensor) for value in op.writes
        )

    def _piece(self, op: Op, value: Any, tensor: Tensor | None) -> Tensor:
        assert tensor is not None and self.layout is not None
        first, _ = self.layout.samples(self.rank, op.microbatch)
        piece = self.layout.piece(value)
        return tensor[piece.first - first : piece.end - first]

    def update(self, op: Op, reads: Contents) -> Contents:
        """Take an optimizer step."""
        self.optimizer.step()
        return (None,) * len(op.writes)


def share_of(rank: int, plan: Plan, planned: PlannedStep, split: TokenizedSplit) -> dict[str, Any]:
    """Return a rank's computation in a pipeline step, as fields of StepHandlers."""
    layout = StepLayout(plan=plan, sizes=planned.shape.sizes, lengths=planned.shape.lengths)
    batches = [
        collate(split, samples).rows(*layout.samples(rank, number)) for number, samples in enumerate(planned.samples)
    ]
    return {"rank": rank, "batches": batches, "total": planned.shape.samples, "layout": layout}


def named(op: Op, reads: Contents, name: str) -> list[Any]:
    """Return the contents of an operation's inputs with a given name."""
    return [content for value, content in zip(op.reads, reads, strict=True) if value.name == name]


def joined(op: Op, reads: Contents, name: str) -> Tensor | None:
    """Join the pieces of an operation's input into one tensor; None if there are no pieces."""
    pieces = named(op, reads, name)
    return torch.cat(pieces) if pieces else None
