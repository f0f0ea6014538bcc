"""Tables of RingAda's benchmark: its sides, its number of trained layers, its loss by time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import mean, median, stdev
from typing import Any

from workbench.bench.frame import ratios
from workbench.core.report import Report, StepRecord
from workbench.reproduce.ringada.executed import Curve
from workbench.reproduce.ringada.training import depth_of, load_constants

PAPERS_SHARE = 0.36
"""RingAda's memory over Single's (Table I: 373.056 and 1035.04 MB)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The runs of a side.  watched: the measured peak of each step of each run.  busiest_s, peaks: see bounds."""

    reports: Sequence[Report]
    watched: Sequence[Sequence[int]]
    busiest_s: float
    peaks: Mapping[int, tuple[int, int]]

    @property
    def seconds(self) -> list[float]:
        """Return the seconds of each run."""
        return [measured_s(report) for report in self.reports]

    @property
    def peak_bytes(self) -> int:
        """Return the measured peak of the largest device."""
        return max((nbytes for run in self.watched for nbytes in run), default=0)

    def off(self) -> list[float]:
        """Return by how much the measured seconds of each step deviate from the simulated ones, in order of size."""
        return sorted(abs(_over_predicted(step) - 1) for report in self.reports for step in report.steps)

    def by_depth(self) -> dict[int, tuple[float, float, int]]:
        """Return by trained layers: median seconds of a mini-batch, measured over simulated, and the largest device's measured bytes."""
        found: dict[int, list[tuple[StepRecord, int]]] = {}
        for report, watched in zip(self.reports, self.watched, strict=True):
            for step, nbytes in zip(report.steps, [*watched, *[0] * len(report.steps)], strict=False):
                found.setdefault(report.plan.num_layers - (step.lowest_trained or 0), []).append((step, nbytes))
        size = self.reports[0].job.batch_size
        return {
            depth: (
                median((step.measured_s or 0.0) * size / step.samples for step, _ in own),
                median(_over_predicted(step) for step, _ in own),
                max(nbytes for _, nbytes in own),
            )
            for depth, own in sorted(found.items())
        }


def _over_predicted(step: StepRecord) -> float:
    return (step.measured_s or 0.0) / (step.predicted_s or 1.0)


def side_table(name: str, sides: Mapping[str, Side]) -> list[dict[str, Any]]:
    """Return a row for each side of a point.

    step_off: median and 95 % of the steps' deviations from the simulated seconds.  over_bound: over the busiest device's compute.
    """
    rows, ring = [], sides["RingAda"].seconds
    for side, own in sides.items():
        seconds, off = own.seconds, own.off()
        ratio = ratios(seconds, ring)
        rows.append(
            {
                "point": name,
                "side": side,
                "s": median(seconds),
                "over_RingAda": ratio["ratio"],
                "spread": f"{ratio['ratio_min']:.2f}-{ratio['ratio_max']:.2f}",
                "over_simulated": median(seconds) / sum(step.predicted_s or 0.0 for step in own.reports[0].steps),
                "step_off": median(off),
                "step_off_p95": off[round(0.95 * (len(off) - 1))],
                "over_bound": median(seconds) / own.busiest_s,
                "MB": max(own.peaks.values())[0] / 1e6,
                "MB_measured": own.peak_bytes / 1e6,
                "valid": all(one.valid for one in own.reports),
            }
        )
    return rows


def depth_table(name: str, sides: Mapping[str, Side]) -> list[dict[str, Any]]:
    """Return a row for each number of layers that RingAda trained: times, other sides' mini-batches over its own, and memory.

    MB: simulated / measured.  of_Single: simulated, and without the embeddings; at_most_.36: both against PAPERS_SHARE.
    """
    ring, others, rows = sides["RingAda"], ("PipeAdapter", "PipeAdapter stashing", "Single"), []
    full = {side: own.by_depth()[max(own.peaks)] for side, own in sides.items()}
    single = sides["Single"].peaks[max(ring.peaks)]
    for depth, (seconds, over_predicted, nbytes) in ring.by_depth().items():
        row: dict[str, Any] = {"point": name, "trained": depth, "s": seconds, "over_simulated": over_predicted}
        row |= {f"{side} over it": full[side][0] / seconds for side in others}
        row["MB"] = f"{ring.peaks[depth][0] / 1e6:.0f} / {nbytes / 1e6:.0f}"
        row |= {f"{side} MB": f"{max(sides[side].peaks.values())[0] / 1e6:.0f} / {sides[side].peak_bytes / 1e6:.0f}" for side in others}
        of_single, of_bare = (one / whole for one, whole in zip(ring.peaks[depth], single, strict=True))
        row |= {"of_Single": of_single, "of_Single_without_embedding": of_bare}
        rows.append(row | {"at_most_.36": " / ".join("yes" if one <= PAPERS_SHARE else "no" for one in (of_single, of_bare))})
    return rows


def loss_table(name: str, sides: Mapping[str, Side], curves: Mapping[str, Sequence[Curve]]) -> list[dict[str, Any]]:
    """Return the time to RingAda's last loss, and the validation score after equal time, with the standard deviation over the seeds.

    curves: trained in one process with all their sentences' tokens (Fig. 3); the time of a mini-batch is that measured in this benchmark,
    by trained layers.  Equal time: that of the first scheme that has finished.  Empty if RingAda is not among the curves.
    """
    constants, seconds = load_constants(), {scheme: sides[scheme].by_depth() for scheme in curves}
    if "RingAda" not in curves:
        return []
    steps, clock = round(constants.epochs), dict[str, list[float]]()
    for scheme, by_depth in seconds.items():
        depths = [-(-depth_of(constants, scheme, step) * max(by_depth) // constants.layers) for step in range(steps)]
        passed, points = list(accumulate(by_depth[depth][0] for depth in depths)), len(curves[scheme][0].losses)
        clock[scheme] = [passed[steps * (point + 1) // points - 1] for point in range(points)]
    end_s, targets, rows = min(times[-1] for times in clock.values()), [curve.losses[-1] for curve in curves["RingAda"]], []
    for scheme, own in curves.items():
        reached = [
            next((time for time, loss in zip(clock[scheme], curve.losses, strict=True) if loss <= target), math.inf)
            for curve, target in zip(own, targets, strict=True)
        ]
        count = sum(time <= end_s for time in clock[scheme])
        scores = [curve.scores[count - 1] for curve in own]
        rows.append(
            {
                "point": name,
                "side": scheme,
                "s_to_the_loss": mean(reached),
                "deviation_s": stdev(reached) if math.inf not in reached else math.inf,
                f"validation_after_{end_s:.0f}_s": mean(scores),
                "deviation": stdev(scores),
            }
        )
    return rows


def measured_s(report: Report) -> float:
    """Return the seconds of a run's steps."""
    return sum(step.measured_s or 0.0 for step in report.steps)
