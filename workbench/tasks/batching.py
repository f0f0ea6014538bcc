"""Form mini-batches: seeded, of similar lengths, and for cached epochs already divided among the devices; divide
samples.

Padding batches to a fixed length costs 2-3 times the compute.  Sorting by length with a little noise avoids that, and
each epoch still has different mini-batches.  Everything depends only on the arguments, so each device can compute it
locally.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Sequence

from workbench.core.errors import ConfigError, did_you_mean
from workbench.core.units import counted
from workbench.tasks.task import Split

LENGTH_NOISE = 0.15
"""Lengths are sorted after multiplication by a random factor from 1 +- this, so that neighbours differ between
epochs."""


def epoch_batches(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the mini-batches of an epoch as lists of sample indices.  Each sample occurs once.

    lengths: number of tokens of each sample.  All batches have batch_size samples except one, which may be smaller.
    """
    generator = _generator("batches", seed, epoch)
    order = _by_length(range(len(lengths)), lengths, generator)
    batches = [order[begin : begin + batch_size] for begin in range(0, len(order), batch_size)]
    generator.shuffle(batches)
    return batches


def assign_shards(lengths: Sequence[int], weights: Sequence[int], seed: int) -> list[int]:
    """Return the owner (index into weights) of each sample, for epochs that run from the activation cache.

    weights: number of samples of a mini-batch for each device; a device with 0 owns nothing.  Shard sizes are
    proportional to the weights, and all shards have the same distribution of lengths: samples sorted by length are
    distributed block by block.
    """
    block = _block(weights)
    generator = _generator("shards", seed, 0)
    order = _by_length(range(len(lengths)), lengths, generator)
    owners = [0] * len(lengths)
    for begin in range(0, len(order), len(block)):
        generator.shuffle(block)
        # An incomplete last block is truncated after shuffling, so that its samples go to the devices in proportion.
        for index, owner in zip(order[begin : begin + len(block)], block, strict=False):
            owners[index] = owner
    return owners


def cached_epoch_batches(
    owners: Sequence[int], lengths: Sequence[int], weights: Sequence[int], seed: int, epoch: int
) -> list[list[list[int]]]:
    """Return the mini-batches of a data-parallel epoch: for each, a list of sample indices per device, all from its own
    shard.

    Device r takes weights[r] samples of similar length in each mini-batch.  The devices' parts of a mini-batch have
    similar lengths, so that no device waits for another's padding.  Each sample occurs once.  In the shortest
    mini-batches, devices whose shard does not divide evenly take fewer samples, down to none.
    """
    _block(weights)
    generator = _generator("cached", seed, epoch)
    chunks = []
    for rank, weight in enumerate(weights):
        mine = [index for index, owner in enumerate(owners) if owner == rank]
        if mine and weight == 0:
            raise ConfigError(
                f"Device {rank} owns {len(mine)} samples.", "Its share of a mini-batch is 0.", "Raise it or move them."
            )
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
        raise ConfigError(
            f"Shares {list(weights)} of a mini-batch were asked for.", "No device takes a sample.", "Raise one."
        )
    return block


RULES = {
    "iid": "Use fewer devices, or more samples.",
    "dirichlet": "Raise the concentration, change the seed, or use fewer devices.",
    "source": "Use at most as many devices as there are sources.",
    "device": "Give it samples, or leave it out of the cluster.",
    "sizes": "Raise that device's number, or use more samples.",
}
"""Advice for the error about a device without data, by the rule's name."""


