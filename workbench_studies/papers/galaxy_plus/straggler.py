"""Fig. 16: a load on one of three devices, with and without re-scheduling, simulated and executed (Galaxy+, section
IV-F).
"""

from __future__ import annotations

from functools import lru_cache

from workbench.core.device_faults import Fault
from workbench.methods.base import ignore
from workbench.methods.galaxy_plus.planners import algorithm_1, stack_lengths
from workbench.methods.galaxy_plus.profiles import HostQuestion, host_profile, made_up_host
from workbench.methods.galaxy_plus.serving.records import Reaction, ReschedulingSettings, ServingReport, StreamSettings
from workbench.methods.galaxy_plus.serving.serve import planner_of, simulated_times
from workbench.methods.galaxy_plus.serving.simulation import simulate_serving
from workbench.planners import Problem
from workbench.runtime.engines import EngineCluster
from workbench_studies.papers.galaxy_plus.load_spike import LoadSpikeResult, load_spike_executed
from workbench_studies.papers.galaxy_plus.testbed import (
    FIG_16,
    PAPER,
    Constants,
    cluster,
    described,
    load_constants,
    profile,
)
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Result, Row, Series, Settings, printed

LOADED = 1  # the figure's 'Device 1', an RPi-L
FACTORS = (2.0, 4.0, 8.0)
FACTOR = 4.0
"""Slowdown of a request's work on the loaded device.  [assumed]: the paper's load is 'mobile DNN training and
inference'."""
DROP, RISE = 0.7, 1.2
"""Factors of a throughput: we call changes beyond these significant, which the paper does not define."""
NUM_REQUESTS = 20
STEP_S = 10.0
REACTIONS: dict[str, Reaction] = {"without re-scheduling": "none", "with re-scheduling": "exclude"}
WITHOUT, WITH = REACTIONS

BEGINS_S, UNTIL_S = (20.0, 3.0), (45.0, 9.0)
"""Begin of the load and end of the service when executed; the second ones are for a quick run."""


@lru_cache(maxsize=8)
def served(constants: Constants, factor: float) -> dict[str, ServingReport]:
    """Return the simulation of serving GPT2-L under each reaction; one device is `factor` times slower from the paper's
    time on.
    """
    on, costs = cluster(constants, FIG_16), profile(constants, "GPT2-L", FIG_16)
    lengths = stack_lengths(costs, constants.length("GPT2-L"))
    begins = printed(PAPER, "fig16")[("external load begins",)]
    first = algorithm_1(Problem(costs, on, sequence_length=lengths[0]))
    planner, times = planner_of(costs, on, lengths, first=first, is_priced=False), simulated_times(costs, on, lengths)
    return {
        name: simulate_serving(
            costs,
            on,
            planner,
            times,
            stream=StreamSettings(num_requests=NUM_REQUESTS, length=lengths[0]),
            rescheduling=ReschedulingSettings(
                reaction=reaction, report_every_s=1.0, probe_every_s=10.0, request_timeout_s=1e4
            ),
            faults=(Fault(kind="slow", rank=LOADED, start=begins, factor=factor),),
        )
        for name, reaction in REACTIONS.items()
    }


