"""Weak and strong scaling of one repeated layer on 1 to 4 equal devices (Galaxy+, section IV-E, Fig. 14 and 15)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from workbench.bench.inference_models import VOCABULARY
from workbench.bench.inference_sides import Side, SidesJob, SidesResult, run_sides
from workbench.core.cluster import Cluster
from workbench.core.inference import StackShape
from workbench.core.timeline import Span
from workbench.runtime.engines import EngineCluster

if TYPE_CHECKING:
    from workbench.bench.galaxy_plus import BenchModel

TOKENS_EACH, TOKENS = 96, 384
ROUNDS = 2


def scaling_points(model: BenchModel, cluster: Cluster, engines: EngineCluster, progress: Callable[[str], None]) -> dict[str, Any]:
    """Return the share of linear scaling at 96 tokens a device, and the speed-up at 384 tokens, by number of devices.

    A layer takes the time between the ends of two layers' last connections, on any device: what is in front of the first and behind the
    last does not count, as in the paper.
    """
    chance = random.Random(0)
    sides = []
    for count in range(1, cluster.world_size + 1):
        for kind, tokens in (("weak", TOKENS_EACH * count), ("strong", TOKENS)):
            if count == cluster.world_size and kind == "weak" and tokens == TOKENS:
                continue  # the same as the strong one
            ids = torch.tensor([[chance.randrange(4, VOCABULARY) for _ in range(tokens)]])
            plan = model.plan(cluster, tokens, ranks=range(count))
            sides.append(Side(name=f"{kind} {count}", plan=plan, ids=ids, rounds=ROUNDS))
    job = SidesJob(setup=model.setup(cluster), sides=tuple(sides), rounds=ROUNDS)
    results = engines.run(run_sides, [job] * cluster.world_size)
    layer_s = {side.name: _layer_s(results, side.name) for side in sides}
    last = cluster.world_size
    layer_s.setdefault(f"weak {last}", layer_s[f"strong {last}"])
    shape = model.host.stacks[0]
    rate = {count: _flops(shape, TOKENS_EACH * count) / layer_s[f"weak {count}"] for count in range(1, last + 1)}
    weak = {count: rate[count] / (count * rate[1]) for count in rate}
    strong = {count: layer_s["strong 1"] / layer_s[f"strong {count}"] for count in rate}
    progress(
        "Scaling of a GPT2-L-sized layer, 1000 Mbit/s: weak "
        + ", ".join(f"{count}: {share:.0%}" for count, share in weak.items())
        + "; strong "
        + ", ".join(f"{count}: {times:.2f}x" for count, times in strong.items())
    )
    late = sum(sum(r.late_s.values()) for r in results) / sum(sum(r.paced_s.values()) for r in results)
    return {
        f"weak scaling, {last} devices, share of linear": weak[last],
        f"strong scaling, {last} devices, speed-up": strong[last],
        "weak scaling": weak,
        "strong scaling": strong,
        "scaling overrun share": late,
    }


def _layer_s(results: Sequence[SidesResult], name: str) -> float:
    """Return the mean seconds between the ends of layers, of the last round."""
    ends: dict[int, float] = {}
    for result in results:
        for span in result.spans[name]:
            layer = _layer_of(span)
            if layer >= 0:
                ends[layer] = max(ends.get(layer, 0.0), span.end_s)
    numbers = sorted(ends)
    return median(ends[b] - ends[a] for a, b in pairwise(numbers))


def _layer_of(span: Span) -> int:
    """Return the layer that the span ends, -1 if none: two blocks to a layer, or a whole layer on one device."""
    if span.op.kind == "LAYER":
        return span.op.stage
    return span.op.stage // 2 if span.op.kind == "CONN" and span.op.stage % 2 else -1


def _flops(shape: StackShape, tokens: int) -> float:
    """Return the floating-point operations of a layer."""
    hidden = shape.hidden_size
    return tokens * (8 * hidden * hidden + 4 * hidden * shape.columns) + 4.0 * tokens * tokens * hidden
