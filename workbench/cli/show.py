"""Plans, reports and clusters as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.cli.inference import inference_lines, show_inference_plan
from workbench.cli.output import print_table
from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.report import EpochRecord, Report
from workbench.plots.style import all_notes, metrics_text


def show_cluster(cluster: Cluster) -> None:
    """Print a cluster's devices."""
    print_table(
        f"{cluster.name}: {cluster.description or f'{cluster.world_size} devices'}",
        ("rank", "device", "model", "GFLOP/s", "of a core", "MB", "Mbit/s", "ms", "watts"),
        (
            (
                rank,
                device.name,
                device.model or "-",
                f"{device.flops_per_s / 1e9:.1f}",
                "-" if device.host_share is None else f"{device.host_share:g}",
                f"{device.memory_bytes / 1e6:.0f}",
                f"{device.link.bytes_per_s * 8e-6:g}",
                f"{device.link.latency_s * 1e3:g}",
                f"{device.watts_idle:g}-{device.watts_busy:g}" if device.watts_busy else "-",
            )
            for rank, device in enumerate(cluster.devices)
        ),
        right=(0, 3, 4, 5, 6, 7),
    )


def show_plan(plan: Plan, cluster: Cluster) -> None:
    """Print where each layer and each sample goes (or heads, columns, tokens), and what the planner expects of it."""
    if plan.inference is not None:
        show_inference_plan(plan, plan.inference, cluster)
        return
    by_queries = any(share.queries for stage in plan.stages for share in stage.shares)
    rows = [
        (
            f"{index}",
            f"{stage.start}-{stage.stop - 1}",
            ", ".join(f"{cluster.devices[s.rank].name}: {s.queries if by_queries else s.samples}" for s in stage.shares),
        )
        for index, stage in enumerate(plan.stages)
    ]
    if plan.cached is not None:
        rows.append(("cached", "all", ", ".join(f"{cluster.devices[share.rank].name}: {share.samples}" for share in plan.cached.shares)))
    parts, head = f"{plan.num_micro_batches} micro-batches of {plan.micro_batch_size}", "samples of each micro-batch"
    if by_queries:
        queries = sum(share.queries for share in plan.stages[0].shares)
        parts, head = f"{queries} queries of {plan.micro_batch_size} samples", "queries of each step"
    print_table(f"Plan {plan.partition()} {plan.grouping()} of {plan.method}, {parts}", ("stage", "layers", head), rows)
    if plan.predicted_s:
        parts = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in plan.predicted_s.items())
        print(f"Predicted step (planner, simulated): {plan.total_s * 1e3:.0f} ms ({parts})")
    for note in plan.notes:
        print(note)


def summary(report: Report, *, figures: Path | None = None) -> str:
    """Return a run in a dozen lines: devices, plan, accuracy, epoch times with and without cache, predicted and measured step."""
    lines = [f"Devices     {', '.join(_device(report.cluster, rank) for rank in range(report.cluster.world_size))}"]
    inference = report.plan.inference
    lines += _training_lines(report) if inference is None else inference_lines(report, inference)
    lines += [f"Note        {note}" for note in all_notes(report)]
    if "adapter" in report.artifacts:
        lines.append(f"Adapter     {report.artifacts['adapter']}")
    if figures is not None:
        lines.append(f"Figures     {figures / 'index.html'}")
    return "\n".join(lines)


def _training_lines(report: Report) -> list[str]:
    plan = report.plan
    queries = sum(share.queries for share in plan.stages[0].shares)
    of_a_step = f"{queries} queries of {plan.micro_batch_size} samples" if queries else ""
    lines = [
        f"Plan        layers {plan.partition()} on device groups {plan.grouping()}, "
        + (of_a_step or f"{plan.num_micro_batches} micro-batches of {plan.micro_batch_size}"),
    ]
    if report.metrics:
        lines.append(f"Test        {metrics_text(report.metrics)}")
    full = [epoch for epoch in report.epochs if not epoch.cached]
    cached = [epoch for epoch in report.epochs if epoch.cached]
    if full:
        lines.append(f"Epoch       {_seconds(full)}{report.mark} through the backbone ({report.label})")
    if cached:
        ratio = f", {_mean(full) / _mean(cached):.1f} times shorter{report.mark}" if full and _mean(cached) > 0 else ""
        lines.append(f"            {_seconds(cached)}{report.mark} from the activation cache{ratio}")
    return lines + _steps(report) + _traffic(report)


def _device(cluster: Cluster, rank: int) -> str:
    device = cluster.devices[rank]
    return device.name if device.host_share is None else f"{device.name} ({device.host_share:g} of a core)"


def _steps(report: Report) -> list[str]:
    lines = []
    for cached, name in ((False, "first epoch"), (True, "from the cache")):
        steps = [step for step in report.steps if step.cached == cached]
        predicted = [step.predicted_s for step in steps if step.predicted_s is not None]
        measured = [step.measured_s for step in steps if step.measured_s is not None]
        words = [f"{_median(predicted) * 1e3:.0f} ms predicted (simulated)"] if predicted else []
        words += [f"{_median(measured) * 1e3:.0f} ms{report.mark} measured ({report.label})"] if measured else []
        if words:
            lines.append(f"Step        {', '.join(words)}, {name}")
    swept = [abs(point.predicted_s - point.measured_s) / point.measured_s for point in report.sweep if point.measured_s]
    if swept:
        mark = next((mark for mark in (report.mark, *(point.mark for point in report.sweep)) if mark), "")
        lines.append(f"Prediction  median deviation {_median(swept):.1%}{mark} over {len(swept)} plans")
    return lines


def _traffic(report: Report) -> list[str]:
    """Return what travels in a step beside what first-order data parallelism would move, where a method counts both."""
    sent = report.bytes.get("sent in a step, measured", report.bytes.get("sent in a step"))
    first_order = report.bytes.get("sent in a step of first-order data parallelism")
    if sent is None or not first_order:
        return []
    return [f"Sent        {sent:,} bytes in a step, by all devices; first-order data parallelism would send {first_order:,}"]


def _mean(epochs: list[EpochRecord]) -> float:
    return sum(epoch.seconds for epoch in epochs) / len(epochs)


def _seconds(epochs: list[EpochRecord]) -> str:
    return f"{_mean(epochs):.1f} s"


def _median(values: list[float]) -> float:
    from statistics import median

    return median(values)


def show_bench(name: str, result: Mapping[str, Any]) -> None:
    """Print a benchmark: what it says of itself, and its points, if it has several, as a table with one row each."""
    print(f"Benchmark {name}")
    for key, value in result.items():
        if key not in ("name", "points"):
            print(f"  {key.replace('_', ' ')}: {_figure(value)}")
    points: Sequence[Mapping[str, Any]] = result.get("points", ())
    if points:
        keys = [key for key, value in points[0].items() if not isinstance(value, dict | list | tuple)]  # the rest is for --json
        columns = tuple(key.replace("_", " ") for key in keys)
        print_table("Points", columns, ([_figure(point.get(key, "")) for key in keys] for point in points), right=range(len(columns)))


def _figure(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
