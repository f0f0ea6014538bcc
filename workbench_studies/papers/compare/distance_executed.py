"""Some mini-batches of distance.py, executed on emulated devices with kernel links: seconds beside the simulated ones,
and over the same bounds.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from workbench.core.timeline import BUSY_OVERRUN_SHARE
from workbench.runtime.pacing import asked_dilation
from workbench_studies.bench.executor import measure
from workbench_studies.bench.executor_programs import Case, case_of
from workbench_studies.papers.compare.distance import SAMPLES, TOKENS, order_programs, random_cluster, random_problem
from workbench_studies.papers.compare.lower_bound import placements
from workbench_studies.papers.items import COMPARE, Item
from workbench_studies.papers.result import Result, Row, Settings, shipped_result

CLUSTERS, HOST_SHARE = 4, 0.25
"""Number of clusters, and the share of a core that each emulated device has: operations take their time and compute
nothing."""


def cases(seed: int) -> dict[str, Case]:
    """Return the mini-batch of each order on a random cluster."""
    problem, cluster = random_problem(seed), random_cluster(seed).emulated(HOST_SHARE)
    choices = list(placements(problem.profile, problem.cluster, samples=SAMPLES, tokens=TOKENS))
    return {name: case_of(program, cluster) for name, program in order_programs(problem, choices).items()}


def distance_executed(item: Item, settings: Settings) -> Result:
    """Execute the mini-batches once.  Finished clusters are stored."""
    dilation = asked_dilation() or 1.0
    points: dict[int, list[dict[str, Any]]] = {}
    for seed in range(1 if settings.quick else CLUSTERS):

        def run(seed: int = seed) -> list[dict[str, Any]]:
            cluster = random_cluster(seed).emulated(HOST_SHARE)
            measured, _ = measure(cluster, partial(cases, seed), dilation=dilation, rounds=1)
            return measured

        points[seed] = settings.remember(f"distance-executed/{seed}-{dilation:g}.json", list[dict[str, Any]], run)
        settings.progress(
            f"cluster {seed}: " + ", ".join(f"{each['program']} {each['ratio']:.3f}" for each in points[seed])
        )
    return compared(item, points, dilation)


def compared(item: Item, points: dict[int, list[dict[str, Any]]], dilation: float) -> Result:
    """Return the comparison.  points: as the executor's bench writes them, by the cluster's seed."""
    shipped = shipped_result(COMPARE, "distance")
    assert shipped is not None
    bounds = {int(record["cluster"]): float(record["bound, s"]) for record in shipped.tables[1].records}
    rows: list[Row] = [
        (
            float(seed),
            point["program"],
            point["measured_ms"] / 1e3,
            point["simulated_ms"] / 1e3,
            point["measured_ms"] / 1e3 / bounds[seed],
            point["simulated_ms"] / 1e3 / bounds[seed],
            point["late"],
            "yes" if point["late"] <= BUSY_OVERRUN_SHARE else "no",
        )
        for seed, of_cluster in points.items()
        for point in of_cluster
    ]
    same_order = sum(
        sorted(of_cluster, key=lambda point: point["measured_ms"])
        == sorted(of_cluster, key=lambda point: point["simulated_ms"])
        for of_cluster in points.values()
    )
    ratios = [point["ratio"] for of_cluster in points.values() for point in of_cluster]
    return item.result(
        tables={"executed": rows},
        least=min(ratios),
        most=max(ratios),
        in_pace=sum(row[-1] == "yes" for row in rows),
        points=len(rows),
        same_order=same_order,
        clusters=len(points),
        dilation=dilation,
    )
