"""How much of the shorter side the ring of tiles hides: overlapped blocks, their computation alone, their communication alone."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from workbench.bench.inference_sides import SidesResult
from workbench.core.inference import InferencePlan
from workbench.schedules.inference import InferenceLayout, InferencePrices


def overlap_point(plan: InferencePlan, price: InferencePrices, results: Sequence[SidesResult], *, dilation: float = 1.0) -> dict[str, Any]:
    """Return for attention and feed-forward blocks of scheme 1 the seconds overlapped and of each side alone, and the ratio of a layer.

    A block takes from the end of the last connection of the block before it, on any device, to its own; the first layer, whose tiles come
    from the embedding, is left out.  Computation alone is the busiest device's.  dilation: by which the seconds are divided.
    The ratio is that of both blocks together to the longer side of each: a block's first tiles are under way before the last tiles of the
    block before it have ended, so what one of them seems to take less the other seems to take more.
    """
    layout = InferenceLayout.build(plan, price.profile.stacks, price.lengths)
    rounds = [
        {what: [result.blocks["scheme 1"][what][turn] for result in results] for what in ("both", "computation", "communication")}
        for turn in range(len(results[0].blocks["scheme 1"]["both"]))
    ]
    blocks: dict[str, dict[str, float]] = {}
    for kind in ("attention", "feed_forward"):
        numbers = [block.number for block in layout.blocks if block.kind == kind and block.layer > 0]
        both = median(_spaces(turn["both"], numbers) for turn in rounds)
        communication = median(_spaces(turn["communication"], numbers) for turn in rounds)
        computation = median(fmean(max(rank.get(n, 0.0) for rank in turn["computation"]) for n in numbers) for turn in rounds)
        blocks[kind] = {
            "both_s": both / dilation,
            "computation_s": computation / dilation,
            "communication_s": communication / dilation,
        }
    longer_s = sum(max(block["computation_s"], block["communication_s"]) for block in blocks.values())
    tiles = {"tile_tokens": plan.tile_tokens, "group_tokens": plan.group_tokens, "both_ways": plan.both_ways}
    return {"overlap": sum(block["both_s"] for block in blocks.values()) / longer_s, "overlap blocks": blocks, "overlap tiles": tiles}


def _spaces(ends: Sequence[dict[int, float]], numbers: Sequence[int]) -> float:
    """Return the mean time between a block's end and that of the block before it, both on the last device."""
    last = {number: max(rank[number] for rank in ends if number in rank) for number in {n - 1 for n in numbers} | set(numbers)}
    return fmean(last[number] - last[number - 1] for number in numbers)
