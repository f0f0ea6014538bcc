"""The plans one small change away from a plan: where a search for a better one goes on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, combinations

from workbench.core.plan import Share, Stage
from workbench.core.profile import Profile
from workbench.planners import memory
from workbench.planners.balance import StageTimes
from workbench.planners.closed_form import ClosedForm, Stages
from workbench.planners.orders import device_types
from workbench.planners.problem import Problem

Shape = tuple[tuple[int, tuple[int, ...]], ...]  # for each stage: its layers, and its group
ROUNDING = 1e-9
"""Relative difference between sums of the same seconds in another order; far more than there is."""


class Neighbours:
    """The neighbours of the plans of one problem.

    A step to a neighbour moves layers over a boundary, or one sample from one rank of a group to another, or one device
    to another stage, or makes a device idle or busy.  Or it swaps two devices or two stages, merges two stages, or cuts
    one.  Equal devices of a group (with equal samples, if samples move) are represented by the first; so are idle ones.
    times: the problem's.  closed_form: numbers their stages.
    """

    def __init__(self, problem: Problem[Profile], times: StageTimes, closed_form: ClosedForm) -> None:
        self._world_size, self._num_layers = problem.cluster.world_size, problem.profile.num_layers
        self._size, self._num_micro_batches = problem.micro_batch_size, problem.micro_batches
        self._times = times
        self._types = device_types(problem.profile, problem.cluster)
        self._closed_form = closed_form
        self._divided: dict[tuple[int, int, tuple[int, ...], int], int | None] = {}
        self._sample_moves: dict[int, list[int]] = {}

    def of(self, stages: Stages, limit_s: float = math.inf, slower: set[object] | None = None) -> dict[Stages, None]:
        """Return the stages one move away for which each device has memory, each once, in a fixed order.

        limit_s: moves of devices that in closed form can only take longer are left out before samples are divided;
        `slower` gets their shapes.
        """
        others = self._other_shapes(stages, limit_s, set() if slower is None else slower)
        return dict.fromkeys((*self._other_samples(stages), *others))

    def _other_samples(self, current: Stages) -> Iterator[Stages]:
        for index, number in enumerate(current):
            if number not in self._sample_moves:
                (stage,) = self._closed_form.stages((number,))
                moved = (replace(stage, shares=shares) for shares in _sample_moves(stage.shares, self._types))
                self._sample_moves[number] = list(map(self._closed_form.number, moved))
            for other in self._sample_moves[number]:
                yield (*current[:index], other, *current[index + 1 :])

    def _other_shapes(self, current: Stages, limit_s: float, slower: set[object]) -> Iterator[Stages]:
        """Yield the stages whose layers or devices have changed.  Eq. 4 divides the samples of those that have."""
        stages = self._closed_form.stages(current)
        shape: Shape = tuple((stage.num_layers, stage.ranks) for stage in stages)
        idle = sorted(set(range(self._world_size)).difference(*(stage.ranks for stage in stages)))
        lives = {count: self.lives(count) for count in range(len(shape) - 1, len(shape) + 2)}
        starts = [stage.start for stage in stages]
        old = {
            (stage.start, stage.stop, frozenset(stage.ranks), live): number
            for stage, live, number in zip(stages, lives[len(shape)], current, strict=True)
        }
        device_moves = _device_moves(shape, idle, self._types)
        if limit_s < math.inf:
            device_moves = self._within(device_moves, current, shape, limit_s, slower)
        for moved in (*_layer_moves(shape), *device_moves, *_stage_moves(shape)):
            if len(moved) > self._num_layers:
                continue
            is_same_length = len(moved) == len(shape)
            numbers: list[int] = []
            begins = accumulate((layers for layers, _ in moved), initial=0)
            for index, (part, live, start) in enumerate(zip(moved, lives[len(moved)], begins, strict=False)):
                if is_same_length and part is shape[index] and start == starts[index]:
                    numbers.append(current[index])
                    continue
                layers, group = part
                key = (start, start + layers, frozenset(group), live)
                if key not in old:
                    number = self._divide(start, start + layers, group, live)
                    if number is None:
                        break
                    old[key] = number
                numbers.append(old[key])
            else:
                yield tuple(numbers)

    def _within(
        self, moves: Iterator[Shape], current: Stages, shape: Shape, limit_s: float, slower: set[object]
    ) -> Iterator[Shape]:
        """Yield the moves of devices whose new groups may be fast enough for a limit (see `of`).

        Before a stage's first micro-batch, and after its last, each stage below computes one; in between its slowest
        device computes all of them.
        """
        stages, lives = self._closed_form.stages(current), self.lives(len(current))
        passes_s = [self._closed_form.passes_s(number) for number in current]
        below_s = list(accumulate(passes_s, initial=0.0))
        most: dict[tuple[int, float], list[int]] = {}

        def is_enough(index: int, group: tuple[int, ...], each_s: float) -> bool:
            """Return whether a group may compute all samples within these seconds."""
            if (index, each_s) not in most:
                stage = stages[index]
                most[index, each_s] = self._times.most_samples(stage.start, stage.stop, lives[index], each_s)
            return sum(map(most[index, each_s].__getitem__, group)) >= self._size

        for moved in moves:
            changed = [index for index, part in enumerate(moved) if part is not shape[index]]
            changed_s, is_slower = 0.0, False
            for index in changed:
                each_s = (limit_s - below_s[index] + changed_s) / self._num_micro_batches * (1 + ROUNDING)
                is_slower = is_slower or not is_enough(index, moved[index][1], each_s)
                changed_s += passes_s[index]
            if not is_slower:
                yield moved
            elif all(is_enough(index, moved[index][1], math.inf) for index in changed):
                slower.add(moved)

    def lives(self, num_stages: int) -> list[int]:
        """Return how many micro-batches are in flight on each stage."""
        return [memory.in_flight(index, num_stages, self._num_micro_batches) for index in range(num_stages)]

    def _divide(self, start: int, stop: int, group: tuple[int, ...], live: int) -> int | None:
        """Return the stage on a group, the samples divided by Eq. 4; None if it does not fit into the memory."""
        key = (start, stop, group, live)
        if key not in self._divided:
            samples = self._times.shares(start, stop, group, live)
            shares = tuple(Share(rank=rank, samples=share) for rank, share in zip(group, samples, strict=True) if share)
            fits = sum(samples) == self._size
            self._divided[key] = (
                self._closed_form.number(Stage(start=start, stop=stop, shares=shares)) if fits else None
            )
        return self._divided[key]


def _sample_moves(shares: tuple[Share, ...], types: Sequence[int]) -> Iterator[tuple[Share, ...]]:
    def one_of_each(some: Iterable[Share]) -> Iterable[Share]:
        firsts: dict[tuple[int, int], Share] = {}
        for share in some:
            firsts.setdefault((types[share.rank], share.samples), share)
        return firsts.values()

    for giver in one_of_each(share for share in shares if share.samples > 0):
        for taker in one_of_each(share for share in shares if share is not giver):
            change = {giver.rank: -1, taker.rank: 1}
            moved = (replace(share, samples=share.samples + change.get(share.rank, 0)) for share in shares)
            yield tuple(share for share in moved if share.samples > 0)


def _layer_moves(shape: Shape) -> Iterator[Shape]:
    for index in range(len(shape) - 1):
        for step in (1, -1, 2, -2):
            (left, first), (right, second) = shape[index : index + 2]
            if left + step > 0 and right - step > 0:
                yield (*shape[:index], (left + step, first), (right - step, second), *shape[index + 2 :])


def _device_moves(shape: Shape, idle: Sequence[int], types: Sequence[int]) -> Iterator[Shape]:
    def one_of_each(ranks: Sequence[int]) -> list[int]:
        firsts: dict[int, int] = {}
        for rank in ranks:
            firsts.setdefault(types[rank], rank)
        return list(firsts.values())

    idle = one_of_each(idle)
    for rank in idle:
        for target in range(len(shape)):
            yield _with_groups(shape, {target: (*shape[target][1], rank)})
    for source, (_, group) in enumerate(shape):
        for rank in one_of_each(group):
            rest = tuple(other for other in group if other != rank)
            if rest:
                yield _with_groups(shape, {source: rest})
            for spare in idle:
                if types[spare] != types[rank]:
                    yield _with_groups(shape, {source: (*rest, spare)})
            for target, (_, others) in enumerate(shape):
                if target == source:
                    continue
                if rest:
                    yield _with_groups(shape, {source: rest, target: (*others, rank)})
                for other in one_of_each(others) if target > source else ():
                    if types[other] != types[rank]:
                        swapped = tuple(rank if place == other else place for place in others)
                        yield _with_groups(shape, {source: (*rest, other), target: swapped})


def _stage_moves(shape: Shape) -> Iterator[Shape]:
    for first, other in combinations(range(len(shape)), 2):
        yield tuple(shape[{first: other, other: first}.get(index, index)] for index in range(len(shape)))
    for index, (layers, group) in enumerate(shape):
        if index + 1 < len(shape):
            following, others = shape[index + 1]
            yield (*shape[:index], (layers + following, (*group, *others)), *shape[index + 2 :])
        for cut in range(1, len(group)):
            if layers > 1:
                yield (
                    *shape[:index],
                    (layers // 2, group[:cut]),
                    (layers - layers // 2, group[cut:]),
                    *shape[index + 1 :],
                )


def _with_groups(shape: Shape, groups: dict[int, tuple[int, ...]]) -> Shape:
    return tuple((part[0], groups[index]) if index in groups else part for index, part in enumerate(shape))
