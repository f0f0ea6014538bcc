"""Which samples form a mini-batch: seeded, of similar lengths, and for cached epochs already divided among the devices.

Padding a batch to a fixed length costs 2-3 times its compute; sorting by length within a little noise avoids that while each
epoch still sees other mini-batches.  Everything is a pure function of its arguments: any device can work it out by itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from workbench.core.errors import ConfigError

LENGTH_NOISE = 0.15
"""Lengths are ordered after multiplication by a factor drawn from 1 +- this, so that neighbours differ from epoch to epoch."""


def epoch_batches(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the mini-batches of an epoch as lists of sample indices; each sample occurs once.

    lengths: tokens of each sample.  All batches have batch_size samples but one, which may be smaller.
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

    weights: samples of a mini-batch that each device takes; 0 owns nothing.  Shards are in proportion to the weights and have
    the same distribution of lengths: samples in order of length are dealt out block by block.
    """
    block = _block(weights)
    _need_samples(len(lengths))
    generator = _generator("shards", seed, 0)
    order = _by_length(range(len(lengths)), lengths, generator)
    owners = [0] * len(lengths)
    for at in range(0, len(order), len(block)):
        generator.shuffle(block)
        # A last block that is not full is cut after shuffling, so that the rest falls on devices in proportion.
        for index, owner in zip(order[at : at + len(block)], block, strict=False):
            owners[index] = owner
    return owners


def cached_epoch_batches(
    owners: Sequence[int], lengths: Sequence[int], weights: Sequence[int], seed: int, epoch: int
) -> list[list[list[int]]]:
    """Return the mini-batches of a data-parallel epoch: for each, a list of sample indices per device, all its own samples.

    Device r takes weights[r] samples of similar length in each mini-batch, and the devices' parts of one mini-batch have
    similar lengths, so that none waits for another's padding.  Each sample occurs once; in the shortest mini-batches devices
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
        # Counted from the longest: what is left over becomes a small chunk of short samples.
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
    return random.Random(f"{purpose} {seed} {epoch}")  # a string is hashed by SHA-512: the same on every machine


def _block(weights: Sequence[int]) -> list[int]:
    block = [rank for rank, weight in enumerate(weights) for _ in range(weight)]
    if not block or min(weights) < 0:
        raise ConfigError(f"Shares {list(weights)} of a mini-batch were asked for.", "No device takes a sample.", "Raise one.")
    return block


def _need_samples(count: int) -> None:
    if count == 0:
        raise ConfigError("Mini-batches of an empty dataset were asked for.", "There are 0 samples.", "Give data.")
