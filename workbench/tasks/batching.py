"""Form mini-batches: seeded, of similar lengths, and for cached epochs already divided among the devices.

Padding batches to a fixed length costs 2-3 times the compute.  Sorting by length with a little noise avoids that, and each epoch still
has different mini-batches.  Everything depends only on the arguments, so each device can compute it locally.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from workbench.core.errors import ConfigError

LENGTH_NOISE = 0.15
"""Lengths are sorted after multiplication by a random factor from 1 +- this, so that neighbours differ between epochs."""


def epoch_batches(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the mini-batches of an epoch as lists of sample indices.  Each sample occurs once.

    lengths: number of tokens of each sample.  All batches have batch_size samples except one, which may be smaller.
    """
    _need_samples(len(lengths))
    if batch_size < 1:
        raise ConfigError(f"Mini-batches of {batch_size} samples were asked for.", "That is none.", "Raise batch_size.")
    generator = _generator("batches", seed, epoch)
    order = _by_length(range(len(lengths)), lengths, generator)
    batches = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
    generator.shuffle(batches)
    return batches


def assign_shards(lengths: Sequence[int], weights: Sequence[int], seed: int) -> list[int]:
    """Return the owner (index into weights) of each sample, for epochs that run from the activation cache.

    weights: number of samples of a mini-batch for each device; a device with 0 owns nothing.  Shard sizes are proportional to the weights,
    and all shards have the same distribution of lengths: samples sorted by length are distributed block by block.
    """
    block = _block(weights)
    _need_samples(len(lengths))
    generator = _generator("shards", seed, 0)
    order = _by_length(range(len(lengths)), lengths, generator)
    owners = [0] * len(lengths)
    for at in range(0, len(order), len(block)):
        generator.shuffle(block)
        # An incomplete last block is truncated after shuffling, so that its samples go to the devices in proportion.
        for index, owner in zip(order[at : at + len(block)], block, strict=False):
            owners[index] = owner
    return owners


def cached_epoch_batches(
    owners: Sequence[int], lengths: Sequence[int], weights: Sequence[int], seed: int, epoch: int
) -> list[list[list[int]]]:
    """Return the mini-batches of a data-parallel epoch: for each, a list of sample indices per device, all from its own shard.

    Device r takes weights[r] samples of similar length in each mini-batch.  The devices' parts of a mini-batch have similar lengths,
    so that no device waits for another's padding.  Each sample occurs once.  In the shortest mini-batches, devices
    whose shard does not divide evenly take fewer samples, down to none.
    """
    _block(weights)
    _need_samples(len(lengths))
    generator = _generator("cached", seed, epoch)
    chunks = []
    for rank, weight in enumerate(weights):
        mine = [index for index, owner in enumerate(owners) if owner == rank]
        if mine and weight == 0:
            raise ConfigError(f"Device {rank} owns {len(mine)} samples.", "Its share of a mini-batch is 0.", "Raise it or move them.")
        order = _by_length(mine, lengths, generator)
        # Counted from the longest, so that the remainder is a small chunk of short samples.
        cuts = range(len(order), 0, -weight) if weight else range(0)
        chunks.append([order[max(0, end - weight) : end] for end in cuts])
    steps = max(len(mine) for mine in chunks)
    batches = [[mine[step] if step < len(mine) else [] for mine in chunks] for step in range(steps)]
    generator.shuffle(batches)
    return batches


def _by_length(indices: Sequence[int], lengths: Sequence[int], generator: random.Random) -> list[int]:
    keys = {index: lengths[index] * (1 + generator.uniform(-LENGTH_NOISE, LENGTH_NOISE)) for index in indices}
    return sorted(indices, key=lambda index: (keys[index], index))


def _generator(purpose: str, seed: int, epoch: int) -> random.Random:
    return random.Random(f"{purpose} {seed} {epoch}")  # strings are hashed with SHA-512, the same on every machine


def _block(weights: Sequence[int]) -> list[int]:
    block = [rank for rank, weight in enumerate(weights) for _ in range(weight)]
    if not block or min(weights) < 0:
        raise ConfigError(f"Shares {list(weights)} of a mini-batch were asked for.", "No device takes a sample.", "Raise one.")
    return block


def _need_samples(count: int) -> None:
    if count == 0:
        raise ConfigError("Mini-batches of an empty dataset were asked for.", "There are 0 samples.", "Give data.")
