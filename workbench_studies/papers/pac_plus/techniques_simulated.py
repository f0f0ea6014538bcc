"""Techniques compared: their time and memory on 8 Nano-H, 1F1B disabled, simulated (Fig. 13, mini-batch 16, 128 tokens;
PAC+, section VI-D).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product
from statistics import mean
from typing import Any, NamedTuple

from workbench.core.timeline import Timeline
from workbench.planners import TrainingProblem, fixed_plan
from workbench.planners.memory import cached_needs, rank_need
from workbench.profiler.analytic import Technique
from workbench.simulator.steps import simulated_step
from workbench_studies.papers.items import Item
from workbench_studies.papers.pac_plus import testbed
from workbench_studies.papers.pac_plus.testbed import (
    BASELINES,
    GIB,
    MODELS,
    Constants,
    load_constants,
    simulated_cached_step,
)
from workbench_studies.papers.result import Cells, Result, Row

OURS: Technique = "parallel_adapters"
CACHED = "parallel_adapters_cached"
DEVICES = 8
FLOOR_POINTS = 5.0


class Cost(NamedTuple):
    """Seconds per sample, the seconds of backward passes per sample summed over all devices, and the fullest device's
    GB by part and in all.
    """

    seconds: float
    backward_s: float
    weights_gb: float
    gradients_gb: float
    activations_gb: float
    total_gb: float

    @classmethod
    def of(cls, samples: int, seconds: float, timeline: Timeline, needs: Iterable[Any]) -> Cost:
        """Return the cost of a mini-batch that takes `seconds`.  needs: the memory needs of all devices."""
        most = max(needs, key=lambda need: need.total_bytes)
        backward_s = sum(span.end_s - span.start_s for span in timeline.spans if span.op.kind in ("B", "SB"))
        parts = (
            most.weights_bytes,
            most.gradient_bytes,
            most.total_bytes - most.weights_bytes - most.gradient_bytes,
            most.total_bytes,
        )
        return cls(seconds / samples, backward_s / samples, *(nbytes / GIB for nbytes in parts))


@lru_cache(maxsize=64)
def costs(constants: Constants) -> Mapping[tuple[str, str], Cost]:
    """Return the cost of every technique, by (model, technique): in one pipeline of 8 equal stages, all micro-batches
    in flight.

    It is the one plan that fits for every technique on 8 devices, including full fine-tuning; 'the same hybrid parallel
    architecture'.
    From the cache: only the side network's work, data parallel on all devices.
    """
    costs_of: dict[tuple[str, str], Cost] = {}
    length, samples = constants.sequence_length, constants.mini_batch
    for model in MODELS:
        for technique in (*BASELINES, OURS):
            problem = _problem(constants, model, technique)
            layers, groups = [problem.profile.num_layers // DEVICES] * DEVICES, [[rank] for rank in range(DEVICES)]
            plan = fixed_plan(problem, layers=layers, groups=groups, check_memory=False)
            timeline = simulated_step(problem, plan, gpipe=True)
            needs = [
                rank_need(
                    problem.profile,
                    stage.ranks[0],
                    stage.start,
                    stage.stop,
                    samples=plan.micro_batch_size,
                    sequence_length=length,
                    in_flight=plan.num_micro_batches,
                )
                for stage in plan.stages
            ]
            costs_of[model, technique] = Cost.of(samples, timeline.makespan_s, timeline, needs)
        timeline, cached = simulated_cached_step(problem)
        side_spans = [span for span in timeline.spans if span.op.kind in ("SF", "SB")]
        slowest_s = max(
            sum(span.end_s - span.start_s for span in side_spans if span.rank == rank) for rank in cached.ranks
        )
        need_bytes = cached_needs(problem.profile, cached, sequence_length=length).values()
        costs_of[model, CACHED] = Cost.of(samples, slowest_s, timeline, need_bytes)
    return costs_of


def _problem(constants: Constants, model: str, technique: Technique) -> TrainingProblem:
    cluster = testbed.nanos(constants, DEVICES)
    return testbed.problem(constants, model, technique, cluster, micro_batches=constants.micro_batches)


def percentages(costs_of: Mapping[tuple[str, str], Cost]) -> Cells:
    """Return our value of every percentage in section VI-D."""

    def saved(techniques: Iterable[str], against: Iterable[str], quantity: str) -> list[float]:
        return [
            100 * (1 - getattr(costs_of[model, technique], quantity) / getattr(costs_of[model, other], quantity))
            for technique, model, other in product(techniques, MODELS, against)
        ]

    full, inside = ("full",), BASELINES[1:]
    time, memory, cached = (
        saved([OURS], BASELINES, "seconds"),
        saved([OURS], BASELINES, "total_gb"),
        saved([CACHED], BASELINES, "total_gb"),
    )
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


def fig13(item: Item) -> Result:
    """Simulate the techniques."""
    constants, paper = load_constants(), item.printed
    costs_of = costs(constants)
    ours = percentages(costs_of)
    comparisons = item.compare(lambda *labels: ours[labels])
    off = {
        comparison.labels: comparison.deviation
        for comparison in comparisons
        if abs(comparison.deviation or 0.0) > FLOOR_POINTS
    }

    def score(changed: Constants) -> Row:
        values = percentages(costs(changed))
        differences = [abs(values[labels] - value) for labels, value in paper.items()]
        return sum(difference <= FLOOR_POINTS for difference in differences), max(differences)

    plain = replace(constants, backward_factor=1.0, side_factor=1.0, operation_overhead_s=0.0, step_overhead_s=0.0)
    from_cache = []
    for model in MODELS:
        timeline, _ = simulated_cached_step(_problem(constants, model, OURS))
        alone, all_ranks, full = (
            costs_of[model, CACHED].seconds,
            timeline.makespan_s / constants.mini_batch,
            costs_of[model, "full"].seconds,
        )
        from_cache.append((model, alone, all_ranks, 100 * (1 - alone / full), 100 * (1 - all_ranks / full)))
    return item.result(
        comparisons,
        tables={
            "costs": [(*labels, *cost) for labels, cost in costs_of.items()],
            "from_cache": from_cache,
            "sensitivity": item.sensitivity(constants, score, score(plain)),
            "sums": _sums(paper),
        },
        off="; ".join(f"{' '.join(labels)}: {difference:+.1f}" for labels, difference in off.items())
        or f"none, the largest difference is {score(constants)[1]:.1f}",
    )


def _sums(paper: Cells) -> list[tuple[str, float]]:
    """Compare the paper's percentages with each other: forward f and backward b of full fine-tuning, side network x."""
    share = 1 - paper["time saved by parallel_adapters", "most"] / 100
    cached = 1 - paper["time saved by parallel_adapters_cached", "most"] / 100
    forward = share - cached
    of_full = (1 - paper["backward time saved by parallel_adapters against full", "about"] / 100) * (1 - forward)
    return [
        ("Parallel Adapters: forward + side network (1 - 56.24 %)", share),
        ("side network alone, from the cache (1 - 96.39 %)", cached),
        ("so the backbone's forward", forward),
        ("and full fine-tuning's backward", 1 - forward),
        ("Parallel Adapters' backward (92 % less)", of_full),
        ("which is of the side network's whole", of_full / cached),
    ]
