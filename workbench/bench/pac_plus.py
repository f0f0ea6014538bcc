"""`workbench bench pac_plus`: a cached epoch against LoRA, full fine-tuning and the first epoch, interleaved in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from workbench.bench.fine_tuning_sides import BackboneFineTuning, SideFineTuning
from workbench.methods.pac_plus.cached_batches import READ_AHEAD, CachedBatches
from workbench.methods.training.steps import PAD_TO_MULTIPLE
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.calibration import calibrate
from workbench.models.loading import load_stack, load_tokenizer
from workbench.models.stack import LayerStack
from workbench.runtime.activation_cache import ActivationCache, CacheManifest
from workbench.runtime.activation_records import STORAGE_TYPES
from workbench.runtime.run_folder import scratch_folder
from workbench.tasks import load_task
from workbench.tasks.batching import cached_epoch_batches, epoch_batches
from workbench.tasks.tokenize import Batch, TokenizedSplit, collate, evaluation_batches, tokenize

MODEL, TASK = "all-MiniLM-L6-v2", "sentiment"
BATCH_SIZE, REDUCTION, RANK, THREADS = 32, 8, 8, 2
ROUNDS, STEPS = 9, 8
"""Steps of each side in each round; all rounds together draw ROUNDS * STEPS batches evenly from an epoch's, by length."""

Step = Callable[[Batch], object]


