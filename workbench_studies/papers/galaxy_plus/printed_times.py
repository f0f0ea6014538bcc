"""The seconds of one sequence under a plan in closed form: Eq. 6-7 for Galaxy+'s plans, and the same terms for the
baselines of the paper's tables (Galaxy+, section III-C).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.costs import collective_s
from workbench.core.inference import InferencePlan
from workbench.core.schedule import ALLREDUCE
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.methods.galaxy_plus.planners.equation9 import Equation9, cut_of
from workbench.methods.galaxy_plus.planners.terms import (
    LayerTimes,
    all_gather_s,
    boundary_bytes,
    ends_s,
    num_blocks,
    stack_lengths,
    star_s,
)


class SequenceTimes(NamedTuple):
    """Seconds of one sequence without overlap.

    layers_s: seconds of all layers, the objective of Eq. 9 for a hybrid plan.

    ends_s: seconds of embedding, head, and the transfer of tokens to their devices and back, which Eq. 6-7 leave out.
    """

    layers_s: float
    ends_s: float

    @property
    def total_s(self) -> float:
        """Return the seconds of the layers and of both ends."""
        return self.layers_s + self.ends_s


def price_plan(
    plan: InferencePlan,
    profile: InferenceProfile,
    cluster: Cluster,
    *,
    length: int | None = None,
    decoder_length: int | None = None,
) -> SequenceTimes:
    """Return the predicted seconds of a sequence of `length` tokens (default: the plan's), for any paradigm."""
    lengths = stack_lengths(profile, length or plan.length or 1, decoder_length)
    of_paradigm = {"hybrid": _hybrid, "tensor": _tensor, "sequence": _sequence, "pipeline": _pipeline}
    layers, ways = of_paradigm[plan.paradigm](plan, profile, cluster, lengths)
    return SequenceTimes(layers, ways + ends_s(profile, plan.ranks[0], lengths))


def _hybrid(
    plan: InferencePlan, profile: InferenceProfile, cluster: Cluster, lengths: Sequence[int]
) -> tuple[float, float]:
    """Return Galaxy+'s seconds: those of the layers (Eq. 6 + Eq. 7), and those of the transfers at both ends."""
    pricer, cut = Equation9(profile, cluster, lengths), cut_of(plan, profile)
    return pricer(cut), pricer.ways_s(cut)


def _tensor(
    plan: InferencePlan, profile: InferenceProfile, cluster: Cluster, lengths: Sequence[int]
) -> tuple[float, float]:
    """Return Megatron-LM's seconds: an all-reduce of the whole sequence after each block, connections computed on all
    devices.
    """
    layers = ways = 0.0
    for stack, shape in enumerate(profile.stacks):
        units, columns = plan.cut(shape)
        n, nbytes = lengths[stack], lengths[stack] * shape.hidden_bytes
        each = [LayerTimes(profile, rank, stack, lengths) for rank in plan.ranks]
        attention = [times.attention_s(count) for times, count in zip(each, units, strict=True)]
        layer = sum(max(block) for block in zip(*attention, strict=True))
        layer += max(times.mlp_s(columns=count) for times, count in zip(each, columns, strict=True))
        layer += max(times.con_s(n) for times in each)
        layers += shape.num_layers * (layer + num_blocks(shape) * collective_s(cluster, ALLREDUCE, plan.ranks, nbytes))
        ways += max((cluster.link(plan.ranks[0], rank).transfer_s(nbytes) for rank in plan.ranks[1:]), default=0.0)
    return layers, ways


def _sequence(
    plan: InferencePlan, profile: InferenceProfile, cluster: Cluster, lengths: Sequence[int]
) -> tuple[float, float]:
    """Return sequence parallelism's seconds: keys and values of all tokens are gathered, two all-gathers per layer
    (section IV-A).
    """
    layers = ways = 0.0
    for stack, shape in enumerate(profile.stacks):
        tokens, units = plan.tokens(lengths[stack]), shape.num_units
        both = [
            (LayerTimes(profile, rank, stack, lengths), count) for rank, count in zip(plan.ranks, tokens, strict=True)
        ]
        attention = max(sum(times.attention_s(units, count)) for times, count in both)
        mlp = max(times.mlp_s(tokens=count) for times, count in both)
        con = max(times.con_s(count) for times, count in both)
        # One message contains a token's keys and values.
        width = units * shape.kv_unit_bytes if shape.kv_unit_bytes else 2 * shape.hidden_bytes
        layers += shape.num_layers * (attention + mlp + con + all_gather_s(cluster, plan.ranks, tokens, width))
        ways += star_s(plan.ranks, cluster, tokens, shape.hidden_bytes)
        if shape.has_cross_attention:
            ways += all_gather_s(cluster, plan.ranks, plan.tokens(lengths[0]), profile.stacks[0].hidden_bytes)
    return layers, ways


def _pipeline(
    plan: InferencePlan, profile: InferenceProfile, cluster: Cluster, lengths: Sequence[int]
) -> tuple[float, float]:
    """Return EdgeShard's seconds for one sequence: one device after the other, with the result sent back to
    the first.
    """
    seconds, layer = 0.0, 0
    for rank, following, count in zip(plan.ranks, (*plan.ranks[1:], plan.ranks[0]), plan.layers, strict=True):
        seconds += sum(
            LayerTimes(profile, rank, profile.stack_of(number), lengths).whole_s()
            for number in range(layer, layer + count)
        )
        layer += count
        if following != rank:
            seconds += cluster.link(rank, following).transfer_s(boundary_bytes(profile, layer, lengths))
    return seconds, 0.0
