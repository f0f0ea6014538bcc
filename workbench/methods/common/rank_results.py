"""A rank's steps and results, and their moments on rank 0's clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from workbench.core.timeline import MemorySample, Span
from workbench.runtime.commands import Transfer
from workbench.runtime.pacing import Pace
from workbench.runtime.snapshot import Position


class StepTrace(NamedTuple):
    """One step on one rank, in seconds of the device clock.

    loss: this rank's part of the mini-batch mean.  busy_s: seconds of computing.

    lowest_trained: see StepRecord.
    """

    epoch: int
    step: int
    samples: int
    start_s: float
    end_s: float
    loss: float
    spans: tuple[Span, ...] = ()
    memory: tuple[MemorySample, ...] = ()
    busy_s: float = 0.0
    lowest_trained: int | None = None
    transfers: tuple[Transfer, ...] = ()


@dataclass(kw_only=True)
class RankResult:
    """The result of an engine.

    seconds: seconds of its phases.  nbytes: memory readings and traffic by name.

    paces: the pace of each phase of the work, in order.  resumed_at: (epoch, step) at which a resumed run began.
    spent_s: seconds of this rank's other work, by kind.
    trained: the names of all tensors that training changes.  snapshots: the snapshots in memory, with the names of the
    tensors in each.
    """

    rank: int
    steps: list[StepTrace] = field(default_factory=list)
    phases_s: dict[str, tuple[float, float]] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    redistribution: list[Span] = field(default_factory=list)
    resumed_at: tuple[int, int] | None = None
    paces: list[Pace] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    spent_s: dict[str, float] = field(default_factory=dict)
    trained: tuple[str, ...] = ()
    snapshots: dict[Position, tuple[str, ...]] = field(default_factory=dict)


AResult = TypeVar("AResult", bound=RankResult)


def on_rank_zeros_clock(result: AResult, offset_s: float) -> AResult:
    """Return the result with every moment shifted by this rank's clock offset, so that ranks on several machines
    compare.
    """
    phases_s = {name: (begin + offset_s, end + offset_s) for name, (begin, end) in result.phases_s.items()}
    steps = [on_clock(step, offset_s) for step in result.steps]
    return replace(result, steps=steps, phases_s=phases_s, redistribution=moved(result.redistribution, offset_s))


def on_clock(step: StepTrace, offset_s: float) -> StepTrace:
    """Return a step with every moment shifted by a clock offset."""
    memory = tuple(sample._replace(time_s=sample.time_s + offset_s) for sample in step.memory)
    spans = tuple(moved(step.spans, offset_s))
    return step._replace(start_s=step.start_s + offset_s, end_s=step.end_s + offset_s, spans=spans, memory=memory)


def moved(spans: Iterable[Span], offset_s: float) -> list[Span]:
    """Return spans with every moment shifted by a clock offset."""
    return [span._replace(start_s=span.start_s + offset_s, end_s=span.end_s + offset_s) for span in spans]
