"""Fig. 13: time and memory of the techniques on 8 Nano-H, 1F1B disabled, simulated (mini-batch 16, 128 tokens; PAC+, section VI-D)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from workbench.core.timeline import Timeline
from workbench.planners import Problem, fixed_plan
from workbench.planners.memory import cached_needs, rank_need
from workbench.profiler.analytic import Technique
from workbench.reproduce.items import Item
from workbench.reproduce.pac_plus.counted import BASELINES
from workbench.reproduce.pac_plus.steps import cached_timeline, step_timeline
from workbench.reproduce.pac_plus.testbed import GIB, MODELS, PAPER, Constants, load_constants, nanos, profile
from workbench.reproduce.result import Number, Result, Settings, printed

OURS: Technique = "parallel_adapters"
CACHED = "parallel_adapters_cached"
DEVICES = 8
FLOOR_POINTS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds per sample, the backward passes' fraction of all devices' work per sample, and the fullest device's GB by part."""

    seconds: float
    backward_s: float
    weights_gb: float
    gradients_gb: float
    activations_gb: float

    @property
    def total_gb(self) -> float:
        """Return the sum of the parts."""
        return self.weights_gb + self.gradients_gb + self.activations_gb


def _cost(constants: Constants, seconds: float, timeline: Timeline, needs: Iterable[Any]) -> Cost:
    """Return the cost of a mini-batch that takes `seconds`; needs: of all devices."""
    fullest = max(needs, key=lambda need: need.total_bytes)
    backward = sum(span.end_s - span.start_s for span in timeline.spans if span.op.kind in ("B", "SB"))
    return Cost(
        seconds=seconds / constants.mini_batch,
        backward_s=backward / constants.mini_batch,
        weights_gb=fullest.weights_bytes / GIB,
        gradients_gb=fullest.gradient_bytes / GIB,
        activations_gb=(fullest.total_bytes - fullest.weights_bytes - fullest.gradient_bytes) / GIB,
    )


