"""`workbench bench pac_plus`: a cached epoch against LoRA, full fine-tuning and the first epoch, interleaved in one
process.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel
from transformers.utils import logging

from workbench.assets.fetch import asset_path
from workbench.core.run_folder import scratch_folder
from workbench.methods.pac_plus.handlers import READ_AHEAD, CachedBatches, StageCompute
from workbench.methods.training.handlers import Targets
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.evaluation import TapStatistics, calibrate, set_statistics
from workbench.models.loading import load_stack, load_tokenizer
from workbench.models.lora import import_peft
from workbench.models.parallel_adapter import ParallelAdapter
from workbench.models.stack import LayerStack
from workbench.profiler.timing import torch_threads
from workbench.runtime.activation_cache import ActivationCache
from workbench.runtime.flat_optimizer import FlatAdamW, LinearSchedule
from workbench.tasks import load_task
from workbench.tasks.batching import cached_epoch_batches, epoch_batches
from workbench.tasks.tokenize import Batch, TokenizedSplit, collate, tokenize
from workbench.trainings.techniques import taped
from workbench_studies.bench.frame import Figures, Progress, line_of, ratios, turns

MODEL, TASK = "all-MiniLM-L6-v2", "sentiment"
BATCH_SIZE, REDUCTION, RANK, THREADS = 32, 8, 8, 2
LEARNING_RATE, WEIGHT_DECAY, DROPOUT = 1e-3, 0.01, 0.1
NUM_STEPS = 100_000
"""Steps of the learning rate's schedule: more than a benchmark takes, so that the rate stays almost constant."""
ROUNDS, STEPS = 9, 8
"""Steps of each side in each round; all rounds together draw ROUNDS * STEPS batches evenly from an epoch's, by
length."""

Step = Callable[[Batch], object]


