"""How far methods are from optimal: the bound against every order there is, and against every method."""

from __future__ import annotations

import random
from itertools import combinations, pairwise, product

import pytest
from torch_orders import of_torch, torch_csv

from tests.clusters import cluster_of
from tests.profiles import grid
from workbench.core.errors import ConfigError
from workbench.core.profile import Bytes, LayerProfile, Profile
from workbench.core.schedule import SEND
from workbench.simulator import makespan_s
from workbench_studies.papers import COMPARE, find_item
from workbench_studies.papers.compare.distance import (
    METHODS,
    SAMPLES,
    SYNCHRONOUS,
    TOKENS,
    distance,
    method_seconds,
    random_problem,
    zb_h1_cells,
)
from workbench_studies.papers.compare.distance_executed import cases, compared
from workbench_studies.papers.compare.lower_bound import Placement, makespan_bound, placements
from workbench_studies.papers.result import shipped_result


def drawn_placement(stages: int, seed: int) -> Placement:
    """Return a placement with seconds of whole tenths, drawn with a seed."""
    draw = random.Random(seed)

    def some(count: int) -> tuple[float, ...]:
        return tuple(draw.randint(1, 12) / 10 for _ in range(count))

    parts = {name: some(stages) for name in ("f", "i", "w", "step")} | {
        name: some(stages - 1) for name in ("up", "down")
    }
    return Placement(ranks=tuple(range(stages)), cuts=tuple(range(stages + 1)), **parts)


def shortest(one: Placement, count: int) -> float:
    """Return the least seconds over every order on every device and sender: a longest path for each.

    Executions of an operation are in order.  This knows nothing of the solver's model.
    """
    stages = len(one.ranks)
    jobs = {(name, k, n): getattr(one, name)[k] for k in range(stages) for n in range(count) for name in "fiw"}
    jobs |= {
        (name, k, n): getattr(one, name)[k] for k in range(stages - 1) for n in range(count) for name in ("up", "down")
    }
    before = {job: set() for job in jobs}
    for name, k, n in jobs:
        before[name, k, n] |= {(name, k, n - 1)} if n else set()
        needs = {
            "f": [("up", k - 1, n)] if k else [],
            "up": [("f", k, n)],
            "i": [("f", k, n), *([("down", k, n)] if k < stages - 1 else [])],
            "down": [("i", k + 1, n)],
            "w": [("i", k, n)],
        }
        before[name, k, n] |= set(needs[name])
    resources = [[("f", k), ("i", k), ("w", k)] for k in range(stages)]
    resources += [[("up", k), ("down", k - 1)] for k in range(1, stages - 1)]
    choices = [list(merges(kinds, count)) for kinds in resources]
    best = float("inf")
    for orders in product(*choices):
        waits = {job: set(needs) for job, needs in before.items()}
        for order in orders:
            for first, second in pairwise(order):
                waits[second].add(first)
        best = min(best, longest(jobs, waits, one.step))
    return best


def merges(kinds: list[tuple[str, int]], count: int):
    """Yield every interleaving of the kinds' executions, of which a device's I follows its F and W its I."""
    places = range(len(kinds) * count)

    def of(kind: int, free: tuple[int, ...]):
        if kind == len(kinds):
            yield {}
            return
        for chosen in combinations(free, count):
            for rest in of(kind + 1, tuple(place for place in free if place not in chosen)):
                yield {place: (*kinds[kind], n) for n, place in enumerate(chosen)} | rest

    for order in of(0, tuple(places)):
        listed = [order[place] for place in places]
        at = {job: place for place, job in order.items()}
        if kinds[0][0] != "f" or all(
            at["f", kinds[0][1], n] < at["i", kinds[0][1], n] < at["w", kinds[0][1], n] for n in range(count)
        ):
            yield listed


def longest(jobs, waits, step) -> float:
    """Return the makespan, infinite if the orders deadlock."""
    ends: dict[tuple[str, int, int], float] = {}
    left = dict(waits)
    while left:
        ready = [job for job, needs in left.items() if all(need in ends for need in needs)]
        if not ready:
            return float("inf")
        for job in ready:
            ends[job] = max((ends[need] for need in left.pop(job)), default=0.0) + jobs[job]
    return max(end + (step[job[1]] if job[0] == "w" else 0.0) for job, end in ends.items())


@pytest.mark.parametrize(("stages", "count", "seed"), [(1, 3, 0), (2, 2, 1), (2, 2, 2), (2, 3, 3), (3, 2, 4)])
def test_the_solver_finds_the_shortest_of_all_orders(stages, count, seed):
    pytest.importorskip("ortools", reason="the studies' extra 'optimal'")
    one = drawn_placement(stages, seed)
    least = shortest(one, count)
    bound = makespan_bound([one], count, known_s=2 * least, limit_s=20)
    assert bound.is_proven
    assert one.simple_bound(count) <= least + 1e-9
    assert bound.seconds <= least + 1e-9 <= bound.best_s + 2e-9
    assert bound.best_s == pytest.approx(bound.seconds, rel=0.01)


