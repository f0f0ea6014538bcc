"""Plans by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from workbench.core.inference import InferencePlan
from workbench.core.plan import Plan, Share, Stage


def stage(start: int, stop: int, samples: Mapping[int, int], unit: str = "samples") -> Stage:
    """Return a stage.  samples: of a micro-batch, by rank; or a step's queries, if that is the unit."""
    return Stage(start=start, stop=stop, shares=tuple(Share(rank=rank, **{unit: n}) for rank, n in samples.items()))


def stages(*parts: tuple[int, Mapping[int, int]], unit: str = "samples") -> tuple[Stage, ...]:
    """Return one stage after another: of each its number of layers, and its samples by rank."""
    stops = accumulate(layers for layers, _ in parts)
    return tuple(
        stage(stop - layers, stop, samples, unit) for stop, (layers, samples) in zip(stops, parts, strict=True)
    )


def plan_of(stages: Sequence[Stage], *, method: str = "test", micro_batches: int = 1, **settings: Any) -> Plan:
    """Return the plan of these stages; a micro-batch has the samples of the first one."""
    size = {"micro_batch_size": sum(share.samples for share in stages[0].shares)}
    return Plan(method=method, stages=tuple(stages), num_micro_batches=micro_batches, **size | settings)


def staged_plan(*parts: tuple[int, Mapping[int, int]], **settings: Any) -> Plan:
    """Return the plan of one stage after another (see `stages` and `plan_of`)."""
    return plan_of(stages(*parts), **settings)


def query_plan(*parts: tuple[int, Mapping[int, int]], batch_size: int = 2) -> Plan:
    """Return P-RGE's plan of one stage after another: of each its number of layers, and its queries by rank."""
    return plan_of(stages(*parts, unit="queries"), method="p_rge", micro_batch_size=batch_size)


def inference_plan(paradigm: str = "hybrid", **parts: Any) -> InferencePlan:
    """Return where a sequence is computed, on devices 0, 1 and so on if the parts do not name others."""
    count = max(len(parts.get(name, ())) for name in ("units", "columns", "shares", "layers"))
    return InferencePlan(**{"method": "test", "paradigm": paradigm, "ranks": tuple(range(count))} | parts)
