"""Mini-batches: every sample once, similar lengths, shares in proportion, the same on every device."""

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.core.errors import ConfigError
from workbench.tasks.batching import assign_shards, cached_epoch_batches, epoch_batches

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=150)
WEIGHTS = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)


def sentences(count, seed=0):
    generator = random.Random(seed)
    return [max(3, min(64, round(generator.gauss(27, 11)))) for _ in range(count)]


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 40), st.integers(0, 5), st.integers(0, 5))
def test_an_epoch_uses_each_sample_once(lengths, batch_size, seed, epoch):
    batches = epoch_batches(lengths, batch_size, seed, epoch)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    sizes = sorted(len(batch) for batch in batches)
    assert sizes[1:] == [batch_size] * (len(sizes) - 1) and 1 <= sizes[0] <= batch_size
    assert batches == epoch_batches(lengths, batch_size, seed, epoch)


def test_bucketing_saves_padding_and_epochs_differ():
    lengths = sentences(2000)
    batches = epoch_batches(lengths, 32, 0, 0)
    padded = sum(32 * max(lengths[index] for index in batch) for batch in batches)
    assert padded < 1.2 * sum(lengths)
    other = epoch_batches(lengths, 32, 0, 1)
    assert batches != other and {frozenset(batch) for batch in batches}.isdisjoint(
        {frozenset(batch) for batch in other}
    )
    assert batches != epoch_batches(lengths, 32, 1, 0)
    means = [statistics.mean(lengths[index] for index in batch) for batch in batches]
    assert abs(statistics.mean(means[:31]) - statistics.mean(means[31:])) < 6  # shuffled: not all short ones first


@settings(max_examples=80, deadline=None)
@given(LENGTHS, WEIGHTS, st.integers(0, 5))
def test_shards_are_in_proportion(lengths, weights, seed):
    owners = assign_shards(lengths, weights, seed)
    whole_blocks, rest = divmod(len(lengths), sum(weights))
    for rank, weight in enumerate(weights):
        mine = owners.count(rank)
        assert whole_blocks * weight <= mine <= whole_blocks * weight + min(weight, rest)


def test_shards_have_the_same_lengths():
    lengths, weights = sentences(4000), [16, 8, 5, 3]
    owners = assign_shards(lengths, weights, 0)
    total = statistics.mean(lengths)
    for rank in range(4):
        mine = [length for length, owner in zip(lengths, owners, strict=True) if owner == rank]
        assert abs(statistics.mean(mine) - total) < 0.3
        assert abs(statistics.stdev(mine) - statistics.stdev(lengths)) < 0.5


@settings(max_examples=80, deadline=None)
@given(LENGTHS, WEIGHTS, st.integers(0, 5), st.integers(0, 3))
def test_cached_epochs_use_each_sample_once_on_its_owner(lengths, weights, seed, epoch):
    owners = assign_shards(lengths, weights, seed)
    batches = cached_epoch_batches(owners, lengths, weights, seed, epoch)
    used = [(index, rank) for batch in batches for rank, mine in enumerate(batch) for index in mine]
    assert sorted(used) == sorted(enumerate(owners))
    assert all(
        len(batch) == len(weights) and len(mine) <= weight
        for batch in batches
        for mine, weight in zip(batch, weights, strict=True)
    )
    assert all(any(batch) for batch in batches)
    assert len(batches) in (len(lengths) // sum(weights), len(lengths) // sum(weights) + 1)
    assert batches == cached_epoch_batches(owners, lengths, weights, seed, epoch)


def test_devices_of_one_cached_batch_have_similar_lengths():
    lengths, weights = sentences(3200), [16, 8, 5, 3]
    owners = assign_shards(lengths, weights, 0)
    batches = cached_epoch_batches(owners, lengths, weights, 0, 1)
    assert len(batches) == 100 and sum(all(map(len, batch)) for batch in batches) >= 99
    spread = [
        max(means) - min(means)
        for batch in batches
        for means in [[statistics.mean(lengths[index] for index in mine) for mine in batch if mine]]
    ]
    assert statistics.median(spread) < 4
    padded = sum(len(mine) * max(lengths[index] for index in mine) for batch in batches for mine in batch if mine)
    assert padded < 1.25 * sum(lengths)


def test_other_seeds_and_epochs_give_other_cached_batches():
    lengths, weights = sentences(500), [4, 2]
    owners = assign_shards(lengths, weights, 0)
    first = cached_epoch_batches(owners, lengths, weights, 0, 1)
    assert (
        first
        != cached_epoch_batches(owners, lengths, weights, 0, 2)
        != cached_epoch_batches(owners, lengths, weights, 1, 2)
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: assign_shards([3], [0, 0], 0), "No device"),
        (lambda: assign_shards([3], [2, -1], 0), "No device"),
        (lambda: cached_epoch_batches([1], [3], [1, 0], 0, 0), "Device 1 owns 1"),
    ],
)
def test_what_cannot_be_batched(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