def test_the_best_of_several_placements_counts():
    pytest.importorskip("ortools", reason="the studies' extra 'optimal'")
    several = [drawn_placement(stages, seed) for stages, seed in ((2, 5), (2, 6), (1, 7))]
    least = min(shortest(one, 2) for one in several)
    bound = makespan_bound(several, 2, known_s=1.5 * least, limit_s=20)
    assert bound.seconds <= least + 1e-9 and bound.best_s == pytest.approx(least, rel=0.01)


def test_placements_are_all_cuts_and_orders():
    sizes = dict.fromkeys(("frozen_bytes", "trainable_bytes"), 0)
    layer = LayerProfile(name="layer", times=dict.fromkeys("FB", grid(1.0, 2.0)), output_bytes=Bytes(5), **sizes)
    profile = Profile(model="four", method="full", source="analytic", layers=((layer,) * 4,) * 3)
    results = list(placements(profile, cluster_of(3, memory_bytes=1, bytes_per_s=10.0), samples=2, tokens=1))
    # One device: 3.  Two: 6 orders and 3 cuts.  Three: 6 orders and 3 cuts.
    assert len(results) == len({(one.ranks, one.cuts) for one in results}) == 3 + 18 + 18
    [one] = [one for one in results if (one.ranks, one.cuts) == ((2, 0), (0, 1, 4))]
    assert (one.f, one.i, one.w, one.up, one.down) == ((2.0, 6.0), (1.0, 3.0), (1.0, 3.0), (1.0,), (0.0,))
    assert one.pace(10) == 120.0


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 8), (4, 5)])
def test_the_zero_bubble_order_is_that_of_torch(stages, micro_batches):
    rows = torch_csv(of_torch.ScheduleInterleavedZeroBubble, stages, 1, micro_batches).splitlines()
    for stage, row in enumerate(rows):
        assert list(zb_h1_cells(stages, stage, micro_batches)) == [cell for cell in row.split(",") if cell]


def test_no_method_beats_the_bound_of_its_class():
    pytest.importorskip("ortools", reason="the studies' extra 'optimal'")
    for seed in (1000, 1001):
        one = distance(seed, 0.2)
        assert set(one.seconds) == set(METHODS)
        for name in METHODS:
            assert one.seconds[name] >= one.least_s(name) * (1 - 1e-9), (seed, name)
        assert one.bound.seconds <= one.bound.best_s <= min(one.seconds[name] for name in SYNCHRONOUS)


def test_without_ortools_the_refusal_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ortools.sat.python", None)
    with pytest.raises(ConfigError, match="pip install ortools"):
        makespan_bound([drawn_placement(2, 1)], 2, known_s=100.0, limit_s=1)


def test_the_shipped_clusters_are_those_of_the_code_and_the_picture_has_a_box_for_each_method_and_bound():
    item, result = find_item(COMPARE, "distance"), shipped_result(COMPARE, "distance")
    rows = result.tables[1].rows
    assert len(rows) >= 20 and [row[0] for row in rows] == list(range(len(rows)))
    first = result.tables[1].records[0]
    one = _seconds_of(0)
    assert {name: first[f"{name}, s"] for name in METHODS} == pytest.approx(one)
    [drawn] = item.draw(result)
    boxes = [trace for trace in drawn.figure.data if trace.type == "box"]
    assert [box.name for box in boxes] == [*METHODS, *METHODS]
    assert all(min(box.x) >= 1 - 1e-9 for box in boxes[: len(METHODS)])


def test_executed_programs_are_the_simulated_ones_with_values_of_the_same_sizes():
    item, result = find_item(COMPARE, "distance-executed"), shipped_result(COMPARE, "distance-executed")
    rows = result.tables[0].records
    of_first = {row["method"]: row["s, simulated"] for row in rows if row["cluster"] == 0}
    programs = {name: case.program for name, case in cases(0).items()}
    assert of_first == pytest.approx({name: makespan_s(program) for name, program in programs.items()})
    assert of_first == pytest.approx({name: _seconds_of(0)[name] for name in programs})
    sent = {
        op.reads[0]: program
        for program in programs.values()
        for ops in program.schedule.ops
        for op in ops
        if op.kind == SEND
    }
    hidden = SAMPLES * TOKENS * 768
    assert sent and {program.costs.spec(value).shape for value, program in sent.items()} == {(hidden,)}
    point = {"program": "1F1B", "measured_ms": 9000.0, "simulated_ms": 6000.0, "ratio": 1.5, "late": 0.2}
    [row] = compared(item, {0: [point]}, 1.0).tables[0].records
    bound = shipped_result(COMPARE, "distance").tables[1].records[0]["bound, s"]
    assert (row["over the bound, executed"], row["in pace"]) == (pytest.approx(9 / bound), "no")
    [drawn] = find_item(COMPARE, "distance").draw(shipped_result(COMPARE, "distance"))
    markers = [trace for trace in drawn.figure.data if trace.name == "emulated"]
    assert [list(one.x) for one in markers] == [[row["over the bound, executed"] for row in rows]] * 2


def _seconds_of(seed: int) -> dict[str, float]:
    problem = random_problem(seed)
    results = list(placements(problem.profile, problem.cluster, samples=SAMPLES, tokens=TOKENS))
    return method_seconds(problem, results)
