"""Plans, sweeps and reports as small tables for a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from markupsafe import Markup

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan, Stage
from workbench.core.report import EpochRecord, Report, SweepPoint
from workbench.core.timeline import INVALID_MARK
from workbench.planners import OrderStudy
from workbench.planners.memory import Need
from workbench.plots.style import all_notes, byte_unit
from workbench.widgets.planning import Comparison

joined = Markup().join


class Table:
    """Rows of text with a heading: HTML in a notebook, aligned columns elsewhere."""

    def __init__(self, columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", note: str = "") -> None:
        self.columns, self.rows = tuple(columns), [tuple(map(str, row)) for row in rows]
        self.title, self.note = title, note

    def __str__(self) -> str:
        everything = [self.columns, *self.rows]
        widths = [max(len(row[index]) for row in everything) for index in range(len(self.columns))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in everything]
        return "\n".join(line for line in [self.title, *lines, self.note] if line)

    __repr__ = __str__

    def _repr_html_(self) -> Markup:
        style = "text-align:left;padding:2px 14px 2px 0"
        head = joined(Markup("<th style='{}'>{}</th>").format(style, name) for name in self.columns if any(self.columns))
        rows = (joined(Markup("<td style='{}'>{}</td>").format(style, cell) for cell in row) for row in self.rows)
        body = joined(Markup("<tr>{}</tr>").format(row) for row in rows)
        title = Markup("<div><b>{}</b></div>").format(self.title) if self.title else ""
        note = Markup("<div>{}</div>").format(self.note) if self.note else ""
        table = Markup("{}<table style='line-height:1.4'><thead><tr>{}</tr></thead><tbody>{}</tbody></table>{}")
        return table.format(title, head, body, note)


def plan_table(plan: Plan, cluster: Cluster) -> Table:
    """Return who holds which layers and computes how many samples of each micro-batch."""

    def samples(stage: Stage) -> str:
        return ", ".join(f"{cluster.devices[share.rank].name} {share.samples}" for share in stage.shares)

    rows = [
        (f"stage {index}", f"{stage.start}-{stage.stop - 1}" if stage.num_layers > 1 else f"{stage.start}", samples(stage))
        for index, stage in enumerate(plan.stages)
    ]
    if plan.cached is not None:
        rows.append(("cached epochs", "adapters of all", samples(plan.cached) + " (of each mini-batch)"))
    idle = [device.name for rank, device in enumerate(cluster.devices) if plan.stage_of(rank) is None]
    return Table(
        ("", "layers", "samples of a micro-batch"),
        rows,
        title=f"Layers {plan.partition()} on device groups {plan.grouping()}, "
        f"{plan.num_micro_batches} micro-batches of {plan.micro_batch_size} samples",
        note=f"Idle in the first epoch: {', '.join(idle)}." if idle else "",
    )


def needs_table(needs: Mapping[int, Need], cluster: Cluster) -> Table:
    """Return the planned bytes of each rank, by purpose, beside the device's budget."""

    def row(rank: int, need: Need) -> tuple[str, ...]:
        device = cluster.devices[rank]
        training = need.gradient_bytes + need.optimizer_bytes
        activations = need.context_bytes + need.workspace_bytes + need.boundary_bytes
        sizes = (need.weights_bytes, training, activations, need.total_bytes, device.memory_bytes)
        return device.name, *(byte_unit(nbytes).text(nbytes) for nbytes in sizes)

    return Table(
        ("device", "weights", "gradients and optimizer", "activations", "in all", "budget"),
        (row(rank, need) for rank, need in sorted(needs.items())),
        title="What each device needs in the first epoch (planned)",
    )


def sweep_table(points: Sequence[SweepPoint]) -> Table:
    """Return the step time of each plan, simulated and (where it was executed) measured."""
    measured = any(point.measured_s for point in points)
    inside = any(point.plan.inference is not None for point in points)
    rows = []
    for point in points:
        made = point.plan.inference
        where = [point.plan.partition(), point.plan.grouping()]
        if made is not None:
            where = [
                "-".join(map(str, parts)) if parts else "all" for parts in (made.units, made.tokens(made.length) if made.shares else ())
            ]
        row = [point.name, *where, f"{point.predicted_s * 1e3:.0f}"]
        if measured and point.measured_s:
            deviation = (point.predicted_s - point.measured_s) / point.measured_s
            row += [f"{point.measured_s * 1e3:.0f}{point.mark}", f"{deviation:+.1%}{point.mark}", f"{point.overrun_share:.1%}"]
        rows.append(row + [""] * (7 - len(row) if measured else 0))
    columns = ["plan", *(("heads", "tokens") if inside else ("layers", "groups")), "simulated, ms"] + (
        ["measured, ms", "deviation", "late"] if measured else []
    )
    title = "Latency of a request under each plan" if inside else "Step time of the first epoch under each plan"
    is_marked = any(point.mark for point in points if point.measured_s)
    return Table(columns, rows, title=title, note=f"{INVALID_MARK} The host was too busy: this time means little." if is_marked else "")