@lru_cache(maxsize=64)
def costs(constants: Constants) -> Mapping[tuple[str, str], Cost]:
    """Return the cost of every technique, by (model, technique): in one pipeline of 8 equal stages, all micro-batches in flight.

    It is the one plan that fits for every technique on 8 devices, including full fine-tuning; 'the same hybrid parallel architecture'.
    From the cache: only the side network's work, data parallel on all devices.
    """
    found: dict[tuple[str, str], Cost] = {}
    cluster, length = nanos(constants, DEVICES), constants.sequence_length
    for model in MODELS:
        for technique in (*BASELINES, OURS):
            costs_of = profile(constants, model, technique, cluster)
            sizes = {"batch_size": constants.mini_batch, "micro_batches": constants.micro_batches, "sequence_length": length}
            layers, groups = [costs_of.num_layers // DEVICES] * DEVICES, [[rank] for rank in range(DEVICES)]
            plan = fixed_plan(Problem(costs_of, cluster, **sizes), layers=layers, groups=groups, check_memory=False)
            timeline = step_timeline(costs_of, cluster, plan, technique, length, gpipe=True)
            given: dict[str, Any] = {"samples": plan.micro_batch_size, "sequence_length": length, "in_flight": plan.num_micro_batches}
            needs = [rank_need(costs_of, stage.ranks[0], stage.start, stage.stop, **given) for stage in plan.stages]
            found[model, technique] = _cost(constants, timeline.makespan_s, timeline, needs)
        timeline, cached = cached_timeline(constants, costs_of, cluster)
        slowest = max(
            sum(span.end_s - span.start_s for span in timeline.spans if span.rank == rank and span.op.kind in ("SF", "SB"))
            for rank in cached.ranks
        )
        found[model, CACHED] = _cost(constants, slowest, timeline, cached_needs(costs_of, cached, sequence_length=length).values())
    return found


def percentages(found: Mapping[tuple[str, str], Cost]) -> dict[tuple[str, ...], float]:
    """Return our value of every percentage in section VI-D."""

    def saved(techniques: Iterable[str], against: Iterable[str], quantity: str) -> list[float]:
        return [
            100 * (1 - getattr(found[model, technique], quantity) / getattr(found[model, other], quantity))
            for technique in techniques
            for model in MODELS
            for other in against
        ]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    full, inside = ("full",), BASELINES[1:]
    time, memory, cached = saved([OURS], BASELINES, "seconds"), saved([OURS], BASELINES, "total_gb"), saved([CACHED], BASELINES, "total_gb")
    return {
        ("time saved by parallel_adapters", "least"): min(time),
        ("time saved by parallel_adapters", "most"): max(time),
        ("backward time saved by adapters and lora against full", "about"): mean(saved(inside, full, "backward_s")),
        ("backward time saved by parallel_adapters against full", "about"): mean(saved([OURS], full, "backward_s")),
        ("time saved by parallel_adapters_cached", "most"): max(saved([CACHED], BASELINES, "seconds")),
        ("memory saved by parallel_adapters", "least"): min(memory),
        ("memory saved by parallel_adapters", "most"): max(memory),
        ("activations saved by adapters and lora against full", "most"): max(saved(inside, full, "activations_gb")),
        ("activations saved by parallel_adapters against full", "most"): max(saved([OURS], full, "activations_gb")),
        ("memory saved by parallel_adapters_cached", "least"): min(cached),
        ("memory saved by parallel_adapters_cached", "most"): max(cached),
    }


def fig13(item: Item, settings: Settings) -> Result:
    """Simulate the techniques."""
    constants, paper = load_constants(), printed(PAPER, "fig13")
    found = costs(constants)
    ours = percentages(found)
    comparisons = item.compare(lambda *labels: ours[labels])
    off = {one.labels: one.deviation for one in comparisons if abs(one.deviation or 0.0) > FLOOR_POINTS}

    def score(changed: Constants) -> tuple[Number, ...]:
        values = percentages(costs(changed))
        differences = [abs(values[labels] - value) for labels, value in paper.items()]
        return sum(difference <= FLOOR_POINTS for difference in differences), max(differences)

    plain = replace(constants, backward_factor=1.0, side_factor=1.0, operation_overhead_s=0.0, step_overhead_s=0.0)
    from_cache = []
    for model in MODELS:
        cluster = nanos(constants, DEVICES)
        timeline, _ = cached_timeline(constants, profile(constants, model, OURS, cluster), cluster)
        alone, whole, full = found[model, CACHED].seconds, timeline.makespan_s / constants.mini_batch, found[model, "full"].seconds
        from_cache.append((model, alone, whole, 100 * (1 - alone / full), 100 * (1 - whole / full)))
    return item.result(
        comparisons,
        tables={
            "costs": [
                (*labels, cost.seconds, cost.backward_s, cost.weights_gb, cost.gradients_gb, cost.activations_gb, cost.total_gb)
                for labels, cost in found.items()
            ],
            "from_cache": from_cache,
            "sensitivity": item.sensitivity(constants, score, score(plain)),
            "sums": _sums(paper),
        },
        holds={"points": not off},
        off="; ".join(f"{' '.join(labels)}: {difference:+.1f}" for labels, difference in off.items())
        or f"the largest difference is {score(constants)[1]:.1f}",
    )


def _sums(paper: Mapping[tuple[str, ...], float]) -> list[tuple[str, float]]:
    """Compare the paper's percentages with each other: forward f and backward b of full fine-tuning, side network x."""
    left = 1 - paper["time saved by parallel_adapters", "most"] / 100
    cached = 1 - paper["time saved by parallel_adapters_cached", "most"] / 100
    forward = left - cached
    own = (1 - paper["backward time saved by parallel_adapters against full", "about"] / 100) * (1 - forward)
    return [
        ("Parallel Adapters: forward + side network (1 - 56.24 %)", left),
        ("side network alone, from the cache (1 - 96.39 %)", cached),
        ("so the backbone's forward", forward),
        ("and full fine-tuning's backward", 1 - forward),
        ("Parallel Adapters' backward (92 % less)", own),
        ("which is of the side network's whole", own / cached),
    ]
