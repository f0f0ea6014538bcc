"""Small tables for a notebook: plans, sweeps, reports."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from markupsafe import Markup

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.report import Report, SweepPoint, all_notes
from workbench.core.summary import headline, plan_rows, summary_rows
from workbench.core.timeline import INVALID_MARK
from workbench.core.units import are_numbers, counted

joined = Markup().join

_MANY_COLUMNS = 9
"""From so many columns on they are closer together, so that a notebook next to its file browser shows them all."""


class Table:
    """Rows of text with a heading: HTML in a notebook, aligned columns elsewhere.  Columns of numbers are flush right.

    more: lines that a notebook shows only on request.  faint: the numbers of rows that a notebook shows in grey.
    """

    def __init__(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[object]],
        *,
        title: str = "",
        note: str = "",
        more: Sequence[str] = (),
        faint: Collection[int] = (),
    ) -> None:
        self.columns, self.rows = tuple(columns), [tuple(map(str, row)) for row in rows]
        self.title, self.note, self.more, self._faint = title, note, tuple(more), frozenset(faint)
        cells = list(zip(*self.rows, strict=True)) or [()] * len(self.columns)
        self._aligned = ["right" if are_numbers(column) else "left" for column in cells]

    def __str__(self) -> str:
        everything = [self.columns, *self.rows]
        widths = [max(len(row[index]) for row in everything) for index in range(len(self.columns))]
        lines = []
        for row in everything:
            padded = [
                cell.rjust(width) if side == "right" else cell.ljust(width)
                for cell, width, side in zip(row, widths, self._aligned, strict=True)
            ]
            lines.append("  ".join(padded).rstrip())
        return "\n".join(line for line in [self.title, *lines, self.note, *self.more] if line)

    __repr__ = __str__

    def _repr_html_(self) -> Markup:
        head = self._row("th", self.columns) if any(self.columns) else ""
        body = joined(self._row("td", row, number in self._faint) for number, row in enumerate(self.rows))
        title = Markup("<div><b>{}</b></div>").format(self.title) if self.title else ""
        note = Markup("<div>{}</div>").format(self.note) if self.note else ""
        if self.more:
            items = joined(Markup("<li>{}</li>").format(line) for line in self.more)
            many = counted(len(self.more), "note")
            note += Markup("<details><summary>{}</summary><ul>{}</ul></details>").format(many, items)
        table = Markup("{}<table style='line-height:1.4'><thead>{}</thead><tbody>{}</tbody></table>{}")
        return table.format(title, head, body, note)

    def _row(self, tag: str, cells: Sequence[str], is_faint: bool = False) -> Markup:
        """Return a row.  A single word, such as a device's name, is not broken at its hyphens."""
        gap = 14 if len(cells) < _MANY_COLUMNS else 7
        opening = "th scope='col'" if tag == "th" else tag
        cell = Markup(f"<{opening} style='text-align:{{}};padding:2px {gap}px 2px 0{{}}'>{{}}</{tag}>")
        parts = (
            cell.format(side, "" if " " in text else ";white-space:nowrap", text)
            for text, side in zip(cells, self._aligned, strict=True)
        )
        style = Markup(" style='opacity:0.65'") if is_faint else ""
        return Markup("<tr{}>{}</tr>").format(style, joined(parts))


def plan_table(plan: Plan, cluster: Cluster) -> Table:
    """Return which device has which layers and computes how many samples of each micro-batch."""
    idle = [device.name for rank, device in enumerate(cluster.devices) if plan.stage_of(rank) is None]
    return Table(
        *plan_rows(plan, cluster),
        title=f"{plan.where().capitalize()}, {plan.num_micro_batches} micro-batches of {plan.micro_batch_size} samples",
        note=f"Idle in the first epoch: {', '.join(idle)}." if idle else "",
    )


def sweep_table(points: Sequence[SweepPoint]) -> Table:
    """Return the step time of each plan, simulated and (if it was executed) measured."""
    measured = any(point.measured_s for point in points)
    inside = any(point.plan.inference is not None for point in points)
    rows = []
    for point in points:
        inference = point.plan.inference
        where = [point.plan.partition(), point.plan.grouping()]
        if inference is not None:
            where = [
                "-".join(map(str, parts)) if parts else "all"
                for parts in (inference.units, inference.tokens(inference.length) if inference.shares else ())
            ]
        row = [point.name, *where, f"{point.predicted_s * 1e3:.0f}"]
        if measured and point.measured_s:
            deviation = (point.predicted_s - point.measured_s) / point.measured_s
            row += [
                f"{point.measured_s * 1e3:.0f}{point.mark}",
                f"{deviation:+.1%}{point.mark}",
                f"{point.overrun_share:.1%}",
            ]
        rows.append(row + [""] * (7 - len(row) if measured else 0))
    columns = ["plan", *(("heads", "tokens") if inside else ("layers", "groups")), "simulated, ms"] + (
        ["measured, ms", "deviation", "late"] if measured else []
    )
    title = "Latency of a request under each plan" if inside else "Step time of the first epoch under each plan"
    is_marked = any(point.mark for point in points if point.measured_s)
    return Table(
        columns,
        rows,
        title=title,
        note=f"{INVALID_MARK} The host was too busy: this time means little." if is_marked else "",
    )


def report_table(report: Report) -> Table:
    """Return a run in a few lines: its result in a sentence, plan, each device's work, epochs, steps, metrics,
    notes.
    """
    rows = [("Numbers", report.label), *summary_rows(report)]
    if report.plan.inference is None:
        timed = sum(step.measured_s is not None for step in report.steps)  # a step in which a device was lost is not
        rows.insert(2, ("", report.plan.described(report.cluster.names)))
        rows.append(("Steps", f"{len(report.steps)}{f', {timed} of them timed' * (0 < timed < len(report.steps))}"))
    notes = all_notes(report)
    warning = notes[0] if notes and notes[0].startswith(INVALID_MARK) else ""
    return Table(("", ""), rows, title=headline(report), note=warning, more=notes[bool(warning) :])
