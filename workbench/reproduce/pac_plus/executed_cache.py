"""Epochs with and without the activation cache, timed on real steps (PAC+, section VI-H, Fig. 18)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workbench.models.evaluation import set_statistics
from workbench.models.loading import load_stack
from workbench.models.optimization import make_optimizer, set_learning_rate
from workbench.models.parallel_adapter import ParallelAdapter, task_loss
from workbench.models.stack import LayerStack
from workbench.reproduce.items import Item
from workbench.reproduce.pac_plus.executed import TITLES, training
from workbench.reproduce.pac_plus.executed_build import adapter_config, tokenized_task
from workbench.reproduce.pac_plus.executed_training import TappedSplit, statistics_of
from workbench.reproduce.pac_plus.testbed import PAPER
from workbench.reproduce.result import Result, Settings, printed
from workbench.tasks.batching import epoch_batches
from workbench.tasks.tokenize import Batch, TokenizedSplit, collate

EPOCHS = tuple(range(1, 11))
SAMPLES = 1024
_WARM_UP_STEPS = 2
Source = Callable[[Sequence[int]], tuple[Batch, list[Tensor]]]


def fig18_executed(item: Item, settings: Settings) -> Result:
    """Time an epoch's steps with the backbone and from the cache in alternation, and sum them up to 1 to 10 epochs."""
    task = "sentiment" if settings.data is None else "mrpc"
    limit = {} if settings.quick else {"samples": (SAMPLES, 16, 16)}
    one = training(settings, task, "parallel_adapters", settings.seeds[0], **limit)
    tokenized = tokenized_task(one, settings.data)
    train, stack = tokenized.train, load_stack(one.model)
    began = time.perf_counter()
    cached = TappedSplit(stack, train)
    writing_s = time.perf_counter() - began
    statistics_of_taps = statistics_of(stack, train)
    steps = []
    for source in (_from_backbone(stack, train), cached.batch):
        adapter = ParallelAdapter(adapter_config(stack, one, tokenized))
        set_statistics(adapter, statistics_of_taps)
        steps.append(_step(adapter, source, one.weight_decay, one.learning_rate))
    batches = epoch_batches(train.lengths, one.batch_size, one.seed, 0)
    for indices in batches[:_WARM_UP_STEPS]:
        for step in steps:
            step(indices)
    # In alternation, so that other load on the machine affects both sides alike.
    seconds = [[step(indices) for step in steps] for indices in batches]
    without, with_cache = (sum(column) for column in zip(*seconds, strict=True))
    ratios = [backbone / own for backbone, own in seconds]
    told = {
        f"saved over {epochs} epochs ({model})": (value, saving(int(epochs), without, with_cache))
        for (quantity, model, epochs), value in printed(PAPER, "fig18").items()
        if epochs.isdigit() and quantity == "latency saved"
    } | {"saved in one cached epoch, at most": (79.51, 100 * (1 - with_cache / without))}
    named = {"backbone and Parallel Adapters": without, "Parallel Adapters from the cache": with_cache}
    return item.result(
        [item.cell((label,), paper, ours) for label, (paper, ours) in told.items()],
        tables={
            "seconds": list((named | {"one pass that fills the cache": writing_s}).items()),
            "ratios": [(len(ratios), statistics.median(ratios), min(ratios), max(ratios))],
        },
        holds={"shorter": with_cache < without},
        series={
            "without the cache": tuple((float(epochs), epochs * without) for epochs in EPOCHS),
            "with the cache": tuple((float(epochs), without + (epochs - 1) * with_cache) for epochs in EPOCHS),
        },
        task=TITLES[task],
        samples=len(train),
        batch=one.batch_size,
        threads=torch.get_num_threads(),
        model=one.model,
        without=without,
        with_cache=with_cache,
    )


def saving(epochs: int, without_s: float, cached_s: float) -> float:
    """Return the percentage of time that the cache saves over so many epochs, of which the first runs the backbone."""
    return 100 * (1 - (without_s + (epochs - 1) * cached_s) / (epochs * without_s))


def _from_backbone(stack: LayerStack, split: TokenizedSplit) -> Source:
    def source(indices: Sequence[int]) -> tuple[Batch, list[Tensor]]:
        batch = collate(split, indices)
        with torch.no_grad():
            return batch, stack(batch.input_ids, batch.attention_mask)[1]

    return source


def _step(adapter: ParallelAdapter, source: Source, weight_decay: float, rate: float) -> Callable[[Sequence[int]], float]:
    """Return a training step that takes sample indices and returns its seconds."""
    optimizer = make_optimizer(adapter, weight_decay)
    set_learning_rate(optimizer, rate)
    adapter.train()

    def step(indices: Sequence[int]) -> float:
        began = time.perf_counter()
        batch, taps = source(indices)
        logits = adapter.predict(taps, batch.attention_mask, batch.sample_ids)
        task_loss(logits, batch.labels, adapter.config.kind).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    return step
