"""Load on one device at a set time, with and without re-scheduling: the experiment of Galaxy+ section IV-F and Fig. 16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from workbench.core.cluster import Cluster
from workbench.core.device_faults import Fault
from workbench.core.inference import InferenceProfile
from workbench.core.serving import Reaction, ReschedulingSettings, ServingReport, StreamSettings
from workbench.methods.galaxy_plus.serving.serve import serve
from workbench.runtime.engines import EngineCluster

Variant = Literal["without re-scheduling", "exclusion", "best of both"]

VARIANTS: dict[Variant, Reaction] = {"without re-scheduling": "none", "exclusion": "exclude", "best of both": "best"}
"""The paper compares the first two; the last may keep a straggler with a smaller share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpike:
    """A load on one device: it computes `factor` times slower from start_s to end_s (None: to the end).  until_s: of the service."""

    rank: int = 1
    start_s: float = 50.0
    end_s: float | None = None
    factor: float = 4.0
    until_s: float = 100.0

    @property
    def fault(self) -> Fault:
        """Return it as a fault."""
        return Fault(kind="slow", rank=self.rank, start=self.start_s, end=self.end_s, factor=self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpikeResult:
    """reports: by variant.  best_per_s: answers per second of the best plan without the loaded device, obtained as the reports were."""

    spike: LoadSpike
    reports: dict[str, ServingReport]
    best_per_s: float

    def restored_s(self, variant: Variant, share: float = 0.9, *, window_s: float = 1.0) -> float | None:
        """Return the seconds from the load to a throughput of `share` of the best without the device; None: never reached again.

        Only answers after the throughput has fallen count: from the second request on that began after the load.
        """
        report = self.reports[variant]
        later = [request.end_s for request in report.requests if request.start_s > self.spike.start_s]
        if len(later) < 2:
            return None
        after_s = report.restored_after_s(later[0], share * self.best_per_s, window_s=window_s)
        return None if after_s is None else later[0] + after_s - self.spike.start_s

    def throughput_per_s(self, variant: Variant) -> tuple[float, float]:
        """Return the requests per second before the load, and in the second half of the time after it (to its end, if it has one)."""
        report, spike = self.reports[variant], self.spike
        end_s = min(report.end_s, spike.end_s or report.end_s)
        return report.throughput_per_s(0.0, spike.start_s), report.throughput_per_s((spike.start_s + end_s) / 2, end_s)


def load_spike_executed(
    model: str,
    cluster: Cluster,
    engines: EngineCluster,
    host: InferenceProfile,
    spike: LoadSpike,
    *,
    length: int,
    notify: Callable[[str], None] = lambda line: None,
) -> LoadSpikeResult:
    """Return the experiment executed on emulated devices, and beside it what the best plan without the loaded device reaches.

    That plan is served by the same engines, right after.
    """

    def served(name: str, reaction: Reaction, faults: tuple[Fault, ...], until_s: float, **plan: object) -> ServingReport:
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

    compared: tuple[Variant, ...] = ("without re-scheduling", "exclusion")
    reports: dict[str, ServingReport] = {name: served(name, VARIANTS[name], (spike.fault,), spike.until_s) for name in compared}
    best = served("the best plan without the device", "none", (), min(10.0, spike.until_s / 2), left_out=(spike.rank,))
    return LoadSpikeResult(spike=spike, reports=reports, best_per_s=best.throughput_per_s(1.0, best.end_s))


def cut(report: ServingReport) -> ServingReport:
    """Return the report with the stream as long as it came to be: the service was ended by time."""
    return replace(report, stream=replace(report.stream, num_requests=max(1, len(report.requests))), num_lost=0)
