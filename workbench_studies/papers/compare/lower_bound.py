"""Bound the seconds of a mini-batch from below for all synchronous pipelines of a problem at once, with CP-SAT.

The class of schedules.  Contiguous layers form stages; each stage has one device and each device at most one stage;
cuts, order and number of devices are free.  Every stage runs, for each micro-batch, F, then I (the gradient of its
input) and W (the gradient of its weights, after I), in any order among micro-batches, one operation at a time, and the
optimizer's step at the end.  An activation goes up and a gradient goes down between neighbours.  A device sends one
transfer at a time, each for the seconds of its link.  It may receive two at once without loss: in the simulator they
share its wire, so each takes longer, and the bound holds there too.  Memory is not limited.  A backward pass in one
piece is I and W without a pause, so its schedules belong to the class too.

Micro-batches are equal, so we number the executions of each operation and not the micro-batches: the n-th F of a stage
starts after the n-th activation has arrived.  Any schedule can be renumbered that way.

Seconds become whole ticks, rounded down, so the solver's bound holds for the seconds themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise, permutations
from typing import Any, NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.profile import Profile

TICKS = 10_000
"""Ticks of the known schedule: rounding costs less than a tick for each operation on a path."""
FIRST = 10
"""Placements on which the solver first looks for a schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Stages from the first to the last, in seconds of one micro-batch.

    ranks: the devices' ranks.  cuts: the device of stage k has layers [cuts[k], cuts[k + 1]).  f, i, w: seconds of the
    stage's operations; step: seconds of its optimizer.  up[k], down[k]: seconds of the transfer from stage k to k + 1
    and back.
    """

    ranks: tuple[int, ...]
    cuts: tuple[int, ...]
    f: tuple[float, ...]
    i: tuple[float, ...]
    w: tuple[float, ...]
    step: tuple[float, ...]
    up: tuple[float, ...]
    down: tuple[float, ...]

    def simple_bound(self, micro_batches: int) -> float:
        """Return a closed lower bound of its seconds: of each device and each sender, the way to its first operation,
        all it has to do, and the way back from its last.
        """
        last_s = self.w[0] + self.step[0]  # stage 0 ends with a W, after the last I
        bounds = [0.0]
        head_s = back_s = 0.0  # the way up to stage k, and from its gradient's transfer down to the I of stage 0
        for k in range(len(self.ranks)):
            one_way = self.f[k] + self.i[k]
            bounds.append(head_s + micro_batches * (one_way + self.w[k]) + self.step[k])
            bounds.append(head_s + micro_batches * one_way + back_s + last_s)
            send_s = (self.up[k] if k < len(self.up) else 0.0) + (self.down[k - 1] if k else 0.0)
            if k:
                to_first = head_s + self.f[k] + (self.i[k] if k == len(self.ranks) - 1 else 0.0)
                bounds.append(to_first + micro_batches * send_s + back_s - self.down[k - 1] + last_s)
            back_s += (self.down[k] if k < len(self.down) else 0.0) + self.i[k]
            head_s += self.f[k] + (self.up[k] if k < len(self.up) else 0.0)
        return max(bounds)

    def pace(self, micro_batches: int) -> float:
        """Return the seconds of its busiest device, sender or receiver for a mini-batch: what a pipeline that never
        drains takes at least.  A receiver's wire carries all its messages, whether one by one or at once.
        """
        devices = (a + b + c for a, b, c in zip(self.f, self.i, self.w, strict=True))
        loads = [micro_batches * busy_s + step for busy_s, step in zip(devices, self.step, strict=True)]
        up, down = (0.0, *self.up, 0.0), (0.0, *self.down, 0.0)
        for k in range(len(self.ranks)):
            loads += [micro_batches * (up[k + 1] + down[k]), micro_batches * (up[k] + down[k + 1])]
        return max(loads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """seconds: no schedule of the class is shorter.  best_s: the shortest schedule known; the optimum lies between.

    is_proven: whether the solver finished over all placements: the bound is then the optimum but for rounding.  best_s
    may still be longer, because a schedule is looked for on FIRST placements alone.
    """

    seconds: float
    best_s: float
    is_proven: bool


def placements(profile: Profile, cluster: Cluster, *, samples: int, tokens: int) -> Iterator[Placement]:
    """Yield every placement of the class.  samples: number of samples in a micro-batch.

    A profile has no I and W.  Each takes half of B: for trained matrices the two products are equally large.
    """
    layers, world = profile.num_layers, cluster.world_size

    def sums(rank: int, kind: str, size: int) -> list[float]:
        return [0.0, *accumulate(layer.seconds(kind, size, tokens) for layer in profile.layers[rank])]

    forward, backward = ([sums(rank, kind, samples) for rank in range(world)] for kind in "FB")
    steps = [sums(rank, "STEP", 1) for rank in range(world)]
    ups, downs = ([getattr(layer, f"{name}_bytes")(samples, tokens) for layer in profile.layers[0]]
                  for name in ("output", "gradient"))  # fmt: skip
    for count in range(1, min(world, layers) + 1):
        for ranks in permutations(range(world), count):
            pairs = list(pairwise(ranks))
            for inner in combinations(range(1, layers), count - 1):
                cuts = list(zip((0, *inner), (*inner, layers), strict=True))

                def of(
                    table: list[list[float]],
                    factor: float = 1.0,
                    ranks: Sequence[int] = ranks,
                    cuts: Sequence[tuple[int, int]] = cuts,
                ) -> tuple[float, ...]:
                    spans = zip(ranks, cuts, strict=True)
                    return tuple(factor * (table[rank][stop] - table[rank][start]) for rank, (start, stop) in spans)

                crossings = list(zip(pairs, inner, strict=True))
                yield Placement(
                    ranks=ranks,
                    cuts=(0, *inner, layers),
                    f=of(forward),
                    i=of(backward, 0.5),
                    w=of(backward, 0.5),
                    step=of(steps),
                    up=tuple(cluster.link(a, b).transfer_s(ups[cut - 1]) for (a, b), cut in crossings),
                    down=tuple(cluster.link(b, a).transfer_s(downs[cut - 1]) for (a, b), cut in crossings),
                )


def makespan_bound(candidates: Sequence[Placement], micro_batches: int, *, known_s: float, limit_s: float) -> Bound:
    """Return the bound over all placements.

    known_s: the seconds of a schedule of the class, such as the best of all methods.  limit_s: the solver's
    deterministic seconds, about those of a core and equal on all machines.
    First the solver looks for a shorter schedule on the FIRST placements with the lowest simple bounds, with durations
    rounded up.  A placement whose simple bound reaches the best schedule cannot be better.  Over all others the solver
    bounds the seconds, with durations rounded down.
    Raises ConfigError if OR-Tools is not installed.
    """
    simple = sorted(
        ((placement.simple_bound(micro_batches), placement) for placement in candidates), key=lambda pair: pair[0]
    )
    tick_s = known_s / TICKS
    first = [pair for pair in simple[:FIRST] if pair[0] < known_s]
    best_s = min(known_s, _solve(first, micro_batches, tick_s, known_s, limit_s / 2, math.ceil).best_s)
    left = [pair for pair in simple if pair[0] < best_s]
    solved = _solve(left, micro_batches, tick_s, best_s, limit_s / 2, math.floor)
    return Bound(seconds=min(best_s, max(simple[0][0], solved.bound_s)), best_s=best_s, is_proven=solved.is_complete)


class _Solved(NamedTuple):
    best_s: float
    bound_s: float
    is_complete: bool


def _solve(
    candidates: Sequence[tuple[float, Placement]],
    micro_batches: int,
    tick_s: float,
    known_s: float,
    limit_s: float,
    rounded: Callable[[float], int],
) -> _Solved:
    """Return the shortest schedule of some placements and a lower bound, both no longer than known_s.

    left: with their simple bounds.  rounded: rounds ticks.
    """
    if not candidates:
        return _Solved(known_s, known_s, True)
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ConfigError(
            "A lower bound by CP-SAT was asked for.",
            "OR-Tools is not installed.",
            "Install it: pip install ortools, or the studies with their extra 'optimal'.",
        ) from None
    model = cp_model.CpModel()
    stages, horizon = max(len(placement.ranks) for _, placement in candidates), int(known_s / tick_s)

    def ticks(seconds: Sequence[float], count: int) -> list[int]:
        return [rounded(second / tick_s) for second in seconds] + [0] * (count - len(seconds))

    names = ("f", "i", "w", "step", "up", "down")
    sizes: dict[str, list[Any]] = {
        name: [model.new_int_var(0, horizon, f"{name}{k}") for k in range(stages - (name in ("up", "down")))]
        for name in names
    }
    is_used = [model.new_bool_var(f"used{k}") for k in range(stages)]
    end = model.new_int_var(0, horizon, "end")
    simple = model.new_int_var(0, horizon, "simple")
    columns = [simple, *is_used, *(size for name in names for size in sizes[name])]
    rows = [
        [
            int(bound / tick_s),
            *(int(k < len(placement.ranks)) for k in range(stages)),
            *(each for name in names for each in ticks(getattr(placement, name), len(sizes[name]))),
        ]
        for bound, placement in candidates
    ]
    model.add_allowed_assignments(columns, rows)
    model.add(end >= simple)

    def chain(name: str, k: int, present: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """Return starts, ends and intervals of an operation's executions, one after the other."""
        starts: list[Any] = []
        ends: list[Any] = []
        intervals: list[Any] = []
        for n in range(micro_batches):
            start, stop = (model.new_int_var(0, horizon, f"{name}{k}.{n}{side}") for side in ("s", "e"))
            intervals.append(model.new_optional_interval_var(start, sizes[name][k], stop, present, f"{name}{k}.{n}"))
            if n:
                model.add(start >= ends[-1])
            starts.append(start)
            ends.append(stop)
        return starts, ends, intervals

    f, i, w = ([chain(name, k, is_used[k]) for k in range(stages)] for name in "fiw")
    up, down = ([chain(name, k, is_used[k + 1]) for k in range(stages - 1)] for name in ("up", "down"))
    for k in range(stages):
        model.add_no_overlap([*f[k][2], *i[k][2], *w[k][2]])
        above, below = k < stages - 1, k > 0
        model.add_no_overlap([*(up[k][2] if above else ()), *(down[k - 1][2] if below else ())])
        for n in range(micro_batches):
            if below:
                model.add(up[k - 1][0][n] >= f[k - 1][1][n])
                model.add(f[k][0][n] >= up[k - 1][1][n]).only_enforce_if(is_used[k])
                model.add(down[k - 1][0][n] >= i[k][1][n]).only_enforce_if(is_used[k])
            if above:
                model.add(i[k][0][n] >= down[k][1][n]).only_enforce_if(is_used[k + 1])
            model.add(i[k][0][n] >= f[k][1][n])
            model.add(w[k][0][n] >= i[k][1][n])
        model.add(end >= w[k][1][-1] + sizes["step"][k]).only_enforce_if(is_used[k])
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = limit_s
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return _Solved(known_s, horizon * tick_s, True)
    best_s = known_s if status == cp_model.UNKNOWN else solver.objective_value * tick_s
    return _Solved(best_s, solver.best_objective_bound * tick_s, status == cp_model.OPTIMAL)
