"""Summarize a run in about a dozen rows: plan, accuracy, times with and without cache, predicted and measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean, median

from workbench.core.cluster import Cluster, Device
from workbench.core.inference import InferencePlan
from workbench.core.plan import Plan, Stage
from workbench.core.report import ALL_WEIGHTS, TRAINED_WEIGHTS, Report, StepRecord, median_s, metrics_text
from workbench.core.schedule import SEND
from workbench.core.timeline import Timeline
from workbench.core.units import counted, tenths, three_figures, with_capital

PARADIGMS = {
    "hybrid": "hybrid model parallelism",
    "tensor": "tensor parallelism",
    "sequence": "sequence parallelism",
    "pipeline": "a pipeline of layers",
}


def summary_rows(report: Report) -> list[tuple[str, str]]:
    """Return (label, text) rows for a run.  A row without a label continues the previous one.  An invalid run's numbers
    are marked.
    """
    chosen = report.plan.inference
    rows = _training_rows(report) if chosen is None else _inference_rows(report, chosen)
    if report.step_parts is not None:
        rows.append(("Bottleneck", report.step_parts.sentence))
    if joules := energy_j(report):
        total, each = (
            sum(joules.values()),
            ", ".join(f"{name} {three_figures(device_joules)} J" for name, device_joules in joules.items()),
        )
        rows.append(
            (
                "Energy",
                f"{three_figures(total)} J ({three_figures(total / 3.6 / BATTERY_V)} mAh at {BATTERY_V} V), modelled: "
                f"{each}",
            )
        )
    rows += _memory_rows(report)
    if report.spent_s:
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.spent_s.items())
        rows.append(("Time", f"{sum(report.spent_s.values()):.0f} s in all: {parts}"))
    return rows


def _memory_rows(report: Report) -> list[tuple[str, str]]:
    """Return each device's largest values in a step, and the memory in use at the end of the epoch, as far as
    measured.
    """
    rows: list[tuple[str, str]] = []
    for name, timeline in report.timelines.items():
        if not any(timeline.in_use_bytes):
            continue
        each = ", ".join(
            f"{device} {three_figures(timeline.peak_bytes(rank) / 1e6)} and {three_figures(in_use / 1e6)} MB"
            for rank, (device, in_use) in enumerate(zip(timeline.device_names, timeline.in_use_bytes, strict=True))
            if in_use
        )
        epoch = name.removesuffix(", measured")
        rows.append(("" if rows else "Memory", f"{each} ({epoch}: values in a step, and in use at its end)"))
    return rows


def main_metric(report: Report) -> str:
    """Return the name of the metric that stands for a training's result; '' without any."""
    names = () if report.plan.inference is not None else report.metrics
    return "accuracy" if "accuracy" in names else min(names, default="")


def headline(report: Report) -> str:
    """Return a run's result in one sentence: its metrics, the time that the cache saved, and how well it
    was predicted.
    """
    parts = []
    full = [step for step in report.steps if not step.cached]
    if name := main_metric(report):
        epochs = f" after {counted(report.chosen_epoch, 'epoch')}" if report.chosen_epoch else ""
        parts.append(f"{name} {report.metrics[name]:.3g} on the test split{epochs}")
    # The median of steps of both kinds would be of neither.
    elif seconds := [step_s for step in full or report.steps if (step_s := step.measured_s or step.predicted_s)]:
        unit = "step" if report.plan.inference is None else "request"
        unit += " of the first epoch" if 0 < len(full) < len(report.steps) else ""
        origin = report.label if any(step.measured_s for step in report.steps) else "simulated"
        parts.append(f"a {unit} takes {_step_words(median(seconds), three_figures)}{report.mark} ({origin})")
    full_s, cached_s = _epochs_s(report)
    if full_s and cached_s and mean(cached_s) > 0:
        ratio = mean(full_s) / mean(cached_s)
        change = f"{ratio:.1f} times shorter" if ratio >= 1 else f"{1 / ratio:.1f} times longer"
        parts.append(f"an epoch from the cache is {change}{report.mark}")
    swept = [(point.predicted_s, point.measured_s) for point in report.sweep if point.measured_s]
    steps = [(step.predicted_s, step.measured_s) for step in report.steps if step.predicted_s and step.measured_s]
    if pairs := swept or steps:
        deviation = median(abs(predicted - measured) / measured for predicted, measured in pairs)
        mark = next((point.mark for point in report.sweep if point.mark), "") if swept else report.mark
        parts.append(f"{'plans' if swept else 'steps'} were predicted within {deviation:.1%}{mark} (median)")
    words = "; ".join(parts)
    return f"{with_capital(words)}." if words else ""


def _epochs_s(report: Report) -> tuple[list[float], list[float]]:
    """Return the seconds of the epochs through the backbone, and of those from the cache."""
    full_s, cached_s = (
        [epoch.seconds for epoch in report.epochs if epoch.cached == cached] for cached in (False, True)
    )
    return full_s, cached_s


