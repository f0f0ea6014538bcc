"""Costs of the inference schedules: seconds and bytes (Galaxy+ section III-C, Eq. 5 to 8), a plan's simulated time, its best tiles.

A planner's formulas ignore the order of tiles in a ring; only the simulation shows which device waits for which.
InferencePrices simulates only a few layers.  Consecutive layers of one scheme soon take equal times, or every second one does.  (A
schedule whose transfers never contend for an interface is a max-plus linear system, periodic from some layer on.)  So a long run of
layers is simulated as a short one, and its last two steps are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby

from workbench.core.cluster import Cluster
from workbench.core.costs import TOKEN, Spec, broadcast_s, opaque, ring_allreduce_s
from workbench.core.inference import InferencePlan, InferenceProfile, StackShape
from workbench.core.program import Program
from workbench.core.schedule import ALLREDUCE, BROADCAST, SEND, Op, Value
from workbench.core.timeline import Timeline
from workbench.schedules.inference.baselines import inference_schedule
from workbench.schedules.inference.layout import InferenceLayout

MESSAGE_S = 1e-4
"""Overhead per message, in addition to latency and transfer time: about 0.1 ms with gloo on Linux, measured."""

_FLOATS = {2: "float16", 4: "float32"}
_WIDE = frozenset({"emb", "wide", "hid", "res", "prod", "sum", "mem"})


class InferenceCosts:
    """Costs of the schedules of this package: a core.costs.Costs.

    message_s: overhead of every message, in addition to its link's time.  Values that stay on their device (queries, keys, contexts,
    activations of the feed-forward network) are not counted one by one: the profile's working bytes cover them.
    """

    def __init__(self, profile: InferenceProfile, cluster: Cluster, layout: InferenceLayout, *, message_s: float = MESSAGE_S) -> None:
        self._profile, self._cluster, self._layout, self._message_s = profile, cluster, layout, message_s
        self._link = cache(cluster.link)

    def seconds(self, rank: int, op: Op) -> float:
        """Return the seconds of an operation (see Costs)."""
        kind = op.kind
        if kind == SEND:
            return self._link(*op.ranks).transfer_s(self.spec(op.reads[0]).nbytes) + self._message_s
        if kind == ALLREDUCE:
            messages = 2 * (len(op.ranks) - 1)
            return ring_allreduce_s(self._cluster, op.ranks, self.spec(op.writes[0]).nbytes) + messages * self._message_s
        if kind == BROADCAST:
            messages = (len(op.ranks) - 1).bit_length()
            return broadcast_s(self._cluster, op.ranks, self.spec(op.writes[0]).nbytes) + messages * self._message_s
        layout = self._layout
        start, stop = layout.span(op)
        tokens = stop - start
        if kind in ("EMB", "HEAD"):
            return self._profile.costs[rank][layout.stack_of(op.stage)].seconds(kind, tokens)
        block = layout.blocks[op.stage]
        costs = self._profile.costs[rank][block.stack]
        if kind == "CONN":
            return costs.seconds("CONN", tokens) + max(0, len(op.reads) - 2) * costs.seconds("ADD", tokens)
        if kind in ("ADD", "ENTER"):
            return costs.seconds(kind, tokens)
        position = layout.plan.position_of(rank)
        assert position is not None, f"rank {rank} is not in this plan"
        if kind == "ATT":
            tokens *= layout.past + layout.lengths[block.stack]
        elif kind == "CATT":
            tokens *= layout.memory_length
        return costs.seconds(kind, tokens, layout.width(block, position))

    def spec(self, value: Value) -> Spec:
        """Return the shape and dtype of a value (see Costs): the tokens of a tile or of a whole sequence, or a tile's keys and values."""
        layout, name = self._layout, value.name
        if name in _WIDE:
            stack = 0 if name == "mem" else layout.stack_of(value.stage)
            return self._hidden(stack, self._tokens(stack, value.part))
        if name == "kv" and layout.plan.paradigm == "sequence" and layout.blocks[value.stage].kind == "attention":
            stack = layout.blocks[value.stage].stack
            shape = layout.stacks[stack]
            per_token = shape.kv_unit_bytes * shape.num_units or 2 * shape.hidden_bytes
            return self._wide(stack, self._tokens(stack, value.part), per_token)
        if name == "ids":
            return Spec((layout.lengths[layout.stack_of(value.stage)],), "int64")
        return self._hidden(len(layout.stacks) - 1, layout.lengths[-1]) if name == "out" else TOKEN

    def _tokens(self, stack: int, part: int) -> int:
        """Return the tokens of a tile; all tokens for a stack that is not divided into tiles."""
        tiles = self._layout.tiles[stack]
        return tiles[part].tokens if tiles else self._layout.lengths[stack]

    def _hidden(self, stack: int, tokens: int) -> Spec:
        return self._wide(stack, tokens, self._layout.stacks[stack].hidden_bytes)

    def _wide(self, stack: int, tokens: int, bytes_per_token: int) -> Spec:
        """Return the spec of a batch of one sequence; opaque if the profile's bytes match no dtype."""
        shape = self._layout.stacks[stack]
        item = shape.hidden_bytes // shape.hidden_size if shape.hidden_size else 0
        if item * shape.hidden_size != shape.hidden_bytes or item not in _FLOATS:
            return opaque(tokens * bytes_per_token)
        return Spec((1, tokens, bytes_per_token // item), _FLOATS[item])

    def resident_bytes(self, rank: int) -> int:
        """Return the bytes of a device's weights and of its working memory."""
        layout, plan = self._layout, self._layout.plan
        position = plan.position_of(rank)
        if position is None:
            return 0
        total = self._profile.first_bytes + self._profile.last_bytes if position == 0 else 0
        has_tokens = plan.paradigm == "hybrid" and plan.shares[position] > 0
        works = plan.paradigm in ("sequence", "pipeline")
        for shape, count, units, columns in plan.parts(layout.stacks):
            own = units[position] * (shape.unit_bytes + shape.cross_unit_bytes) + columns[position] * shape.column_bytes
            total += count * own
            if own or has_tokens:
                total, works = total + count * shape.layer_bytes, True
        return total + (self._profile.working_bytes_per_token * max(layout.lengths) if works else 0)


WORTH = 4.0
"""Minimum ratio of transfer time to per-message overhead: 48 KB at 1000 Mbit/s and 0.1 ms."""

GAIN = 0.998
"""Accept a change only if it shortens the time by this factor: simulated times are not exact to a thousandth."""

PIECES = (2, 3, 4, 6, 8)
"""Numbers of pieces into which the largest tile may be cut."""


def choose_tiles(plan: InferencePlan, price: InferencePrices) -> InferencePlan:
    """Return the plan with the tile size and the direction of the ring that take the least time.

    A tile is cut into more pieces only while a piece is worth its message (see `smallest_tile`).  Of equal times the fewest messages win;
    an emulation or a device with a slow processor prefers these too.
    """
    plan = found = replace(plan, tile_tokens=0, both_ways=False)
    if plan.paradigm != "hybrid" or plan.num_positions < 2:
        return plan
    smallest, largest = smallest_tile(price, plan.ranks), max(plan.tokens(price.lengths[0]))
    best_s = price(found)
    for tile_tokens in dict.fromkeys((0, *(-(-largest // count) for count in PIECES if largest / count >= smallest))):
        for both_ways in (False, True):
            if both_ways and (plan.num_positions < 3 or (tile_tokens or largest / 2) < smallest):
                continue
            tried = replace(plan, tile_tokens=tile_tokens, both_ways=both_ways)
            seconds = price(tried)
            if seconds < GAIN * best_s:
                found, best_s = tried, seconds
    return found


def smallest_tile(price: InferencePrices, ranks: Sequence[int]) -> int:
    """Return the fewest tokens whose transfer takes WORTH times the overhead of their message, on the fastest link in use."""
    fastest = max(price.cluster.link(a, b).bytes_per_s for a in ranks for b in ranks if a != b)
    return max(1, round(WORTH * price.message_s * fastest / price.profile.stacks[0].hidden_bytes))


def tile_options(length: int) -> tuple[int, ...]:
    """Return the tile sizes for which a planner should make plans to tune: whole shares, quarters and sixths of the sequence."""
    return tuple(dict.fromkeys((0, -(-length // 4), -(-length // 6))))


KEPT_LAYERS = 4
"""The number of layers simulated of a run of equal layers."""

Simulate = Callable[..., Timeline]


@dataclass(slots=True, kw_only=True)
class InferencePrices:
    """Seconds of plans on one profile and cluster: prices(plan).  Results are cached.

    lengths: of each stack's sequence.  simulate: simulator.simulate; it is passed in, because that package is on the same layer as this
    one.
    """

    profile: InferenceProfile
    cluster: Cluster
    lengths: tuple[int, ...]
    simulate: Simulate
    message_s: float = MESSAGE_S
    _known: dict[InferencePlan, float] = field(default_factory=dict)

    def __call__(self, plan: InferencePlan) -> float:
        """Return the seconds from the request's start to the answer, both on the plan's first device."""
        plan = replace(plan, method="", predicted_s=0.0, notes=(), length=0)
        if plan not in self._known:
            self._known[plan] = self._price(plan)
        return self._known[plan]

    def timeline(self, plan: InferencePlan, *, title: str = "", memory: bool = True) -> Timeline:
        """Return the simulation of all layers.  memory: with the bytes in use."""
        return self._simulated(plan, self.profile.stacks, memory=memory, title=title)

    def _price(self, plan: InferencePlan) -> float:
        if plan.paradigm == "pipeline":
            return self._simulated(plan, self.profile.stacks).makespan_s
        schemes = plan.schemes if plan.paradigm == "hybrid" else (1,) * self.profile.num_layers
        kept: list[int] = []
        stacks: list[StackShape] = []
        repeated: list[tuple[int, int]] = []  # (layer of the short model, number of repetitions)
        at = 0
        for shape in self.profile.stacks:
            before = len(kept)
            for scheme, run in groupby(schemes[at : at + shape.num_layers]):
                count = len(list(run))
                kept += [scheme] * min(count, KEPT_LAYERS)
                if count > KEPT_LAYERS:
                    repeated.append((len(kept) - 1, count - KEPT_LAYERS))
            stacks.append(replace(shape, num_layers=len(kept) - before))
            at += shape.num_layers
        short = replace(plan, schemes=tuple(kept) if plan.paradigm == "hybrid" else ())
        timeline = self._simulated(short, tuple(stacks))
        ends_s = _layer_ends(timeline, InferenceLayout.build(short, stacks, self.lengths))
        return timeline.makespan_s + sum(times * (ends_s[layer] - ends_s[layer - 2]) / 2 for layer, times in repeated)

    def _simulated(self, plan: InferencePlan, stacks: Sequence[StackShape], *, memory: bool = False, title: str = "") -> Timeline:
        layout = InferenceLayout.build(plan, stacks, self.lengths)
        costs = InferenceCosts(self.profile, self.cluster, layout, message_s=self.message_s)
        program = Program.on(self.cluster, inference_schedule(layout, self.cluster.world_size), costs)
        return self.simulate(program, memory=memory, title=title)


def _layer_ends(timeline: Timeline, layout: InferenceLayout) -> list[float]:
    """Return when each layer's last connection ended."""
    ends_s = [0.0] * (layout.blocks[-1].layer + 1)
    for span in timeline.spans:
        if span.op.kind == "CONN":
            layer = layout.blocks[span.op.stage].layer
            ends_s[layer] = max(ends_s[layer], span.end_s)
    return ends_s
