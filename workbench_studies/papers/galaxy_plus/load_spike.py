"""A load on one device while requests are served, executed (Galaxy+, section IV-F, Fig. 16)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from workbench.core.cluster import Cluster
from workbench.core.device_faults import Fault
from workbench.core.report import dilation_note
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.methods.galaxy_plus.serving.records import Reaction, ReschedulingSettings, ServingReport, StreamSettings
from workbench.methods.galaxy_plus.serving.serve import CALIBRATING_REQUESTS, keep_pace, serve
from workbench.runtime.engines import EngineCluster
from workbench_studies.papers.result import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpikeResult:
    """A load on one device, which computes spike.factor times slower from its start on.

    reports: by reaction.  best_per_s: answers per second of the best plan without the loaded device, obtained like the
    reports.
    """

    spike: Fault
    reports: dict[Reaction, ServingReport]
    best_per_s: float

    def restored_s(self, reaction: Reaction, share: float = 0.9) -> float | None:
        """Return the seconds from the load to a throughput of `share` of the best without the device; None: never
        reached again.

        Only answers after the throughput has fallen count: from the second request on that began after the load.
        """
        report = self.reports[reaction]
        later = [request.end_s for request in report.requests if request.start_s > self.spike.start]
        if len(later) < 2:
            return None
        after_s = report.restored_after_s(later[0], share * self.best_per_s, window_s=1.0)
        return None if after_s is None else later[0] + after_s - self.spike.start

    def throughput_per_s(self, reaction: Reaction) -> tuple[float, float]:
        """Return the requests per second before the load, and in the second half of the time after it."""
        report, start_s = self.reports[reaction], self.spike.start
        return report.throughput_per_s(0.0, start_s), report.throughput_per_s(
            (start_s + report.end_s) / 2, report.end_s
        )


def load_spike_executed(
    model: str,
    cluster: Cluster,
    engines: EngineCluster,
    host: InferenceProfile,
    spike: Fault,
    *,
    until_s: float,
    length: int,
    notify: Progress = lambda line: None,
) -> LoadSpikeResult:
    """Run the experiment on emulated devices for until_s of their seconds, and for comparison the best plan without the
    loaded device.

    The same engines serve that plan right after.  They are slowed down first until this machine keeps pace.
    """
    few = StreamSettings(num_requests=CALIBRATING_REQUESTS, length=length)
    notify("Calibrating: can this machine keep pace with the devices?")
    keep_pace(engines, lambda: serve(model, cluster, engines, host, stream=few))
    if engines.dilation > 1:
        notify(dilation_note(engines.dilation))

    def served(
        name: str, reaction: Reaction, faults: tuple[Fault, ...], until_s: float, **plan: object
    ) -> ServingReport:
        notify(f"Serving for {until_s:.0f} s: {name}")
        report = serve(
            model,
            cluster,
            engines,
            host,
            stream=StreamSettings(num_requests=1_000_000, length=length),
            rescheduling=ReschedulingSettings(reaction=reaction),
            faults=faults,
            is_over=lambda now_s: now_s > until_s,
            **plan,  # type: ignore[arg-type]
        )
        return cut(report)

    compared: dict[Reaction, str] = {"none": "without re-scheduling", "exclude": "with re-scheduling"}
    reports = {reaction: served(name, reaction, (spike,), until_s) for reaction, name in compared.items()}
    best = served("the best plan without the device", "none", (), min(10.0, until_s / 2), left_out=(spike.rank,))
    return LoadSpikeResult(spike=spike, reports=reports, best_per_s=best.throughput_per_s(1.0, best.end_s))


def cut(report: ServingReport) -> ServingReport:
    """Return the report with the stream cut at the number of requests answered: the service ended at a time limit."""
    return replace(report, stream=replace(report.stream, num_requests=max(1, len(report.requests))), num_lost=0)