BATTERY_V = 3.85
"""The voltage of a lithium-ion cell at half charge: mAh are joules / 3.6 / volts."""


def energy_j(report: Report) -> dict[str, float]:
    """Return each device's joules over all epochs by the catalogue's power model; a device without watts_busy is left
    out.

    A device uses watts_idle all the time, up to watts_busy while it computes, and joules_per_byte for each byte it
    sends.  The report has one timeline per kind of step, which represents all steps of that kind.  The result is empty
    if a kind has no timeline.
    """
    joules: dict[str, float] = {}
    devices = {device.name: device for device in report.cluster.devices if device.watts_busy}
    for cached, name in ((False, "first epoch"), (True, "cached epoch")):
        seconds = sum(epoch.seconds for epoch in report.epochs if epoch.cached == cached)
        timeline = report.timelines.get(f"{name}, measured") or report.timelines.get(f"{name}, predicted")
        if not seconds:
            continue
        if timeline is None or not timeline.makespan_s:
            return {}
        for rank, device_name in enumerate(timeline.device_names):
            if device_name in devices:
                joules[device_name] = joules.get(device_name, 0.0) + seconds / timeline.makespan_s * device_j(
                    timeline, rank, devices[device_name]
                )
    return joules


def device_j(timeline: Timeline, rank: int, device: Device) -> float:
    """Return the joules of a device over a timeline (see energy_j)."""
    sent_bytes = sum(span.nbytes for span in timeline.spans if span.rank == rank and span.op.kind == SEND)
    active_j = (device.watts_busy - device.watts_idle) * timeline.busy_s(rank) + device.joules_per_byte * sent_bytes
    return device.watts_idle * timeline.makespan_s + active_j


def plan_words(chosen: InferencePlan) -> str:
    """Describe how a plan splits a sequence: paradigm, schemes, ring."""
    words = [PARADIGMS[chosen.paradigm] if chosen.num_positions > 1 else "one device alone"]
    if chosen.schemes and chosen.num_positions > 1:
        first, second = chosen.configuration
        words.append(f"{first} layers in scheme 1 and {second} in scheme 2")
    if chosen.overlap and chosen.num_positions > 1:
        tiles = f" in tiles of at most {chosen.tile_tokens} tokens" if chosen.tile_tokens else ""
        words.append(f"overlapped{tiles}{', both ways round' if chosen.both_ways else ''}")
    return ", ".join(words)


