"""Assign training samples to devices: IID, Dirichlet over labels, by source, by device, or in unequal sizes (RingAda's D_u, section III).

Dirichlet shares follow Hsu et al., "Measuring the effects of non-identical data distribution" (2019), section 3.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Sequence

from workbench.core.errors import ConfigError, did_you_mean
from workbench.tasks.task import Split

RULES = {
    "iid": "Use fewer devices, or more samples.",
    "dirichlet": "Raise the concentration, change the seed, or use fewer devices.",
    "source": "Use at most as many devices as there are sources.",
    "device": "Give it samples, or leave it out of the cluster.",
    "sizes": "Raise that device's number, or use more samples.",
}
"""Advice for the error about a device without data, by the rule's name."""


def split_samples(split: Split, num_devices: int, rule: str, seed: int, names: Sequence[str] = ()) -> tuple[tuple[int, ...], ...]:
    """Return the indices into `split` of each device's samples, ascending.  Every sample is on exactly one device.

    rule: 'iid' distributes shuffled samples evenly.
    'dirichlet:0.5' draws each label's shares of the devices from a Dirichlet distribution of this concentration; a low one gives
    devices few labels each.  The labels are the classes, or the sources if the task has no classes.
    'source' keeps all samples of a source (a reviewer, product or topic) on one device, and assigns the largest sources first.
    'device' takes the source as the name of the device that has the sample.  names: of the devices, for this rule.
    'sizes:4,2,1,1' is IID with sizes in these proportions, one number per device.
    Raises ConfigError for a rule that is unknown or does not suit the data, and for a device without data.
    """
    kind, numbers = check_rule(rule, num_devices)
    generator = random.Random(f"device split {rule} {num_devices} {seed}")
    order = list(range(len(split)))
    generator.shuffle(order)
    owned: list[list[int]] = [[] for _ in range(num_devices)]
    if kind == "source":
        for own in sorted(_grouped(order, _sources(split, rule)), key=len, reverse=True):
            min(owned, key=len).extend(own)
    elif kind == "device":
        for index, source in enumerate(_sources(split, rule)):
            if source not in names:
                asked = f"A split over the devices {', '.join(names)} by 'device' was asked for."
                raise ConfigError(asked, f"A sample belongs to '{source}'.", "Name one of these devices in each row.")
            owned[names.index(source)].append(index)
    elif kind == "dirichlet":
        for own in _grouped(order, _labels(split, rule)):
            _deal(own, _dirichlet(numbers[0], num_devices, generator), owned)
    else:
        _deal(order, numbers or (1.0,) * num_devices, owned)
    empty = [rank for rank, own in enumerate(owned) if not own]
    if empty:
        raise ConfigError(
            f"A split of {len(split)} samples over {num_devices} devices by '{rule}' was asked for.",
            f"Device {empty[0]} would have no data.",
            RULES[kind],
        )
    return tuple(tuple(sorted(own)) for own in owned)


def check_rule(rule: str, num_devices: int) -> tuple[str, tuple[float, ...]]:
    """Return a rule's name and its numbers (see split_samples).  Raises ConfigError for an invalid rule."""
    kind, _, given = rule.partition(":")
    asked = f"Data split by '{rule}' over {num_devices} devices were asked for."
    if num_devices < 1:
        raise ConfigError(asked, "There must be a device.", "Add one.")
    if kind not in RULES:
        raise ConfigError(asked, "Known are iid, dirichlet:CONCENTRATION, source, device and sizes:A,B,...", did_you_mean(kind, RULES))
    try:
        numbers = tuple(float(number) for number in given.split(",")) if given else ()
    except ValueError:
        raise ConfigError(asked, f"'{given}' are no numbers.", "Write such as dirichlet:0.5 or sizes:4,2,1.") from None
    wanted = {"dirichlet": 1, "sizes": num_devices}.get(kind, 0)
    if len(numbers) != wanted:
        found = f"'{kind}' takes {wanted} numbers here, not {len(numbers)}."
        raise ConfigError(asked, found, "Give a concentration, such as dirichlet:0.5." if kind == "dirichlet" else "Change the rule.")
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise ConfigError(asked, f"{given} must be above 0.", "Raise the concentration." if kind == "dirichlet" else "Raise the size.")
    return kind, numbers


def _sources(split: Split, rule: str) -> Sequence[Hashable]:
    if split.sources is None:
        raise ConfigError(
            f"Data split by '{rule}' were asked for.",
            "The task does not say where a sample comes from.",
            "Name a column of your own data by --columns source=reviewer, or choose iid.",
        )
    return split.sources


def _labels(split: Split, rule: str) -> Sequence[Hashable]:
    has_classes = split.spans is None and all(isinstance(label, int) for label in split.labels)
    return split.labels if has_classes else _sources(split, rule)


def _grouped(order: Sequence[int], keys: Sequence[Hashable]) -> list[list[int]]:
    """Return the indices of each key, with keys in order of first occurrence in the split."""
    groups: dict[Hashable, list[int]] = {key: [] for key in keys}
    for index in order:
        groups[keys[index]].append(index)
    return list(groups.values())


def _dirichlet(concentration: float, num_devices: int, generator: random.Random) -> list[float]:
    """Return shares from a symmetric Dirichlet distribution.  Uses logarithms, because gamma draws of a low concentration underflow."""
    logs = [
        math.log(generator.gammavariate(concentration + 1, 1.0)) + math.log(1 - generator.random()) / concentration
        for _ in range(num_devices)
    ]
    return [math.exp(log - max(logs)) for log in logs]


def _deal(order: Sequence[int], shares: Sequence[float], owned: Sequence[list[int]]) -> None:
    """Give each device its share of the samples, split at the cumulative shares."""
    total, at, passed = sum(shares), 0, 0.0
    for own, share in zip(owned, shares, strict=True):
        passed += share
        end = round(len(order) * passed / total)
        own.extend(order[at:end])
        at = end