def rates(report: ServingReport) -> tuple[float, float]:
    """Return sequences per minute before the load and in the last third of the stream, in the steady state."""
    late = report.requests[-len(report.requests) // 3 :]
    return 60 * report.throughput_per_s(0, report.faults[0].start), 60 * len(late) / (late[-1].end_s - late[0].start_s)


def busy(report: ServingReport, rank: int) -> tuple[float, float]:
    """Return the fraction of the time in which a device computes for requests, before the load and in the last third of
    the stream.

    A request that the load interrupts is left out.
    """
    begins = max(request.end_s for request in report.requests if request.end_s <= report.faults[0].start)
    start = report.requests[-len(report.requests) // 3].start_s

    def share(first: float, last: float) -> float:
        inside = [
            sample
            for sample in report.samples
            if sample.rank == rank and first <= sample.start_s and sample.end_s <= last
        ]
        return sum(sample.busy_s for sample in inside) / max(
            sum(sample.end_s - sample.start_s for sample in inside), 1e-9
        )

    return 100 * share(0, begins), 100 * share(start, report.end_s)


def fig16(item: Item) -> Result:
    """Simulate serving under each reaction."""
    constants = load_constants()
    reports = served(constants, FACTOR)
    names = [device.name for device in cluster(constants, FIG_16).devices]
    others = {rank: name for rank, name in enumerate(names) if rank != LOADED}
    rows: list[Row] = []
    for factor in FACTORS:
        for name, report in served(constants, factor).items():
            excluded = report.events_of("excluded", rank=LOADED)
            delay = excluded[0].time_s - report.faults[0].start if excluded else None
            rows.append((factor, name, *rates(report), *(busy(report, rank)[1] for rank in range(3)), delay))
    settled = {name: rates(report)[1] for name, report in reports.items()}
    before, without, after = rates(reports[WITHOUT])[0], settled[WITHOUT], settled[WITH]
    starved, fed = ({rank: busy(reports[name], rank) for rank in others} for name in (WITHOUT, WITH))
    return item.result(
        [
            item.cell(("throughput before the load",), None, before),
            *(item.cell((f"with the load, {name}",), None, value) for name, value in settled.items()),
        ],
        tables={"loads": rows},
        holds={
            "drop": without < DROP * before,
            "starved": all(late < DROP * early for early, late in starved.values()),
            "fed": after > RISE * without and all(fed[rank][1] > starved[rank][1] for rank in others),
        },
        series=_series(reports, reports[WITH].faults[0].start, STEP_S, 60.0),
        before=before,
        without=without,
        after=after,
        starved=", ".join(
            f"{others[rank]} {early:.0f} to {late:.0f} % busy" for rank, (early, late) in starved.items()
        ),
        fed=", ".join(f"{others[rank]} {late:.0f} % busy" for rank, (_, late) in fed.items()),
        factor=FACTOR,
        count=NUM_REQUESTS,
        answered=NUM_REQUESTS - max(report.num_lost for report in reports.values()),
        drop=DROP,
        rise=RISE,
    )


def _series(reports: dict[str, ServingReport], begins_s: float, step_s: float, per_s: float) -> Series:
    """Return throughput over `per_s` seconds and each device's utilisation in per cent over time, in steps of
    `step_s`.
    """
    rates = {
        name: [(time_s, per_s * value) for time_s, value in report.throughput(step_s)]
        for name, report in reports.items()
    }
    most = max(value for points in rates.values() for _, value in points)
    series = {f"throughput, {name}": tuple(points) for name, points in rates.items()}
    series["throughput, load begins"] = ((begins_s, 0.0), (begins_s, most))
    for name in (WITHOUT, WITH):
        for rank, device in enumerate(reports[name].cluster.devices):
            shares = reports[name].utilisation(rank, step_s)
            series[f"utilisation, {name}, {device.name}"] = tuple((time_s, 100 * share) for time_s, share in shares)
        series[f"utilisation, {name}, load begins"] = ((begins_s, 0.0), (begins_s, 100.0))
    return series


def fig16_executed(item: Item, settings: Settings) -> Result:
    """Serve the stream on emulated devices with and without re-scheduling, and by the best plan without the loaded
    device.
    """
    on, spike = described(FIG_16), Fault(kind="slow", rank=LOADED, start=BEGINS_S[settings.quick], factor=FACTOR)
    model, length = ("tiny-bert", 16) if settings.quick else ("all-MiniLM-L6-v2", 128)
    # A tiny model would finish at once on this host: an imaginary slow core gives it a large model's time.
    host = (
        made_up_host(model, 1e8) if settings.quick else host_profile(HostQuestion(model=model, longest=length), ignore)
    )
    engines = EngineCluster.start(on)
    try:
        until_s = UNTIL_S[settings.quick]
        executed = load_spike_executed(
            model, on, engines, host, spike, until_s=until_s, length=length, notify=settings.progress
        )
    finally:
        engines.stop()
    return result_of(item, executed, model, length)


def result_of(item: Item, spike: LoadSpikeResult, model: str, length: int) -> Result:
    """Return the result from the reports."""
    (before, without), (_, after) = spike.throughput_per_s("none"), spike.throughput_per_s("exclude")
    restored_s = spike.restored_s("exclude", 0.9)
    reports = {name: spike.reports[REACTIONS[name]] for name in (WITHOUT, WITH)}
    names = [device.name for device in reports[WITH].cluster.devices]
    rows: list[Row] = [
        (
            name,
            event.time_s,
            event.kind,
            names[event.rank] if event.rank >= 0 else "",
            event.value or None,
            event.detail,
        )
        for name, report in reports.items()
        for event in report.events
    ]
    values = {
        "before the load": before,
        "with the load, without re-scheduling": without,
        "with the load, with re-scheduling": after,
        "best plan without the loaded device": spike.best_per_s,
    }
    return item.result(
        [item.cell((name,), None, value) for name, value in values.items()],
        tables={"events": rows},
        holds={
            "drop": without < DROP * before,
            "raised": after > RISE * without,
        },
        series=_series(reports, spike.spike.start, 1.0, 1.0),
        model=model,
        length=length,
        label=reports[WITHOUT].label,
        dilation=reports[WITHOUT].dilation,
        factor=spike.spike.factor,
        start_s=spike.spike.start,
        before=before,
        without=without,
        after=after,
        drop=DROP,
        rise=RISE,
        restored="never" if restored_s is None else f"{restored_s:.1f} s after the load",
        wrong=sum(report.num_wrong for report in reports.values()),
        pace="kept" if all(report.valid for report in reports.values()) else "did not keep",
        served=sum(len(report.requests) for report in reports.values()),
        repeated=sum(report.num_repeated for report in reports.values()),
        overrun=max(report.overrun_share for report in reports.values()),
    )
