"""Plain single-process training of a parallel adapter: the numbers that every distributed run must give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from workbench.models.evaluation import BatchLike, attach_head
from workbench.models.optimization import learning_rate_at, make_optimizer, set_learning_rate
from workbench.models.parallel_adapter import ParallelAdapter, task_loss
from workbench.models.stack import LayerStack


def train_reference(
    stack: LayerStack,
    adapter: ParallelAdapter,
    epochs: Callable[[int], Sequence[BatchLike]],
    num_epochs: int,
    *,
    learning_rate: float = 2e-3,
    weight_decay: float = 0.01,
    warmup_fraction: float = 0.06,
) -> Iterator[tuple[int, float]]:
    """Train the adapter in place; yield (epoch, mean loss of the mini-batch) after each step.

    epochs: epochs(epoch) gives the mini-batches of that epoch, as many as of the first.  In sequence-to-sequence the
    adapter is given the stack's head.
    """
    attach_head(stack, adapter)
    optimizer = make_optimizer(adapter, weight_decay)
    steps_per_epoch = len(epochs(0))
    adapter.train()
    for epoch in range(num_epochs):
        for index, batch in enumerate(epochs(epoch)):
            loss = reference_loss(stack, adapter, batch, epoch)
            loss.backward()
            step = epoch * steps_per_epoch + index
            set_learning_rate(
                optimizer, learning_rate_at(step, num_epochs * steps_per_epoch, learning_rate, warmup_fraction)
            )
            optimizer.step()
            optimizer.zero_grad()
            yield epoch, loss.item()


def reference_loss(stack: LayerStack, adapter: ParallelAdapter, batch: BatchLike, epoch: int) -> Tensor:
    """Return the mini-batch's mean loss, with an autograd graph through the adapter only."""
    with torch.no_grad():
        _, taps = stack(batch.input_ids, batch.attention_mask, batch.decoder_ids)
    logits = adapter.predict(taps, batch.attention_mask, batch.sample_ids, epoch)
    return task_loss(logits, batch.labels, adapter.config.kind, label_std=adapter.config.label_std)
