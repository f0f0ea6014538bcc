"""Epochs with and without the activation cache, timed on real steps (PAC+, section VI-H, Fig. 18)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workbench.models.calibration import set_statistics
from workbench.models.loading import load_stack, load_tokenizer
from workbench.models.optimization import make_optimizer, set_learning_rate
from workbench.models.parallel_adapter import ParallelAdapter, task_loss
from workbench.plots.export import Captioned
from workbench.reproduce.drawing import lines
from workbench.reproduce.pac_plus.executed_build import adapter_config
from workbench.reproduce.pac_plus.executed_settings import TITLES, task_of, training
from workbench.reproduce.pac_plus.executed_taps import TappedSplit, statistics_of
from workbench.reproduce.pac_plus.executed_training import TokenizedTask
from workbench.reproduce.result import Check, Comparison, Result, Settings, Table
from workbench.reproduce.values import paper_values
from workbench.tasks.batching import epoch_batches
from workbench.tasks.tokenize import Batch, collate, tokenize

EPOCHS = tuple(range(1, 11))
SAMPLES = 1024
_WARM_UP_STEPS = 2
_TIMED = ("backbone and Parallel Adapters", "Parallel Adapters from the cache", "one pass that fills the cache")


def run(settings: Settings) -> Result:
    """Time the steps of an epoch with the backbone and from the cache in turns, and sum them up to 1 to 10 epochs."""
    task = "sentiment" if settings.data is None else "mrpc"
    limit = {} if settings.quick else {"samples": (SAMPLES, 16, 16)}
    one = training(settings, task, "parallel_adapters", settings.seeds[0], **limit)
    data = task_of(settings, one)
    tokenizer = load_tokenizer(one.model)
    train, validation, test = (tokenize(part, tokenizer, max_length=one.max_length) for part in (data.train, data.validation, data.test))
    tokenized = TokenizedTask(task=data, train=train, validation=validation, test=test)
    stack = load_stack(one.model)
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
    # In turns: whatever else the machine does meets both sides alike.
    seconds = [[step(indices) for step in steps] for indices in batches]
    without, with_cache = (sum(column) for column in zip(*seconds, strict=True))
    ratios = [backbone / own for backbone, own in seconds]
    saved = {epochs: saving(epochs, without, with_cache) for epochs in EPOCHS}
    return Result(
        item="fig18-executed", title="Epochs with and without the activation cache", paper_section="VI-H", source="executed",
        label_columns=("quantity",), comparisons=tuple(_comparisons(saved, without, with_cache)),
        tables=(
            Table(
                title="Seconds of an epoch", columns=("what", "seconds"),
                rows=tuple(zip(_TIMED, (without, with_cache, writing_s), strict=True)),
                note=f"{TITLES[task]}, {len(train)} samples, {one.batch_size} in a batch, {torch.get_num_threads()} threads, {one.model}.",
            ),
            Table(
                title="A step without the cache against one with it", columns=("steps", "median ratio", "least", "most"),
                rows=((len(ratios), statistics.median(ratios), min(ratios), max(ratios)),),
            ),
        ),
        checks=(Check(claim="A cached epoch is shorter", holds=with_cache < without, found=f"{with_cache:.2f} s against {without:.2f} s"),),
        explanation=(
            "Epoch 1 runs the backbone either way; each later one reads the cache. Taps are in memory here; a run reads them ahead from "
            "the disk. The narrow layers' many small operations bound the saving on a backbone this small.",
        ),
        series={
            "without the cache": tuple((float(epochs), epochs * without) for epochs in EPOCHS),
            "with the cache": tuple((float(epochs), without + (epochs - 1) * with_cache) for epochs in EPOCHS),
        },
    )  # fmt: skip


def draw(result: Result) -> list[Captioned]:
    """Return the time by epochs."""
    figure = lines(
        result, result.series, title="Fine-tuning time by epochs", subtitle="summed from timed steps", x_title="epochs", y_title="seconds"
    )
    return [Captioned(name="fig18-executed", caption="Seconds of 1 to 10 epochs with and without the activation cache.", figure=figure)]


def saving(epochs: int, without_s: float, cached_s: float) -> float:
    """Return the per cent that the cache saves over so many epochs, of which the first runs the backbone."""
    return 100 * (1 - (without_s + (epochs - 1) * cached_s) / (epochs * without_s))


def _comparisons(saved: dict[int, float], without: float, with_cache: float) -> list[Comparison]:
    rows = []
    for value in paper_values("pac_plus", "fig18"):
        if value.labels["epochs"].isdigit() and value.labels["quantity"] == "latency saved":
            epochs = int(value.labels["epochs"])
            label = f"saved over {epochs} epochs ({value.labels['model']})"
            rows.append(
                Comparison(labels=(label,), paper=value.value, ours=saved[epochs], unit="percent", kind="measured", deviation_in="points")
            )
    own = 100 * (1 - with_cache / without)
    rows.append(
        Comparison(
            labels=("saved in one cached epoch, at most",), paper=79.51, ours=own, unit="percent", kind="measured", deviation_in="points"
        )
    )
    return rows


def _from_backbone(stack: torch.nn.Module, split: object) -> Callable[[Sequence[int]], tuple[Batch, list[Tensor]]]:
    def source(indices: Sequence[int]) -> tuple[Batch, list[Tensor]]:
        batch = collate(split, indices)  # type: ignore[arg-type]
        with torch.no_grad():
            return batch, stack(batch.input_ids, batch.attention_mask)[1]

    return source


def _step(
    adapter: ParallelAdapter, source: Callable[[Sequence[int]], tuple[Batch, list[Tensor]]], weight_decay: float, rate: float
) -> Callable[[Sequence[int]], float]:
    """Return a training step that takes sample indices and gives its seconds."""
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
