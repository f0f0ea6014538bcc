"""Fig. 16 executed: a load on one of three emulated devices, with and without re-scheduling (Galaxy+, section IV-F)."""

from __future__ import annotations

from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Cluster
from workbench.core.serving import ServingReport
from workbench.methods.galaxy_plus.serving.fig16 import LoadSpike, LoadSpikeResult, Variant, load_spike_executed
from workbench.methods.galaxy_plus.serving.hosts import made_up_host, measured_host
from workbench.plots.export import Captioned
from workbench.reproduce.galaxy_plus.fig16 import LOADED, draw_serving
from workbench.reproduce.galaxy_plus.testbed import CLUSTERS, FIG_16
from workbench.reproduce.result import Check, Comparison, Number, Result, Settings, Table
from workbench.runtime.engines import EngineCluster

MODEL, QUICK_MODEL = "all-MiniLM-L6-v2", "tiny-bert"
LENGTH, QUICK_LENGTH = 128, 16
QUICK_FLOPS_PER_S = 1e8
SPIKE = LoadSpike(rank=LOADED, start_s=20.0, factor=4.0, until_s=45.0)
QUICK_SPIKE = LoadSpike(rank=LOADED, start_s=3.0, factor=4.0, until_s=9.0)
WITHOUT: Variant = "without re-scheduling"
WITH: Variant = "exclusion"
SHARE, WITHIN_S = 0.9, 5.0
NAMES = {WITHOUT: "without re-scheduling", WITH: "with re-scheduling"}


def devices() -> Cluster:
    """Return two emulated RPi-L and one RPi-M, slow in proportion."""
    known = load_cluster(CLUSTERS["Env. B"])
    chosen = tuple(device for device in known.devices if device.name != "rpi-s")
    return Cluster(name=FIG_16, devices=chosen)


def run(settings: Settings) -> Result:
    """Serve the stream with and without re-scheduling, and by the best plan without the loaded device."""
    on, spike = devices(), QUICK_SPIKE if settings.quick else SPIKE
    model, length = (QUICK_MODEL, QUICK_LENGTH) if settings.quick else (MODEL, LENGTH)
    # A tiny model on this host would be done at once: an imagined slow core gives it a large model's time.
    host = made_up_host(model, QUICK_FLOPS_PER_S) if settings.quick else measured_host(model, length)
    engines = EngineCluster.start(on)
    try:
        found = load_spike_executed(model, on, engines, host, spike, length=length, notify=settings.progress)
    finally:
        engines.stop()
    return result_of(found, model, length)


def result_of(found: LoadSpikeResult, model: str, length: int) -> Result:
    """Return what the reports say."""
    rates = {name: found.throughput_per_s(name) for name in (WITHOUT, WITH)}
    before, without = rates[WITHOUT]
    after = rates[WITH][1]
    restored_s = found.restored_s(WITH, SHARE)
    reports: dict[str, ServingReport] = {NAMES[name]: found.reports[name] for name in (WITHOUT, WITH)}
    names = [device.name for device in next(iter(reports.values())).cluster.devices]
    served = sum(len(report.requests) for report in reports.values())
    wrong = sum(report.num_wrong for report in reports.values())
    repeated = sum(report.num_repeated for report in reports.values())
    rows: list[tuple[Number, ...]] = [
        (name, event.time_s, event.kind, names[event.rank] if event.rank >= 0 else "", event.value or None, event.detail)
        for name, report in reports.items()
        for event in report.events
    ]
    values = (
        ("before the load", before),
        ("with the load, without re-scheduling", without),
        ("with the load, with re-scheduling", after),
        ("best plan without the loaded device", found.best_per_s),
    )
    label = next(iter(reports.values())).label
    return Result(
        item="fig16-executed",
        title=f"Fig. 16 executed: {model}, {length} tokens, a load on one of three devices",
        paper_section="IV-F",
        source="executed",
        label_columns=("throughput",),
        comparisons=tuple(Comparison(labels=(name,), paper=None, ours=value, unit="per second", kind="measured") for name, value in values),
        tables=(Table(title="Events", columns=("", "s", "what", "device", "value", ""), rows=tuple(rows)),),
        checks=(
            Check(
                claim="without re-scheduling the load makes throughput drop significantly (Fig. 16(d))",
                holds=without < 0.7 * before,
                found=f"{before:.2f} to {without:.2f} a second",
            ),
            Check(claim="re-scheduling raises it again", holds=after > 1.2 * without, found=f"{after:.2f} a second"),
            Check(
                claim=f"back to {SHARE:.0%} of the best plan without the device within {WITHIN_S:.0f} s",
                holds=restored_s is not None and restored_s <= WITHIN_S,
                found="never" if restored_s is None else f"after {restored_s:.1f} s",
            ),
            Check(
                claim="every answer equals the local model's", holds=wrong == 0, found=f"{served} answers, {repeated} in a second attempt"
            ),
            Check(
                claim="the host kept the emulated devices' times",
                holds=all(report.valid for report in reports.values()),
                found=f"{max(report.overrun_share for report in reports.values()):.1%} late",
            ),
        ),
        explanation=(
            f"Three emulated devices ({label}) at the shares of one core that their clocks have; the load makes the pacer"
            f" hold one of them {found.spike.factor:g} times longer from {found.spike.start_s:g} s on.  These are this host's times, not a"
            " Raspberry Pi's, and the model is smaller than the paper's GPT2-L.",
            "The paper's curves are only a picture; its text says what happens and not how much.",
        ),
        series={
            "load begins": ((found.spike.start_s, 0.0),),
            **{f"{name}, throughput": tuple(report.throughput(1.0)) for name, report in reports.items()},
            **{
                f"{name}, {names[rank]}": tuple((at, 100 * value) for at, value in report.utilisation(rank, 1.0))
                for name, report in reports.items()
                for rank in range(len(names))
            },
        },
    )


def draw(result: Result) -> list[Captioned]:
    """Return throughput and each device's utilisation over time."""
    return draw_serving(result, "per second")