def split_samples(
    split: Split, num_devices: int, rule: str, seed: int, names: Sequence[str] = ()
) -> tuple[tuple[int, ...], ...]:
    """Return the indices into `split` of each device's samples, ascending.  Every sample is on exactly one device.

    rule: 'iid' distributes shuffled samples evenly.
    'dirichlet:0.5' draws each label's shares of the devices from a Dirichlet distribution of this concentration; a low
    one gives devices few labels each.  The labels are the classes, or the sources if the task has no classes.
    'source' keeps all samples of a source (a reviewer, product or topic) on one device, and assigns the largest sources
    first.
    'device' takes the source as the name of the device that has the sample; it may be a file's name (see own.load_own).
    names: names of the devices, for this rule.
    'sizes:4,2,1,1' is IID with sizes in these proportions, one number per device.
    Raises ConfigError for a rule that is unknown or does not suit the data, and for a device without data.
    """
    kind, numbers = check_rule(rule, num_devices)
    generator = random.Random(f"device split {rule} {num_devices} {seed}")
    order = list(range(len(split)))
    generator.shuffle(order)
    owned: list[list[int]] = [[] for _ in range(num_devices)]
    if kind == "source":
        for group in sorted(_grouped(order, _sources(split, rule)), key=len, reverse=True):
            min(owned, key=len).extend(group)
    elif kind == "device":
        for index, source in enumerate(_sources(split, rule)):
            if source not in names:
                raise ConfigError(
                    f"A split over the devices {', '.join(names)} by 'device' was asked for.",
                    f"A sample belongs to '{source}'.",
                    "Name one of these devices in each row, or each file after one.",
                )
            owned[names.index(source)].append(index)
    elif kind == "dirichlet":
        has_classes = split.spans is None and all(isinstance(label, int) for label in split.labels)
        for group in _grouped(order, split.labels if has_classes else _sources(split, rule)):
            _deal(group, _dirichlet(numbers[0], num_devices, generator), owned)
    else:
        _deal(order, numbers or (1.0,) * num_devices, owned)
    empty = [rank for rank, samples in enumerate(owned) if not samples]
    if empty:
        raise ConfigError(
            f"A split of {len(split)} samples over {num_devices} devices by '{rule}' was asked for.",
            f"Device {empty[0]} would have no data.",
            RULES[kind],
        )
    return tuple(tuple(sorted(samples)) for samples in owned)


def check_rule(rule: str, num_devices: int) -> tuple[str, tuple[float, ...]]:
    """Return a rule's name and its numbers (see split_samples).  Raises ConfigError for an invalid rule."""
    kind, _, arguments = rule.partition(":")
    request = f"Data split by '{rule}' over {num_devices} devices were asked for."
    if num_devices < 1:
        raise ConfigError(request, "There must be a device.", "Add one.")
    if kind not in RULES:
        raise ConfigError(
            request,
            "Known are iid, dirichlet:CONCENTRATION, source, device and sizes:A,B,...",
            did_you_mean(kind, RULES),
        )
    try:
        numbers = tuple(float(number) for number in arguments.split(",")) if arguments else ()
    except ValueError:
        raise ConfigError(
            request, f"'{arguments}' are not numbers.", "Write such as dirichlet:0.5 or sizes:4,2,1."
        ) from None
    num_numbers = {"dirichlet": 1, "sizes": num_devices}.get(kind, 0)
    if len(numbers) != num_numbers:
        raise ConfigError(
            request,
            f"'{kind}' takes {counted(num_numbers, 'number')} here, not {len(numbers)}.",
            "Give a concentration, such as dirichlet:0.5." if kind == "dirichlet" else "Change the rule.",
        )
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise ConfigError(
            request,
            f"{arguments} must be above 0.",
            "Raise the concentration." if kind == "dirichlet" else "Raise the size.",
        )
    return kind, numbers


def _sources(split: Split, rule: str) -> Sequence[Hashable]:
    if split.sources is None:
        raise ConfigError(
            f"Data split by '{rule}' were asked for.",
            "The task does not say where a sample comes from.",
            "Name a column of your own data by --columns source=reviewer, give a folder of one file per source, "
            "or choose iid.",
        )
    return split.sources


def _grouped(order: Sequence[int], keys: Sequence[Hashable]) -> list[list[int]]:
    """Return the indices of each key, with keys in order of first occurrence in the split."""
    groups: dict[Hashable, list[int]] = {key: [] for key in keys}
    for index in order:
        groups[keys[index]].append(index)
    return list(groups.values())


def _dirichlet(concentration: float, num_devices: int, generator: random.Random) -> list[float]:
    """Return shares from a symmetric Dirichlet distribution.  Uses logarithms, because gamma draws of a low
    concentration underflow.
    """
    logs = [
        math.log(generator.gammavariate(concentration + 1, 1.0)) + math.log(1 - generator.random()) / concentration
        for _ in range(num_devices)
    ]
    return [math.exp(log - max(logs)) for log in logs]


def _deal(order: Sequence[int], shares: Sequence[float], owned: Sequence[list[int]]) -> None:
    """Give each device its share of the samples, split at the cumulative shares."""
    total, begin, passed = sum(shares), 0, 0.0
    for samples, share in zip(owned, shares, strict=True):
        passed += share
        end = round(len(order) * passed / total)
        samples.extend(order[begin:end])
        begin = end
