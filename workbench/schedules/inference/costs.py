"""Costs of the inference schedules: seconds and bytes (Galaxy+ section III-C, Eq. 5 to 8)."""

from __future__ import annotations

from functools import cache

from workbench.core.cluster import Cluster
from workbench.core.costs import MESSAGE_S, TOKEN, Spec, broadcast_s, opaque, ring_allreduce_s
from workbench.core.inference import InferenceProfile
from workbench.core.schedule import ALLREDUCE, BROADCAST, SEND, Op, Value
from workbench.schedules.inference.layout import InferenceLayout

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