def comparison_table(compared: Sequence[Comparison], *, title: str = "What each planner makes of it (simulated)") -> Table:
    """Return each planner's plan and throughput; for what does not fit, who lacks what."""
    rows = [
        (one.planner, one.plan.partition(), one.plan.grouping(), f"{one.samples_per_s:.3g}")
        if one.plan is not None
        else (one.planner, "out of memory", one.why.split(" (weights")[0], "")
        for one in compared
    ]
    return Table(("planner", "layers", "device groups", "samples/s"), rows, title=title)


def phases_table(plans: Sequence[Plan], simulated_s: Sequence[float]) -> Table:
    """Return the phases of Eq. 5-6 of each plan, beside its simulated step."""
    rows = [
        (
            str(len(plan.stages)),
            plan.partition(),
            plan.grouping(),
            *(f"{plan.predicted_s[phase] * 1e3:.0f}" for phase in ("beginning", "execution", "ending")),
            f"{plan.total_s * 1e3:.0f}",
            f"{seconds * 1e3:.0f}",
        )
        for plan, seconds in zip(plans, simulated_s, strict=True)
    ]
    columns = ("stages", "layers", "device groups", "beginning", "execution", "ending", "sum (Eq. 7)", "simulated")
    return Table(columns, rows, title="The best plan for each number of stages, in ms")


def orders_table(study: OrderStudy, *, most: int = 6) -> Table:
    """Return the best orders of a study and the order in which the cluster lists its devices."""
    rows = [(" - ".join(row.names), row.plan.partition(), row.plan.grouping(), f"{row.step_s * 1e3:.0f}") for row in study.rows[:most]]
    fixed = study.fixed
    listed = "nothing fits" if fixed is None else f"{fixed.step_s * 1e3:.0f} ms, {fixed.ratio - 1:.0%} more than the best"
    return Table(
        ("order", "layers", "device groups", "step, ms"),
        rows,
        title=f"The best of {study.num_orders} orders",
        note=f"In the order that the cluster lists: {listed}. In {study.refused} orders nothing fits.",
    )


def grouping_table(model: str, found: Mapping[int, Sequence[Comparison]], paper: Mapping[int, str], *, planner: str) -> Table:
    """Return the planner's device groups for each number of devices, beside those that the paper prints (PAC+, Fig. 17)."""
    rows = []
    for count, compared in found.items():
        [one] = [one for one in compared if one.planner == planner]
        ours = "out of memory" if one.plan is None else one.plan.grouping()
        rows.append((str(count), ours, paper.get(count, ""), "same" if ours == paper.get(count) else "other"))
    return Table(("devices", "ours", "paper", ""), rows, title=f"{model}: device groups")


def report_table(report: Report) -> Table:
    """Return a run in a few lines: plan, epochs with and without cache, steps predicted and measured, metrics, notes."""
    rows = [
        ("Numbers", report.label),
        ("Plan", _split_words(report)),
    ]
    if report.plan.inference is not None:
        return Table(("", ""), [*rows, *_request_rows(report), *(("Note", note) for note in all_notes(report))])
    if _divides_queries(report.plan):
        return Table(("", ""), [*rows, *_query_rows(report), *(("Note", note) for note in all_notes(report))])
    full = [epoch for epoch in report.epochs if not epoch.cached]
    cached = [epoch for epoch in report.epochs if epoch.cached]
    if full:
        rows.append(("First epoch", f"{full[0].seconds:.1f} s{report.mark} through the backbone"))
    if cached:
        ratio = f", {full[0].seconds / _mean(cached):.1f} times shorter{report.mark}" if full and _mean(cached) > 0 else ""
        rows.append(("Later epochs", f"{_mean(cached):.1f} s{report.mark} each, from the activation cache{ratio}"))
    for is_cached, name in ((False, "Step, first epoch"), (True, "Step, cached")):
        steps = [step for step in report.steps if step.cached is is_cached]
        predicted = [step.predicted_s for step in steps if step.predicted_s is not None]
        measured = [step.measured_s for step in steps if step.measured_s is not None]
        words = [f"{median(predicted) * 1e3:.0f} ms simulated"] if predicted else []
        words += [f"{median(measured) * 1e3:.0f} ms{report.mark} measured"] if measured else []
        if words:
            rows.append((name, ", ".join(words)))
    if report.metrics:
        rows.append(("Test split", ", ".join(f"{name} {value:.3g}" for name, value in report.metrics.items())))
    rows += [("Note", note) for note in all_notes(report)]
    return Table(("", ""), rows)


