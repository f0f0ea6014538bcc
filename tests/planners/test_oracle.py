from dataclasses import replace

import pytest

from workbench.core.errors import ConfigError
from workbench.planners.oracle import exhaustive

from .builders import SEQUENCE_LENGTH, equal

JOB = {"batch_size": 4, "micro_batches": 4, "sequence_length": SEQUENCE_LENGTH}


def test_it_compares_every_partition_and_grouping():
    profile, cluster = equal(4, 3)
    found = exhaustive(profile, cluster, **JOB)
    assert found is not None
    # C(3, s-1) partitions times C(2, s-1) groupings for s = 1, 2, 3.
    assert found.compared == 1 + 3 * 2 + 3 * 1
    every = exhaustive(profile, cluster, **JOB, orders=True)
    assert every is not None
    assert every.compared == 6 * found.compared
    assert every.value_s <= found.value_s


def test_the_most_balanced_pipeline_is_found():
    profile, cluster = equal(6, 3)
    found = exhaustive(profile, cluster, **JOB, num_stages=3, objective="balance")
    assert found is not None
    assert found.plan.partition() == "[2, 2, 2]"
    assert found.value_s == pytest.approx(4.0)


def test_none_if_nothing_fits():
    profile, cluster = equal(4, 2)
    tiny = replace(cluster, devices=tuple(replace(one, memory_bytes=100) for one in cluster.devices))
    assert exhaustive(profile, tiny, **JOB) is None


def test_what_would_take_for_ever_is_refused():
    profile, cluster = equal(40, 10)
    with pytest.raises(ConfigError, match="limit"):
        exhaustive(profile, cluster, **JOB)
    with pytest.raises(ConfigError, match="balance"):
        exhaustive(profile, cluster, **JOB, objective="best")
