"""Confidant's Eq. 1 and 2 (memory, as printed) and Eq. 4 (which idle device replaces one that leaves)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from workbench.core.plan import Plan
from workbench.core.units import size_words
from workbench.core.virtual_workers import delay_of
from workbench.models.configuration import ModelFacts
from workbench.planners.equation3 import Equation3
from workbench.planners.memory import Need


def printed_need(
    need: Need, *, num_layers: int, behind: int, heads: int, batch: int, tokens: int, hidden: int, feed_forward: int
) -> int:
    """Return M_tot of Eq. 1 in bytes, with M_act by Eq. 2 as printed, which we read as one layer's.

    need: need of the layers by our model, for M_model, M_pipe (together its weights) and M_grad.  behind: N - i - 1,
    the number of following devices.
    The factors of Eq. 2 are those of Korthikanti et al. (2023), who count two bytes per value; 8 h_f / h is twice
    theirs.
    """
    activations = tokens * batch * hidden * (18 + 8 * feed_forward / hidden + 5 * heads * tokens / hidden)
    return round(need.weights_bytes + need.gradient_bytes + (behind + 1) * num_layers * activations)


def memory_notes(facts: ModelFacts, costs: Equation3, plan: Plan) -> Iterator[str]:
    """Yield each device's memory by the measured model, and by Eq. 1 and 2 as printed."""
    num_stages = len(plan.stages)
    for number, stage in enumerate(plan.stages):
        [rank] = stage.ranks
        behind = num_stages - 1 - number
        need = costs.need(rank, behind, stage.start, stage.stop, num_stages=num_stages, activations=stage.activations)
        printed = printed_need(
            need,
            num_layers=stage.num_layers,
            behind=behind,
            heads=facts.num_heads,
            batch=costs.batch_size,
            tokens=costs.memory_length,
            hidden=facts.hidden_size,
            feed_forward=facts.feed_forward_size,
        )
        device, off = costs.cluster.devices[rank], printed / need.total_bytes - 1
        yield (
            f"Memory of {device.name} (stashed versions of its weights: "
            f"{delay_of(costs.versions, behind, num_stages)}):"
            f" {size_words(need.total_bytes)} by the measured model,"
            f" {size_words(printed)} by Eq. 1 and 2 as printed ({off:+.0%})."
        )


def compatibilities(
    capacities: Sequence[Sequence[float]], batteries: Sequence[float], remaining_share: float, eta: float = 1e-3
) -> list[float]:
    """Return DC of each idle device as a replacement for a leaving one (Eq. 4): p b / (H + eta); the highest is the
    best.

    capacities: for each device the seconds of 1 to L layers.  batteries: the remaining charge.  remaining_share: p, the
    remaining share of the run.
    Both H, the sum of the seconds, and b are mapped to 0 to 1 from the least to the most among the devices, so their
    units cancel.
    The paper does not define them if least and most are equal, or for one device.  Then the devices do not differ, and
    each counts as the best: H = 0 and b = 1.  If scores are equal, the first device counts.  As printed, p is a factor
    of all scores and changes no choice, and the device with the least charge scores 0, however fast it is.
    """
    if not batteries:
        return []
    sums = np.array([np.sum(capacity) for capacity in capacities], float)
    charges = np.array(batteries, float)
    slow = (sums - sums.min()) / (np.ptp(sums) or 1.0)
    full = (charges - charges.min()) / np.ptp(charges) if np.ptp(charges) else np.ones(len(charges))
    return list(remaining_share * full / (slow + eta))
