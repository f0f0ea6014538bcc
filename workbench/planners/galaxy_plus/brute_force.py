"""Every partition and number of scheme-2 layers tried: what checks the oracle on tiny instances (Galaxy+ Eq. 9)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.inference import InferencePlan, InferenceProfile
from workbench.planners.galaxy_plus.memory import HELD, MemoryRule, inference_needs
from workbench.planners.galaxy_plus.oracle import Optimum
from workbench.planners.galaxy_plus.pricing import price_plan
from workbench.planners.galaxy_plus.times import checked_ranks

MOST_PARTITIONS = 3_000_000


def brute_force(
    profile: InferenceProfile,
    cluster: Cluster,
    *,
    length: int,
    ranks: Sequence[int] | None = None,
    memory: MemoryRule = HELD,
) -> Optimum | None:
    """Return the optimum by trying every partition and number of scheme-2 layers (one stack; tiny instances: it checks the oracle)."""
    chosen = checked_ranks(profile, cluster, ranks)
    shape = profile.stacks[0]
    n = len(chosen)
    totals = (shape.num_units, shape.columns, length)
    if math.prod(math.comb(total + n - 1, n - 1) for total in totals) * (shape.num_layers + 1) > MOST_PARTITIONS:
        raise ConfigError("Trying every partition was asked for.", f"There are more than {MOST_PARTITIONS}.", "Use fewer of everything.")
    cuts = [list(_compositions(total, n)) for total in totals]
    best: tuple[float, InferencePlan] | None = None
    compared = 0
    for q in range(shape.num_layers + 1):
        for a, b, s in itertools.product(*cuts):
            compared += 1
            made = InferencePlan(
                method="oracle",
                paradigm="hybrid",
                ranks=chosen,
                units=a,
                columns=b,
                shares=tuple(map(float, s)),
                schemes=(2,) * q + (1,) * (shape.num_layers - q),
                length=length,
            )
            needs = inference_needs(made, profile, memory=memory)
            if any(need.total_bytes > memory.budget_bytes(cluster, rank) for rank, need in needs.items()):
                continue
            value = price_plan(made, profile, cluster).layers_s
            if best is None or value < best[0]:
                best = value, made
    return None if best is None else Optimum(plan=best[1], value_s=best[0], bound_s=best[0], solved=compared)


def _compositions(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """Return every way to write `total` as `count` numbers of at least 0."""
    if count == 1:
        yield (total,)
        return
    for head in range(total + 1):
        for rest in _compositions(total - head, count - 1):
            yield (head, *rest)