class BackboneFineTuning:
    """Training through the backbone with transformers and peft, as a user would write it: mean pooling, linear head,
    fused AdamW.

    rank: the rank of LoRA on queries and values; None trains every weight.  in_bfloat16: under autocast.
    """

    def __init__(self, model: str, num_outputs: int, *, rank: int | None, in_bfloat16: bool = False) -> None:
        torch.manual_seed(0)
        logging.disable_progress_bar()
        backbone = AutoModel.from_pretrained(asset_path(model), attn_implementation="sdpa")
        if rank is not None:
            config = import_peft().LoraConfig(
                r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=["query", "value"]
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # peft uses a deprecated transformers feature
                backbone = import_peft().get_peft_model(backbone, config)
        self._backbone = backbone.train()
        self._head = nn.Linear(backbone.config.hidden_size, num_outputs)
        self._in_bfloat16 = in_bfloat16
        trained = [
            parameter
            for module in (backbone, self._head)
            for parameter in module.parameters()
            if parameter.requires_grad
        ]
        self.num_trained = sum(parameter.numel() for parameter in trained)
        self._optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

    def step(self, batch: Batch) -> float:
        """Train on one batch; return its mean loss."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._in_bfloat16):
            hidden = self._backbone(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
            mask = batch.attention_mask[:, :, None].to(hidden.dtype)
            pooled = F.dropout((hidden * mask).sum(dim=1) / mask.sum(dim=1), DROPOUT)
            logits = self._head(pooled)
        loss = F.cross_entropy(logits.float(), batch.labels)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()


class SideFineTuning:
    """Training a parallel adapter: together with the backbone in the first epoch, later from the cache."""

    def __init__(
        self, stack: LayerStack, config: ParallelAdapterConfig, statistics: TapStatistics, *, is_fast: bool
    ) -> None:
        adapter = ParallelAdapter(config).train()
        set_statistics(adapter, statistics)
        rate = LinearSchedule(peak=LEARNING_RATE, num_steps=NUM_STEPS)
        self._optimizer = FlatAdamW(adapter, learning_rate=rate, weight_decay=WEIGHT_DECAY)
        self._compute = StageCompute(
            adapter, stack.stage(0, stack.num_layers), tap_dtype=torch.bfloat16, is_fast=is_fast
        )
        self.packs = self._compute.packs
        self.num_trained = sum(parameter.numel() for parameter in adapter.parameters())

    def cached_step(self, batch: Batch, batches: CachedBatches) -> float:
        """Train on one batch whose taps come from the cache; return its mean loss."""
        return self._train(batch, batches.batch(batch.indices, batch.attention_mask.shape[1]))

    def first_step(self, batch: Batch, tape: ActivationCache) -> float:
        """Run the backbone on a batch, tape its activations, and train on them; return the mean loss."""
        _, taps = self._compute.backbone_forward(batch.input_ids, batch.attention_mask)
        tape.write_batch(batch.indices, taps)
        return self._train(batch, taps)

    def _train(self, batch: Batch, taps: Sequence[Tensor]) -> float:
        """Train on one batch with given taps, (n, t, d) each or (for a fast side) without padding; return its mean
        loss.
        """
        targets = Targets(labels=batch.labels, sample_ids=batch.sample_ids, epoch=1, total=len(batch.indices))
        context = self._compute.side_forward(None, taps, batch.attention_mask, targets)
        self._compute.side_backward(context, None)
        self._optimizer.step()
        return context.output.item()


def bench(progress: Progress = print) -> Figures:
    """Return the seconds of an epoch of each side and the ratios to the cached epoch, with their spread over the
    rounds.

    An epoch is estimated: the mean step over batches drawn evenly from it by length, times its number of batches.
    """
    with torch_threads(THREADS), scratch_folder() as folder:
        return _bench(folder, progress)


def _bench(folder: Path, progress: Progress) -> Figures:
    task = load_task(TASK)
    split = tokenize(task.train, load_tokenizer(MODEL), max_length=128)
    stack = load_stack(MODEL)
    config = ParallelAdapterConfig(
        hidden_size=stack.hidden_size, num_layers=stack.num_layers, reduction=REDUCTION, num_outputs=task.num_outputs
    )
    progress(f"Filling the cache: {len(split)} sentences through the backbone")
    cache = taped(stack, split)
    tape = ActivationCache.create(folder / "tape", cache.manifest)
    statistics = calibrate(
        stack, [collate(split, range(BATCH_SIZE * number, BATCH_SIZE * (number + 1))) for number in range(8)]
    )

    cached = _drawn(
        split, [ranks[0] for ranks in cached_epoch_batches([0] * len(split), split.lengths, [BATCH_SIZE], 0, 1)]
    )
    others = _drawn(split, epoch_batches(split.lengths, BATCH_SIZE, 0, 1))
    side = SideFineTuning(stack, config, statistics, is_fast=True)
    plain = SideFineTuning(stack, config, statistics, is_fast=False)
    backbones = {
        "LoRA, float32": BackboneFineTuning(MODEL, task.num_outputs, rank=RANK),
        "LoRA, bfloat16 autocast": BackboneFineTuning(MODEL, task.num_outputs, rank=RANK, in_bfloat16=True),
        "full, float32": BackboneFineTuning(MODEL, task.num_outputs, rank=None),
    }
    sides: dict[str, Callable[[Sequence[Batch]], list[float]]] = {
        "cached": partial(_cached_seconds, side, cache),
        "cached, by autograd": partial(_cached_seconds, plain, cache),
        **{name: partial(_seconds, backbone.step) for name, backbone in backbones.items()},
        "first epoch": partial(_seconds, lambda batch: side.first_step(batch, tape)),
    }
    batches_of = {name: cached if name.startswith("cached") else others for name in sides}
    rounds: dict[str, list[float]] = {name: [] for name in sides}
    for name, run in sides.items():
        run(batches_of[name][0][:3])  # the warm-up
    for turn, name in turns(sides, range(ROUNDS)):
        rounds[name].append(mean(sides[name](batches_of[name][turn])))
        if all(len(seconds) > turn for seconds in rounds.values()):
            progress(
                f"round {turn + 1} of {ROUNDS}, ms: "
                f"{line_of({side: 1e3 * seconds[-1] for side, seconds in rounds.items()})}"
            )
    num_batches = -(-len(split) // BATCH_SIZE)
    return {
        "label": "measured on this machine, one process",
        "what": f"an epoch over {len(split)} sentences ({TASK}), mini-batches of {BATCH_SIZE} of similar length on "
        "every "
        "side; "
        f"estimated from {ROUNDS} x {STEPS} steps a side, drawn evenly from the epoch's by length and interleaved",
        "model": MODEL,
        "reduction": REDUCTION,
        "rank": RANK,
        "threads": THREADS,
        "batches": num_batches,
        "mean_tokens": mean(split.lengths),
        "trained_parameters": {
            "cached": side.num_trained,
            "LoRA": backbones["LoRA, float32"].num_trained,
            "full": backbones["full, float32"].num_trained,
        },
        "points": [
            {"side": name, "step_ms": median(seconds) * 1e3, "epoch_s": median(seconds) * num_batches}
            | ratios(seconds, rounds["cached"], "ratio_to_cached")
            for name, seconds in rounds.items()
        ],
    }


def _drawn(split: TokenizedSplit, batches: Sequence[Sequence[int]]) -> list[list[Batch]]:
    """Return STEPS batches for each round: every round spans the epoch's lengths, and together they are an even
    sample.
    """
    order = sorted(
        (batch for batch in batches if len(batch) == BATCH_SIZE),
        key=lambda batch: max(split.lengths[sample] for sample in batch),
    )
    count = ROUNDS * STEPS
    drawn = [order[(2 * index + 1) * len(order) // (2 * count)] for index in range(count)]
    return [[collate(split, batch) for batch in drawn[turn::ROUNDS]] for turn in range(ROUNDS)]


def _seconds(step: Step, batches: Sequence[Batch]) -> list[float]:
    seconds = []
    for batch in batches:
        begin = time.perf_counter()
        step(batch)
        seconds.append(time.perf_counter() - begin)
    return seconds


def _cached_seconds(side: SideFineTuning, cache: ActivationCache, batches: Sequence[Batch]) -> list[float]:
    """Return the seconds of cached steps, including the visible part of loading.

    One more step goes before, unmeasured: only an epoch's first batch has to wait.
    """
    order = [batches[-1], *batches]
    requests = [(batch.indices, batch.attention_mask.shape[1]) for batch in order]
    with CachedBatches(cache, requests, depth=READ_AHEAD, packs=side.packs) as loader:
        return _seconds(lambda batch: side.cached_step(batch, loader), order)[1:]
