"""The terms of Confidant's Eq. 3: seconds of layers on devices, whether they fit, and seconds between devices, also on
shared air.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from workbench.core.costs import on_air_s
from workbench.core.plan import Activations
from workbench.core.profile import Profile
from workbench.core.virtual_workers import VersionRule, delay_of
from workbench.planners.memory import FootprintTable, Need, rank_need
from workbench.planners.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """pace_s: seconds per mini-batch in steady state.  order: ranks.  cuts: device order[i] has layers [cuts[i], cuts[i
    + 1]).
    """

    pace_s: float
    order: tuple[int, ...]
    cuts: tuple[int, ...]


class Equation3:
    """The terms of Eq. 3 for a problem: seconds of layers on devices, whether they fit, and seconds between devices.

    versions: which weight versions are kept, see delay_of.
    between_s[a, b]: 2 T_c by x, the seconds of an activation after layer x - 1 from device a to b and of its gradient
    back, (layers + 1,).
    on_air_s[a, b]: the seconds for which these messages occupy shared air; zeros on a switch.
    """

    def __init__(self, problem: Problem[Profile], *, versions: VersionRule = "stashing") -> None:
        self.versions: VersionRule = versions
        self.profile, self.cluster, self.batch_size = profile, cluster, batch_size = (
            problem.profile,
            problem.cluster,
            problem.batch_size,
        )
        sequence_length, self.memory_length = problem.sequence_length, problem.longest
        count, ranks = profile.num_layers, range(cluster.world_size)
        starts, stops = self._ranges = np.triu_indices(count + 1, 1)
        self._seconds, self._footprints = list[np.ndarray](), list[FootprintTable]()
        for rank in ranks:
            passes = np.add(
                profile.forward_s(rank, batch_size, sequence_length),
                profile.backward_s(rank, batch_size, sequence_length),
            )
            layer_s = passes + profile.layer_seconds(rank, "STEP", 1, 1)
            total = np.concatenate([[0.0], np.cumsum(layer_s)])
            seconds = np.full((count + 1, count + 1), np.inf)
            seconds[self._ranges] = total[stops] - total[starts]
            self._seconds.append(seconds)
            no_copies = (0,) * cluster.world_size  # their number is the most mini-batches in flight
            table = FootprintTable(profile, rank, starts, stops, sequence_length=self.memory_length, copies=no_copies)
            self._footprints.append(table)
        self._stages: dict[tuple[int, int, int], np.ndarray] = {}
        sizes = [layer.output_bytes(batch_size, sequence_length) for layer in profile.layers[0]]
        pairs = [(a, b) for a in ranks for b in ranks if a != b]
        one_way = {(a, b): np.array([0.0, *map(cluster.link(a, b).transfer_s, sizes)]) for a, b in pairs}
        self.between_s = {(a, b): seconds + one_way[b, a] for (a, b), seconds in one_way.items()}
        self.on_air_s = {
            (a, b): np.array([0.0, *(on_air_s(cluster, [(a, b, size), (b, a, size)]) for size in sizes)])
            for a, b in pairs
        }

    @property
    def most_stages(self) -> int:
        """Return the most devices that can have a stage, of at least one layer."""
        return min(self.cluster.world_size, self.profile.num_layers)

    def need(
        self, rank: int, behind: int, start: int, stop: int, *, num_stages: int, activations: Activations = "memory"
    ) -> Need:
        """Return the memory need of layers [start, stop) on a device with `behind` devices after it, by the measured
        model.
        """
        return rank_need(
            self.profile,
            rank,
            start,
            stop,
            samples=self.batch_size,
            sequence_length=self.memory_length,
            in_flight=behind + 1,
            copies=delay_of(self.versions, behind, num_stages),
            activations=activations,
        )

    def seconds(self, rank: int) -> np.ndarray:
        """Return T_e of layers [x, y) on a device, whatever its memory, (layers + 1, layers + 1)."""
        return self._seconds[rank]

    def stage(self, rank: int, behind: int, num_stages: int) -> np.ndarray:
        """Return T_e of layers [x, y) on a device with `behind` devices after it; infinite where its memory does not
        suffice.
        """
        copies = delay_of(self.versions, behind, num_stages)
        if (rank, behind, copies) not in self._stages:
            needed_bytes = self._footprints[rank].with_copies(self.batch_size, behind, copies)
            fits = needed_bytes <= self.cluster.devices[rank].memory_bytes
            stage = self._seconds[rank].copy()
            stage[self._ranges] = np.where(fits, stage[self._ranges], np.inf)
            self._stages[rank, behind, copies] = stage
        return self._stages[rank, behind, copies]


def air_of(costs: Equation3, order: Sequence[int], cuts: Sequence[int]) -> float:
    """Return the seconds for which a mini-batch's messages occupy shared air; 0 on a switch."""
    return sum(float(costs.on_air_s[link][cut]) for link, cut in zip(pairwise(order), cuts[1:], strict=False))


def pace_of(costs: Equation3, order: Sequence[int], cuts: Sequence[int]) -> float:
    """Return Eq. 3's value of given cuts: the slowest stage or link, or all messages on shared air, even if it does not
    fit.
    """
    seconds = [float(costs.seconds(rank)[cut]) for rank, cut in zip(order, pairwise(cuts), strict=True)]
    links = [float(costs.between_s[link][cut]) for link, cut in zip(pairwise(order), cuts[1:], strict=False)]
    return max(*seconds, *links, air_of(costs, order, cuts))
