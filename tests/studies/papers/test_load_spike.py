"""Galaxy+ Fig. 16 in virtual time, with the planner and the schedules that emulated devices have, too."""

from __future__ import annotations

import pytest
from load_spikes import load_spike_simulated

from workbench.core.catalogue import load_cluster
from workbench.core.device_faults import Fault
from workbench.methods.galaxy_plus.costs import analytic_inference
from workbench.methods.galaxy_plus.serving.serve import planner_of, simulated_times
from workbench_studies.papers.galaxy_plus.load_spike import LoadSpikeResult


@pytest.fixture(scope="module")
def result() -> LoadSpikeResult:
    cluster = load_cluster("galaxy-env-b").part([0, 1, 2])
    profile = analytic_inference("DistilBERT", cluster, weight_bytes_per_s=None)  # as for all of the paper's figures
    return load_spike_simulated(
        profile, cluster, Fault(kind="slow", rank=1, start=10.0, factor=5.0), until_s=30.0, length=284
    )


def test_throughput_comes_back_with_rescheduling_and_not_without(result: LoadSpikeResult) -> None:
    before, after = result.throughput_per_s("none")
    assert after < 0.4 * before
    assert result.restored_s("none") is None
    before, after = result.throughput_per_s("exclude")
    assert after == pytest.approx(result.best_per_s, rel=0.02) and after < before
    assert 0.0 < (result.restored_s("exclude") or 100.0) < 5.0


def test_the_others_work_again_without_the_straggler(result: LoadSpikeResult) -> None:
    def share(variant: str, rank: int) -> float:
        shares = [share for time_s, share in result.reports[variant].utilisation(rank, 1.0) if time_s > 20]
        return sum(shares) / len(shares)

    for rank in (0, 2):
        assert share("none", rank) < 0.5 < 0.8 * share("exclude", rank)
    assert share("exclude", 1) == pytest.approx(0.8)  # what its other load takes


def test_planner_plans_for_those_that_are_left() -> None:
    cluster = load_cluster("galaxy-env-b")
    profile = analytic_inference("DistilBERT", cluster)
    planner, times = planner_of(profile, cluster, (128,), is_priced=False), simulated_times(profile, cluster, (128,))
    reference = planner((0, 1, 2, 3))
    assert set(planner((0, 2, 3)).ranks) <= {0, 2, 3}
    # Three times slower, a device computes three times as long, block by block.
    own, slow = times(reference, {}).blocks[0], times(reference, {0: 3.0}).blocks[0]
    assert own.keys() == slow.keys() and all(slow[block] == pytest.approx(3 * own[block]) for block in own)
