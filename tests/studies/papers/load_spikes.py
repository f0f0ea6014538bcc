"""The experiment of Galaxy+ Fig. 16 in virtual time, for tests of what is told of it."""

from __future__ import annotations

from dataclasses import replace

from workbench.core.cluster import Cluster
from workbench.core.device_faults import Fault
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.methods.galaxy_plus.serving.records import Reaction, ReschedulingSettings, StreamSettings
from workbench.methods.galaxy_plus.serving.serve import planner_of, simulated_times
from workbench.methods.galaxy_plus.serving.simulation import simulate_serving
from workbench_studies.papers.galaxy_plus.load_spike import LoadSpikeResult, cut

REACTIONS: tuple[Reaction, ...] = ("none", "exclude")


def load_spike_simulated(
    profile: InferenceProfile,
    cluster: Cluster,
    spike: Fault,
    *,
    until_s: float,
    length: int,
    rescheduling: ReschedulingSettings | None = None,
    noise: float = 0.05,
) -> LoadSpikeResult:
    """Return the experiment in virtual time, requests back to back.  Raises PlanError if the model does not fit the
    cluster."""
    planner, times = planner_of(profile, cluster, (length,)), simulated_times(profile, cluster, (length,))
    without = planner(tuple(rank for rank in range(cluster.world_size) if rank != spike.rank))
    reports = {
        reaction: simulate_serving(
            profile,
            cluster,
            planner,
            times,
            stream=StreamSettings(num_requests=1_000_000, length=length),
            rescheduling=replace(rescheduling or ReschedulingSettings(), reaction=reaction),
            faults=(spike,),
            noise=noise,
            until_s=until_s,
        )
        for reaction in REACTIONS
    }
    return LoadSpikeResult(
        spike=spike,
        reports={reaction: cut(report) for reaction, report in reports.items()},
        best_per_s=1 / times(without, {}).seconds,
    )
