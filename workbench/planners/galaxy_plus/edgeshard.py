"""EdgeShard's planner: devices one after the other, each with consecutive layers, cut for least latency by dynamic programming.

Its programme (Zhang et al. 2024, the latency objective) asks for each layer and device which device held the layer before.  A device's
memory depends on what it already holds, so up to MOST_EXACT devices the set of those used is part of the state here, which makes it
exact; beyond, each state remembers the path that led to it, as published.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan, InferenceProfile
from workbench.planners.galaxy_plus.baselines import finished
from workbench.planners.galaxy_plus.memory import HELD, MemoryRule, least_missing
from workbench.planners.galaxy_plus.pricing import boundary_bytes, whole_layer_s
from workbench.planners.galaxy_plus.times import checked_ranks, ends_s, stack_lengths

MOST_EXACT = 8
Path = tuple[tuple[int, int], ...]
"""(rank, layers) one after the other."""


def edgeshard(
    profile: InferenceProfile,
    cluster: Cluster,
    *,
    length: int,
    decoder_length: int | None = None,
    ranks: Sequence[int] | None = None,
    memory: MemoryRule = HELD,
    check_memory: bool = True,
) -> InferencePlan:
    """Return the sequential pipeline of least latency; devices that do not help are left out.

    The first device holds embedding and head, and the result travels back to it.  check_memory=False ignores memory.
    Raises PlanError, saying how much memory is missing, if no pipeline fits.
    """
    lengths = stack_lengths(profile, length, decoder_length)
    chosen = checked_ranks(profile, cluster, ranks)
    problem = _Problem(profile, cluster, chosen, lengths, memory if check_memory else None)
    path = problem.exact() if len(chosen) <= MOST_EXACT else problem.published()
    if path is None:
        raise least_missing(profile, cluster, chosen, length=length, decoder_length=decoder_length, memory=memory)
    made = InferencePlan(
        method="edgeshard",
        paradigm="pipeline",
        ranks=tuple(rank for rank, _ in path),
        layers=tuple(count for _, count in path),
        length=length,
    )
    return finished(made, profile, cluster, length=length, decoder_length=decoder_length, memory=memory, check_memory=check_memory)


class _Problem:
    """Seconds and bytes of every range of layers on every device.  Index d is ranks[d]; i layers are done."""

    def __init__(
        self, profile: InferenceProfile, cluster: Cluster, ranks: tuple[int, ...], lengths: tuple[int, ...], memory: MemoryRule | None
    ) -> None:
        self.ranks, self.layers = ranks, profile.num_layers
        shapes = [profile.stacks[profile.stack_of(layer)] for layer in range(self.layers)]
        extra = memory is not None and memory.layers
        sizes = [shape.attention_bytes + shape.feed_forward_bytes + (shape.layer_bytes if extra else 0) for shape in shapes]
        held = np.concatenate([[0], np.cumsum(sizes)])
        done = [np.concatenate([[0.0], np.cumsum([whole_layer_s(profile, r, n, lengths) for n in range(self.layers)])]) for r in ranks]
        self.ends = [ends_s(profile, rank, lengths) for rank in ranks]
        crossing = np.array([boundary_bytes(profile, layer, lengths) for layer in range(self.layers + 1)], float)
        self.hop = {
            (a, b): np.array([cluster.link(ranks[a], ranks[b]).transfer_s(int(nbytes)) for nbytes in crossing])
            for a in range(len(ranks))
            for b in range(len(ranks))
            if a != b
        }
        working = profile.working_bytes_per_token * max(lengths) if memory is not None and memory.working else 0
        self.cost: list[dict[bool, np.ndarray]] = []  # [device][is first]: (layers + 1, layers + 1) seconds from i to j
        for d, rank in enumerate(ranks):
            seconds, nbytes = done[d][None, :] - done[d][:, None], held[None, :] - held[:, None]
            per = {}
            for first in (True, False):
                room = math.inf
                if memory is not None:
                    room = memory.budget_bytes(cluster, rank) - working - memory.ends_bytes(profile, 0 if first else 1)
                per[first] = np.where((nbytes > 0) & (nbytes <= room), seconds, np.inf)
            self.cost.append(per)

    def exact(self) -> Path | None:
        """Return the best path over all sets and orders of devices."""
        n, best, best_path = len(self.ranks), math.inf, None
        for first in range(n):
            state = {(1 << first, first): self.cost[first][True][0] + self.ends[first]}
            paths: dict[tuple[int, int], list[Path | None]] = {(1 << first, first): [((first, i),) for i in range(self.layers + 1)]}
            for size in range(1, n + 1):
                for (used, last), seconds in [item for item in state.items() if item[0][0].bit_count() == size]:
                    back = 0.0 if last == first else float(self.hop[last, first][-1])
                    if seconds[-1] + back < best:
                        best, best_path = float(seconds[-1] + back), paths[used, last][-1]
                    if not (seconds[:-1] < best).any():
                        continue
                    for d in range(n):
                        if used >> d & 1:
                            continue
                        found = (seconds + self.hop[last, d])[:, None] + self.cost[d][False]
                        at = found.argmin(axis=0)
                        value = found[at, np.arange(self.layers + 1)]
                        key = (used | 1 << d, d)
                        old = state.get(key)
                        better = value < (np.full_like(value, np.inf) if old is None else old)
                        if not better.any():
                            continue
                        state[key] = value if old is None else np.minimum(old, value)
                        kept = paths.setdefault(key, [None] * (self.layers + 1))
                        for j in np.flatnonzero(better):
                            before = paths[used, last][at[j]]
                            assert before is not None
                            kept[j] = (*before, (d, int(j - at[j])))
        return None if best_path is None else tuple((self.ranks[d], count) for d, count in best_path)

    def published(self) -> Path | None:
        """Return EdgeShard's path: state (layers done, device), memory and devices used along the path kept for each state."""
        n, best, best_path = len(self.ranks), math.inf, None
        states: list[dict[int, tuple[float, Path]]] = [{} for _ in range(self.layers + 1)]
        for d in range(n):
            for i in range(1, self.layers + 1):
                seconds = float(self.cost[d][True][0, i]) + self.ends[d]
                if math.isfinite(seconds):
                    states[i][d] = seconds, ((d, i),)
        for i in range(1, self.layers + 1):
            for last, (seconds, path) in list(states[i].items()):
                for d in range(n):
                    if any(d == one for one, _ in path):
                        continue
                    for j in range(i + 1, self.layers + 1):
                        value = seconds + float(self.hop[last, d][i]) + float(self.cost[d][False][i, j])
                        if value < states[j].get(d, (math.inf, ()))[0]:
                            states[j][d] = value, (*path, (d, j - i))
        for last, (seconds, path) in states[self.layers].items():
            first = path[0][0]
            value = seconds + (0.0 if last == first else float(self.hop[last, first][-1]))
            if value < best:
                best, best_path = value, path
        return None if best_path is None else tuple((self.ranks[d], count) for d, count in best_path)