def _split_words(report: Report) -> str:
    """Return what the plan divides, in words."""
    made = report.plan.inference
    if made is None and _divides_queries(report.plan):
        shares = report.plan.stages[0].shares
        words = ", ".join(report.cluster.devices[share.rank].name for share in shares)
        return f"queries {'-'.join(str(share.queries) for share in shares)} on {words}"
    if made is None:
        return f"layers {report.plan.partition()} on device groups {report.plan.grouping()}"
    names = ", ".join(report.cluster.devices[rank].name for rank in made.ranks)
    if made.paradigm == "pipeline":
        return f"layers {report.plan.partition()} one after the other on {names}"
    first, second = made.configuration
    parts = [f"[{first}, {second}] layers in scheme 1 and 2"] if made.paradigm == "hybrid" else [f"{made.paradigm} parallel"]
    parts += [f"heads {'-'.join(map(str, made.units))}"] if made.units else []
    parts += [f"tokens {'-'.join(map(str, made.tokens(made.length)))}"] if made.shares and made.length else []
    return f"{', '.join(parts)} on {names}{', overlapped' * made.overlap}"


def _request_rows(report: Report) -> list[tuple[str, str]]:
    """Return the latencies of single requests, simulated and measured, and the other metrics."""
    predicted = [step.predicted_s for step in report.steps if step.predicted_s is not None]
    measured = [step.measured_s for step in report.steps if step.measured_s is not None]
    words = [f"{median(predicted) * 1e3:.1f} ms simulated"] if predicted else []
    words += [f"{median(measured) * 1e3:.1f} ms{report.mark} measured"] if measured else []
    rows = [("Request, median", ", ".join(words))] if words else []
    for name, value in report.metrics.items():
        is_time = name.endswith(" s") and not name.endswith(" per s")
        mark = report.mark if name.endswith(" s") else ""  # latencies and rates: the errors of answers do not depend on the host
        rows.append((name.removesuffix(" s"), f"{value * 1e3:.1f} ms{mark}") if is_time else (name, f"{value:.3g}{mark}"))
    return rows


def _divides_queries(plan: Plan) -> bool:
    return len(plan.stages) == 1 and any(share.queries for share in plan.stages[0].shares)


def _query_rows(report: Report) -> list[tuple[str, str]]:
    """Return steps, simulated and measured, what travels in one, and the score, of training by forward passes."""
    predicted = [step.predicted_s for step in report.steps if step.predicted_s is not None]
    measured = [step.measured_s for step in report.steps if step.measured_s is not None]
    words = [f"{median(predicted) * 1e3:.0f} ms simulated"] if predicted else []
    words += [f"{median(measured) * 1e3:.0f} ms{report.mark} measured"] if measured else []
    # A step in which a device died is made, but not timed.
    timed = ("Steps timed", len(measured)) if measured else ("Steps", len(predicted))
    rows = [(timed[0], f"{timed[1]}, no backward pass"), ("Step, median", ", ".join(words))]
    if (sent := report.bytes.get("sent in a step, measured")) is not None:
        rows.append(("Sent in a step", f"{byte_unit(sent).text(sent)}, all devices together"))
    if first_order := report.bytes.get("sent in a step of first-order data parallelism"):
        rows.append(("Of first-order", f"{byte_unit(first_order).text(first_order)}, the gradients of the same values"))
    if report.metrics:
        rows.append(("Test split", ", ".join(f"{name} {value:.3g}" for name, value in report.metrics.items())))
    return rows


def _mean(epochs: Sequence[EpochRecord]) -> float:
    return sum(epoch.seconds for epoch in epochs) / len(epochs)
