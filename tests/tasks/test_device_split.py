"""Data that stay on devices: every sample on one device, shares as the rule says, the same for the same seed."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.core.errors import ConfigError
from workbench.tasks import load_task
from workbench.tasks.batching import split_samples
from workbench.tasks.task import Split


def samples(count, classes=2, sources=None):
    return Split(
        texts=("",) * count,
        labels=tuple(index % classes for index in range(count)),
        sample_ids=tuple(range(count)),
        sources=None if sources is None else tuple(f"topic {index % sources}" for index in range(count)),
    )


def largest_share(split, shares):
    """The mean over labels of the largest device's share of a label: 1 / devices if even, 1 if a device has all of
    it."""
    results = []
    for label in set(split.labels):
        counts = [sum(split.labels[index] == label for index in share) for share in shares]
        results.append(max(counts) / sum(counts))
    return sum(results) / len(results)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(40, 200),
    st.integers(1, 5),
    st.integers(0, 9),
    st.sampled_from(("iid", "dirichlet:50", "source", "sizes")),
)
def test_every_sample_is_on_one_device_and_the_seed_decides(count, devices, seed, rule):
    split = samples(count, classes=3, sources=7)
    rule = "sizes:" + ",".join(str(1 + rank) for rank in range(devices)) if rule == "sizes" else rule
    shares = split_samples(split, devices, rule, seed)
    assert sorted(index for share in shares for index in share) == list(range(count))
    assert all(share == tuple(sorted(share)) and share for share in shares)
    assert shares == split_samples(split, devices, rule, seed)
    assert devices == 1 or rule == "source" or shares != split_samples(split, devices, rule, seed + 1)


def test_iid_is_even_and_sizes_are_in_proportion():
    assert sorted(map(len, split_samples(samples(103), 4, "iid", 0))) == [25, 26, 26, 26]
    shares = split_samples(samples(800), 4, "sizes:4,2,1,1", 0)
    assert [len(share) for share in shares] == [400, 200, 100, 100]
    assert all(0.35 < sum(index % 2 for index in share) / len(share) < 0.65 for share in shares)


def test_a_low_concentration_gives_devices_few_labels_and_a_high_one_even_shares():
    split = samples(10_000, classes=10)
    uneven = [largest_share(split, split_samples(split, 4, "dirichlet:0.1", seed)) for seed in range(5)]
    even = [largest_share(split, split_samples(split, 4, "dirichlet:1000", seed)) for seed in range(5)]
    assert min(uneven) > 0.6 and max(even) < 0.3


def test_a_dirichlet_share_has_the_distributions_mean_and_variance():
    """A symmetric Dirichlet's share has mean 1 / n and variance (n - 1) / (n^2 (n a + 1)), here n = 3 and a = 2."""
    split = samples(300_000, classes=1000)
    shares = split_samples(split, 3, "dirichlet:2", 0)
    counts = Counter(split.labels[index] for index in shares[0])
    results = [counts[label] / 300 for label in range(1000)]
    mean = sum(results) / 1000
    assert mean == pytest.approx(1 / 3, abs=0.02)
    assert sum((share - mean) ** 2 for share in results) / 1000 == pytest.approx(2 / 9 / 7, rel=0.12)


def test_a_source_is_on_one_device_and_the_load_is_balanced():
    split = samples(70, sources=7)
    shares = split_samples(split, 3, "source", 0)
    topics = [{split.sources[index] for index in share} for share in shares]
    assert sum(map(len, topics)) == 7 and sorted(map(len, shares)) == [20, 20, 30]
    task = load_task("sentiment-rating", train_samples=400)
    by_source = split_samples(task.train, 2, "source", 0)
    assert {task.train.sources[index] for index in by_source[0]}.isdisjoint(
        {task.train.sources[index] for index in by_source[1]}
    )


def test_each_sample_is_on_the_device_that_its_row_names():
    split = replace(samples(5), sources=("b", "a", "b", "a", "a"))
    assert split_samples(split, 2, "device", 0, ("a", "b")) == ((1, 3, 4), (0, 2))
    with pytest.raises(
        ConfigError, match=r"devices a, c by 'device' was asked for. A sample belongs to 'b'. Name one of these devices"
    ):
        split_samples(split, 2, "device", 0, ("a", "c"))
    with pytest.raises(ConfigError, match=r"Device 2 would have no data. Give it samples, or leave it out"):
        split_samples(split, 3, "device", 0, ("a", "b", "c"))


def test_numbers_are_no_classes_so_dirichlet_takes_the_sources():
    split = Split(texts=("",) * 40, labels=(0.5,) * 40, sample_ids=tuple(range(40)), sources=("a", "b") * 20)
    assert sum(map(len, split_samples(split, 2, "dirichlet:5", 0))) == 40


@pytest.mark.parametrize(
    ("split", "devices", "rule", "said"),
    [
        (samples(10), 2, "random", "Known are iid, dirichlet:CONCENTRATION, source, device and sizes:A,B"),
        (samples(10), 2, "dirichlet", "'dirichlet' takes 1 number here, not 0. Give a concentration"),
        (samples(10), 2, "dirichlet:0", "0 must be above 0. Raise the concentration"),
        (samples(10), 2, "dirichlet:-1", "-1 must be above 0"),
        (samples(10), 2, "dirichlet:nan", "nan must be above 0"),
        (samples(10), 2, "dirichlet:much", "'much' are not numbers"),
        (samples(10), 3, "dirichlet:0.001", "would have no data. Raise the concentration, change the seed"),
        (samples(10), 3, "sizes:1,2", "'sizes' takes 3 numbers here, not 2"),
        (samples(10), 2, "sizes:1,1e-9", "Device 1 would have no data. Raise that device's number"),
        (samples(10), 11, "iid", "would have no data. Use fewer devices"),
        (samples(10), 0, "iid", "There must be a device"),
        (samples(10), 2, "source", "does not say where a sample comes from. Name a column"),
        (samples(10, sources=2), 3, "source", "Device 2 would have no data. Use at most as many devices"),
    ],
)
def test_what_cannot_be_split_is_said(split, devices, rule, said):
    with pytest.raises(ConfigError, match=said):
        split_samples(split, devices, rule, 0)