def bench(progress: Callable[[str], None] = print) -> dict[str, Any]:
    """Return the seconds of an epoch of each side and the ratios to the cached epoch, with their spread over the rounds.

    An epoch is estimated: the mean step over batches drawn evenly from it by length, times its number of batches.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        with scratch_folder() as folder:
            return _bench(folder, progress)
    finally:
        torch.set_num_threads(threads)


def _bench(folder: Path, progress: Callable[[str], None]) -> dict[str, Any]:
    task = load_task(TASK)
    split = tokenize(task.train, load_tokenizer(MODEL), max_length=128)
    stack = load_stack(MODEL)
    config = ParallelAdapterConfig(
        hidden_size=stack.hidden_size, num_layers=stack.num_layers, reduction=REDUCTION, num_outputs=task.num_outputs
    )
    progress(f"Filling the cache: {len(split)} sentences through the backbone")
    cache = _filled(folder / "cache", split, stack)
    tape = ActivationCache.create(folder / "tape", replace(cache.manifest, checksums=None))
    statistics = calibrate(stack, [collate(split, range(BATCH_SIZE * at, BATCH_SIZE * (at + 1))) for at in range(8)])

    cached = _drawn(split, [ranks[0] for ranks in cached_epoch_batches([0] * len(split), split.lengths, [BATCH_SIZE], 0, 1)])
    others = _drawn(split, epoch_batches(split.lengths, BATCH_SIZE, 0, 1))
    side = SideFineTuning(stack, config, statistics, is_fast=True)
    plain = SideFineTuning(stack, config, statistics, is_fast=False)
    lora = BackboneFineTuning(MODEL, task.num_outputs, rank=RANK)
    half = BackboneFineTuning(MODEL, task.num_outputs, rank=RANK, in_bfloat16=True)
    full = BackboneFineTuning(MODEL, task.num_outputs, rank=None)
    sides: dict[str, Callable[[Sequence[Batch]], list[float]]] = {
        "cached": lambda batches: _cached_seconds(side, cache, batches),
        "cached, by autograd": lambda batches: _cached_seconds(plain, cache, batches),
        "LoRA, float32": lambda batches: _seconds(lora.step, batches),
        "LoRA, bfloat16 autocast": lambda batches: _seconds(half.step, batches),
        "full, float32": lambda batches: _seconds(full.step, batches),
        "first epoch": lambda batches: _seconds(lambda batch: side.first_step(batch, tape), batches),
    }
    rounds: dict[str, list[float]] = {name: [] for name in sides}
    for name, run in sides.items():
        run((cached if name.startswith("cached") else others)[0][:3])  # the warm-up
    for turn in range(ROUNDS):
        for name in sorted(sides, reverse=bool(turn % 2)):
            rounds[name].append(mean(sides[name]((cached if name.startswith("cached") else others)[turn])))
        progress(f"round {turn + 1} of {ROUNDS}: " + ", ".join(f"{name} {seconds[-1] * 1e3:.0f} ms" for name, seconds in rounds.items()))
    bytes_per_sample = {
        f"cache_bytes_per_sample_{name}": round(replace(cache.layout, dtype=name).total_bytes(split.lengths) / len(split))
        for name in STORAGE_TYPES
    }
    cache.close()
    loads = _load_figures(side, cache.folder, cached[0] + cached[1])
    num_batches = -(-len(split) // BATCH_SIZE)
    return {
        "name": "pac_plus",
        "label": "measured on this machine, one process",
        "what": f"an epoch over {len(split)} sentences ({TASK}), mini-batches of {BATCH_SIZE} of similar length on every side; "
        f"estimated from {ROUNDS} x {STEPS} steps a side, drawn evenly from the epoch's by length and interleaved",
        "model": MODEL,
        "reduction": REDUCTION,
        "rank": RANK,
        "threads": THREADS,
        "batches": num_batches,
        "mean_tokens": mean(split.lengths),
        **bytes_per_sample,
        **loads,
        "trained_parameters": {"cached": side.num_trained, "LoRA": lora.num_trained, "full": full.num_trained},
        "points": [_point(name, seconds, rounds["cached"], num_batches) for name, seconds in rounds.items()],
    }


def _point(name: str, seconds: Sequence[float], cached: Sequence[float], num_batches: int) -> dict[str, Any]:
    """Return a side's row: its step and epoch, and how many cached epochs fit into one of its, round by round."""
    ratios = [own / reference for own, reference in zip(seconds, cached, strict=True)]
    return {
        "side": name,
        "step_ms": median(seconds) * 1e3,
        "epoch_s": median(seconds) * num_batches,
        "ratio_to_cached": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def _filled(folder: Path, split: TokenizedSplit, stack: LayerStack) -> ActivationCache:
    """Return a finished cache of the split's activations, in the order of its samples."""
    manifest = CacheManifest(
        fingerprint="bench",
        samples=tuple(range(len(split))),
        lengths=split.lengths,
        num_taps=stack.num_layers + 1,
        width=stack.hidden_size,
        dtype="bfloat16",
    )
    cache = ActivationCache.create(folder, manifest)
    with torch.no_grad():
        for batch in evaluation_batches(split):
            _, taps = stack(batch.input_ids, batch.attention_mask)
            cache.write_batch(batch.indices, taps)
    cache.finish()
    return cache


def _drawn(split: TokenizedSplit, batches: Sequence[Sequence[int]]) -> list[list[Batch]]:
    """Return STEPS batches for each round: every round spans the epoch's lengths, and together they are an even draw."""
    order = sorted((batch for batch in batches if len(batch) == BATCH_SIZE), key=lambda batch: max(split.lengths[at] for at in batch))
    count = ROUNDS * STEPS
    drawn = [order[(2 * at + 1) * len(order) // (2 * count)] for at in range(count)]
    return [[collate(split, batch, PAD_TO_MULTIPLE) for batch in drawn[turn::ROUNDS]] for turn in range(ROUNDS)]


def _seconds(step: Step, batches: Sequence[Batch]) -> list[float]:
    seconds = []
    for batch in batches:
        begin = time.perf_counter()
        step(batch)
        seconds.append(time.perf_counter() - begin)
    return seconds


def _cached_seconds(side: SideFineTuning, cache: ActivationCache, batches: Sequence[Batch]) -> list[float]:
    """Return the seconds of cached steps, what is left visible of loading included.

    One more step goes before, unmeasured: an epoch waits for its first batch alone.
    """
    order = [batches[-1], *batches]
    with _ahead(cache, order, depth=READ_AHEAD, packs=side.is_fast) as loader:
        return _seconds(lambda batch: side.cached_step(batch, loader), order)[1:]


def _ahead(cache: ActivationCache, batches: Sequence[Batch], *, depth: int, packs: bool) -> CachedBatches:
    return CachedBatches(cache, [(batch.indices, batch.attention_mask.shape[1]) for batch in batches], depth=depth, packs=packs)


def _load_figures(side: SideFineTuning, folder: Path, batches: Sequence[Batch]) -> dict[str, Any]:
    """Return milliseconds that a step's load takes by itself, and those that a training step waits for it with read-ahead.

    Cold: the file's pages were dropped from memory before; else they are in the page cache, as from the second cached epoch on.
    """
    figures: dict[str, Any] = {}
    for state in ("cold", "warm"):
        if state == "cold" and not hasattr(os, "posix_fadvise"):
            continue
        seconds: dict[str, list[float]] = {"alone": [], "waited": []}
        for name in seconds:
            if state == "cold":
                _drop_pages(folder / "taps.bin")
            cache = ActivationCache.open(folder, fingerprint="bench", verify=False)
            if name == "alone":
                seconds[name] = _load_seconds(cache, batches)
            else:
                side.waits_s.clear()
                _cached_seconds(side, cache, batches)
                seconds[name] = side.waits_s[1:]
            cache.close()
        figures |= {f"load_ms_{state}_{name}": median(values) * 1e3 for name, values in seconds.items()}
    return figures


def _load_seconds(cache: ActivationCache, batches: Sequence[Batch]) -> list[float]:
    with _ahead(cache, batches, depth=0, packs=True) as loader:
        return _seconds(lambda batch: loader.batch(batch.indices, batch.attention_mask.shape[1]), batches)


def _drop_pages(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
