"""The bytes that a device must read from its disk for a new plan; every device stores the whole model (Galaxy+, section III-E2)."""

from __future__ import annotations

from workbench.core.inference import InferencePlan, InferenceProfile, proportional_parts


def bytes_to_read(old: InferencePlan | None, new: InferencePlan, profile: InferenceProfile, rank: int) -> int:
    """Return the bytes that a device reads to switch plans: weights in memory are reused."""
    before, after = _layers(old, profile, rank), _layers(new, profile, rank)
    if not before:
        before = [(0, 0, 0)] * len(after)
    missing = sum(
        max(0, new_part - old_part) for old, new in zip(before, after, strict=False) for old_part, new_part in zip(old, new, strict=True)
    )
    return missing + max(0, _ends(new, profile, rank) - _ends(old, profile, rank))


def _layers(plan: InferencePlan | None, profile: InferenceProfile, rank: int) -> list[tuple[int, int, int]]:
    """Return the bytes of attention, feed-forward network and norms in each layer."""
    position = None if plan is None else plan.position_of(rank)
    if plan is None or position is None:
        return []
    layers: list[tuple[int, int, int]] = []
    first = sum(plan.layers[:position])
    for number in range(profile.num_layers):
        shape = profile.stacks[profile.stack_of(number)]
        attention, feed_forward = shape.attention_bytes, shape.feed_forward_bytes
        if plan.paradigm == "pipeline" and not first <= number < first + plan.layers[position]:
            attention = feed_forward = 0
        elif plan.paradigm in ("hybrid", "tensor"):
            units = proportional_parts(shape.num_units, plan.units)[position]
            attention = units * (shape.unit_bytes + shape.cross_unit_bytes)
            whole = plan.paradigm == "hybrid" and plan.schemes[number] == 2 and plan.shares[position] > 0
            feed_forward = shape.column_bytes * (shape.columns if whole else proportional_parts(shape.columns, plan.columns)[position])
        layers.append((attention, feed_forward, shape.layer_bytes if attention or feed_forward else 0))
    return layers


def _ends(plan: InferencePlan | None, profile: InferenceProfile, rank: int) -> int:
    return profile.first_bytes + profile.last_bytes if plan is not None and plan.ranks[0] == rank else 0