def plan_rows(plan: Plan, cluster: Cluster) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Return the columns and rows of a plan: the layers of each stage, and each device's samples or queries, or its
    parts of a sequence.
    """
    rows: list[tuple[object, ...]] = []
    if (chosen := plan.inference) is not None:
        for position, rank in enumerate(chosen.ranks):
            cells: tuple[object, ...] = ("-",) * 4
            if (stage_index := plan.stage_of(rank)) is not None:
                device_share = next(share for share in plan.stages[stage_index].shares if share.rank == rank)
                cells = (
                    f"{plan.stages[stage_index].start}-{plan.stages[stage_index].stop - 1}",
                    device_share.heads,
                    device_share.columns,
                    device_share.tokens,
                )
            rows.append((position, cluster.devices[rank].name, *cells))
        return ("position", "device", "layers", "heads", "columns", f"tokens of {chosen.length}"), rows
    by_queries = any(share.queries for stage in plan.stages for share in stage.shares)

    def shares(stage: Stage) -> str:
        return ", ".join(
            f"{cluster.devices[share.rank].name} {share.queries if by_queries else share.samples}"
            for share in stage.shares
        )

    for first, stages in plan.assignments:
        for index, stage in enumerate(stages):
            layers = f"{stage.start}-{stage.stop - 1}" if stage.num_layers > 1 else f"{stage.start}"
            rows.append((f"stage {index}{f', from step {first + 1} on' if first else ''}", layers, shares(stage)))
    if plan.cached is not None:
        rows.append(("cached epochs", "adapters of all", f"{shares(plan.cached)} (of each mini-batch)"))
    return ("", "layers", "queries of a step" if by_queries else "samples of a micro-batch"), rows


def _training_rows(report: Report) -> list[tuple[str, str]]:
    plan, mark = report.plan, report.mark
    rows = [("Plan", f"{plan.where()}, {plan.cut}")]
    if report.metrics:
        rows.append(("Test", metrics_text(report)))
    full_s, cached_s = _epochs_s(report)
    if full_s:
        # A progress bar counts this host's seconds; all other times are the devices'.
        dilated = f"; {tenths(mean(full_s) * report.dilation)} s on this host's clock" if report.dilation > 1 else ""
        rows.append(("Epoch", f"{tenths(mean(full_s))} s{mark} through the backbone ({report.label}{dilated})"))
    if cached_s:
        ratio = f", {mean(full_s) / mean(cached_s):.1f} times shorter{mark}" if full_s and mean(cached_s) > 0 else ""
        rows.append(("", f"{tenths(mean(cached_s))} s{mark} from the activation cache{ratio}"))
    label = "Step"
    for cached, name in ((False, "first epoch"), (True, "from the cache")):
        if times := _times(report, [step for step in report.steps if step.cached == cached], digits=0):
            rows.append((label, f"{times}, {name} (medians)"))
            label = ""
    trained, weights = report.bytes.get(TRAINED_WEIGHTS), report.bytes.get(ALL_WEIGHTS)
    if trained and weights:  # a run may count its trained weights where the number of all is not known
        number = trained // 4
        count = f"{three_figures(number / 1e6)} million" if number >= 1e6 else f"{number:,}"
        share = trained / weights
        # Layers may be unfrozen later, or never.
        is_most = any(step.lowest_trained for step in report.steps)
        # All weights are counted to a few thousandths.
        which = "all" if share > 0.99 and not is_most else f"{share:.1%}" if share >= 0.001 else "less than 0.1%"
        rows.append(("Weights", f"{which} are trained{' at most' * is_most}: {count} numbers"))
    lowest = [step.lowest_trained for step in report.steps]
    begins = [
        step for step, layer in enumerate(lowest) if layer is not None and (not step or layer != lowest[step - 1])
    ]
    if len(begins) > 1:
        depths = [f"{plan.num_layers - (lowest[step] or 0)} from step {step + 1}" for step in begins]
        rows.append(("Trained", f"layers from the top: {', '.join(depths)}"))
    swept = [abs(point.predicted_s - point.measured_s) / point.measured_s for point in report.sweep if point.measured_s]
    if swept:
        mark = next((point.mark for point in report.sweep if point.mark), "")
        rows.append(("Prediction", f"median deviation {median(swept):.1%}{mark} over {len(swept)} plans"))
    # The bytes sent in a step, if the method counts them, and the bytes that first-order data parallelism would send.
    sent_bytes = report.bytes.get("sent in a step, measured", report.bytes.get("sent in a step"))
    if sent_bytes is not None and (other := report.bytes.get("sent in a step of first-order data parallelism")):
        rows.append(
            (
                "Sent",
                f"{sent_bytes:,} bytes in a step, by all devices; first-order data parallelism would send {other:,}",
            )
        )
    return rows


def _inference_rows(report: Report, chosen: InferencePlan) -> list[tuple[str, str]]:
    names, mark = [report.cluster.devices[rank].name for rank in chosen.ranks], report.mark
    tokens = chosen.tokens(chosen.length) if chosen.shares and chosen.length else ()
    shares = (("heads", chosen.units), ("columns", chosen.columns), ("tokens", tokens), ("layers", chosen.layers))
    parts = [f"{name} {'-'.join(map(str, numbers))}" for name, numbers in shares if numbers]
    rows = [("Plan", plan_words(chosen)), ("", f"{', '.join(names)}{': ' if parts else ''}{', '.join(parts)}")]
    if times := _times(report, report.steps, digits=1):
        rows.append(("Latency", f"{times}, median of {len(report.steps)} requests"))
    metrics = report.metrics
    if any(step.measured_s is not None for step in report.steps):
        latencies = ", ".join(
            f"{name} {metrics[f'latency {name} s'] * 1e3:.1f} ms{mark}" for name in ("mean", "p50", "p95", "p99")
        )
        rows.append(("", f"{latencies}; {three_figures(metrics['requests per s'])}{mark} requests per s"))
    if "first token s" in metrics:
        further = (
            f", every further one {metrics['further token s'] * 1e3:.1f} ms{mark}"
            if "further token s" in metrics
            else ""
        )
        rows.append(("Text", f"first token after {metrics['first token s'] * 1e3:.1f} ms{mark}{further}"))
    if "largest error" in metrics:
        largest = metrics["largest error"]
        differ = (
            f"differ from the local model's by at most {largest:.1e} of the largest number"
            if largest
            else "equal the local model's"
        )
        rows.append(("Checked", f"answers {differ}"))
    if "texts that differ" in metrics:
        rows.append(
            ("Checked", f"{metrics['texts that differ']:.0f} of the compared texts differ from the local model's")
        )
    return rows


def _times(report: Report, steps: Sequence[StepRecord], *, digits: int) -> str:
    """Return the medians of a step's predicted and measured seconds in words; '' without any."""
    predicted_s, measured_s = median_s(steps, "predicted_s"), median_s(steps, "measured_s")

    def number(value: float) -> str:
        return f"{value:.{digits}f}"

    words = [] if predicted_s is None else [f"{_step_words(predicted_s, number)} predicted (simulated)"]
    if measured_s is not None:
        words.append(f"{_step_words(measured_s, number)}{report.mark} measured ({report.label})")
    return ", ".join(words)


def _step_words(seconds: float, number: Callable[[float], str]) -> str:
    """Return the time of a step in milliseconds, from 10 s on in seconds."""
    return f"{number(seconds)} s" if seconds >= 10 else f"{number(seconds * 1e3)} ms"
