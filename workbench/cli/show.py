"""Plans, reports and clusters as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.cli.output import print_table
from workbench.core.cluster import Cluster, Device
from workbench.core.plan import Plan
from workbench.core.report import Report, all_notes
from workbench.summary import plan_rows, plan_words, summary_rows


def show_cluster(cluster: Cluster) -> None:
    """Print a cluster's devices."""
    print_table(
        f"{cluster.name}: {cluster.description or cluster.size_words}",
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
    chosen = plan.inference
    words = f"{plan.method}: {plan.where()}, {plan.cut}" if chosen is None else f"{chosen.method}: {plan_words(chosen)}"
    print_table(f"Plan of {words}", *plan_rows(plan, cluster), right=() if chosen is None else (0, 3, 4, 5))
    if chosen is not None and chosen.predicted_s:
        print(f"Predicted latency of a sequence of {chosen.length} tokens (planner, simulated): {chosen.predicted_s * 1e3:.1f} ms")
    elif plan.predicted_s:
        parts = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in plan.predicted_s.items())
        print(f"Predicted step (planner, simulated): {plan.total_s * 1e3:.0f} ms ({parts})")
    for note in plan.notes:
        print(note)


def summary(report: Report, *, figures: Path | None = None) -> str:
    """Return a run in a dozen lines: devices, plan, accuracy, epoch times with and without cache, predicted and measured step."""
    devices = ", ".join(map(_device_words, report.cluster.devices))
    rows = [("Devices", devices), *summary_rows(report), *(("Note", note) for note in all_notes(report))]
    if "adapter" in report.artifacts:
        rows.append(("Result", report.artifacts["adapter"]))
    if figures is not None:
        rows.append(("Figures", str(figures / "index.html")))
    return "\n".join(f"{name:<12}{text}" for name, text in rows)


def _device_words(device: Device) -> str:
    share = "" if device.host_share is None else f"{device.host_share:g} of a core"
    facts = [share, "" if device.framework == "torch" else device.framework]
    return f"{device.name} ({', '.join(filter(None, facts))})" if any(facts) else device.name


def next_steps(report: Report, path: Path | None, *, program: str = "workbench") -> str:
    """Return commands to go on with after a run.  path: where its report is.  program: as which the user calls the workbench."""
    steps = []
    if "adapter" in report.artifacts:
        steps.append(f'{program} predict {report.artifacts["adapter"]} "A text of your own."')
    if path is not None:
        steps += [f"{program} draw {path}", f"{program} compare {path} OTHER.json"]
    elif report.mode == "execute":
        steps.append("the same command with --report FILE, for `workbench draw` and `workbench compare`")
    return "\n".join(f"{'' if number else 'Next':<12}{step}" for number, step in enumerate(steps))


def show_bench(name: str, result: Mapping[str, Any]) -> None:
    """Print a benchmark: its values, and its lists of points as tables with one row each."""
    print(f"Benchmark {name}")
    tables = {key: value for key, value in result.items() if isinstance(value, list) and value and isinstance(value[0], dict)}
    for key, value in result.items():
        if key != "name" and key not in tables:
            print(f"  {key.replace('_', ' ')}: {_figure(value)}")
    for title, points in tables.items():
        keys = [key for key, value in points[0].items() if not isinstance(value, dict | list | tuple)]  # the rest is for --json
        columns = tuple(key.replace("_", " ") for key in keys)
        rows = ([_figure(point.get(key, "")) for key in keys] for point in points)
        print_table(title.capitalize(), columns, rows, right=range(len(columns)))


def _figure(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
