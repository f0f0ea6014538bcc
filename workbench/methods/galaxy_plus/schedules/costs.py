"""Costs of the inference schedules: seconds and bytes (Galaxy+ section III-C, Eq. 5 to 8)."""

from __future__ import annotations

from dataclasses import replace

from workbench.core.cluster import Cluster
from workbench.core.costs import MESSAGE_S, TOKEN, Spec, TableCosts, opaque
from workbench.core.schedule import Op, Value
from workbench.methods.galaxy_plus.memory import device_needs
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.methods.galaxy_plus.schedules.layout import InferenceLayout

_FLOATS = {2: "float16", 4: "float32"}
_BLOCK_KINDS = ("QKV", "ATT", "OUT", "CQ", "CKV", "CATT", "COUT", "UP", "DOWN")
_WIDE = frozenset({"emb", "wide", "hid", "res", "prod", "sum", "mem"})


def inference_costs(
    profile: InferenceProfile, cluster: Cluster, layout: InferenceLayout, *, message_s: float = MESSAGE_S
) -> TableCosts:
    """Return the costs of the schedules of this package.

    message_s: overhead of every message, in addition to its link's time.  Values that stay on their device (queries,
    keys, contexts, activations of the feed-forward network) are not counted one by one, because the profile's working
    bytes cover them.
    """
    plan = layout.plan

    def tokens_of(op: Op) -> int:
        start, stop = layout.span(op)
        return stop - start

    def end_s(rank: int, op: Op) -> float:
        return profile.costs[rank][layout.stack_of(op.stage)].seconds(op.kind, tokens_of(op))

    def connection_s(rank: int, op: Op) -> float:
        costs, tokens = profile.costs[rank][layout.blocks[op.stage].stack], tokens_of(op)
        if op.kind != "CONN":
            return costs.seconds(op.kind, tokens)
        return costs.seconds("CONN", tokens) + max(0, len(op.reads) - 2) * costs.seconds("ADD", tokens)

    def block_s(rank: int, op: Op) -> float:
        block, tokens = layout.blocks[op.stage], tokens_of(op)
        position = plan.position_of(rank)
        assert position is not None, f"rank {rank} is not in this plan"
        if op.kind == "ATT":
            tokens *= layout.past + (1 if layout.is_decoding else layout.lengths[block.stack])
        elif op.kind == "CATT":
            tokens *= layout.memory_length
        return profile.costs[rank][block.stack].seconds(op.kind, tokens, layout.width(block, position))

    def sequence(stack: int, tokens: int, bytes_per_token: int) -> Spec:
        """Return the spec of a batch of one sequence; opaque if the profile's bytes match no dtype."""
        shape = layout.stacks[stack]
        item = shape.hidden_bytes // shape.hidden_size if shape.hidden_size else 0
        if item * shape.hidden_size != shape.hidden_bytes or item not in _FLOATS:
            return opaque(tokens * bytes_per_token)
        return Spec((1, tokens, bytes_per_token // item), _FLOATS[item])

    def tile_tokens(stack: int, part: int) -> int:
        """Return the tokens of a tile; all tokens for a stack that is not divided into tiles."""
        tiles = layout.tiles[stack]
        return tiles[part].tokens if tiles else layout.lengths[stack]

    def wide(value: Value) -> Spec:
        stack = 0 if value.name == "mem" else layout.stack_of(value.stage)
        return sequence(stack, tile_tokens(stack, value.part), layout.stacks[stack].hidden_bytes)

    def keys_and_values(value: Value) -> Spec:
        block = layout.blocks[value.stage]
        if plan.paradigm != "sequence" or block.kind != "attention":
            return TOKEN
        shape = layout.stacks[block.stack]
        per_token = shape.kv_unit_bytes * shape.num_units or 2 * shape.hidden_bytes
        return sequence(block.stack, tile_tokens(block.stack, value.part), per_token)

    texts = layout.lengths[-1] if layout.is_decoding else 1
    needs = device_needs(
        replace(profile, stacks=layout.stacks),
        plan,
        layout.lengths,
        kept_tokens=layout.room,
        memory_tokens=texts * layout.memory_length,
    )
    return TableCosts(
        seconds_by_kind=dict.fromkeys(("EMB", "HEAD"), end_s)
        | dict.fromkeys(("CONN", "ADD", "ENTER"), connection_s)
        | dict.fromkeys(_BLOCK_KINDS, block_s),
        bytes_by_name={
            **dict.fromkeys(_WIDE, wide),
            "kv": keys_and_values,
            "ids": lambda value: Spec((layout.lengths[layout.stack_of(value.stage)],), "int64"),
            "out": lambda value: sequence(len(layout.stacks) - 1, layout.lengths[-1], layout.stacks[-1].hidden_bytes),
        },
        resident_by_rank={rank: need.total_bytes for rank, need in needs.items()},
        cluster=cluster,
        message_s=message_s,
    )
