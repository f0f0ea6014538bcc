"""What a rank needs to run a plan on a sequence of a certain length, made once: layout, schedule, seconds, shapes of what arrives."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import torch

from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan, InferenceProfile, StackShape
from workbench.core.schedule import COMMUNICATION, Op, Schedule, Value
from workbench.runtime.transport import TensorSpec
from workbench.schedules.inference import Exchange, InferenceCosts, InferenceLayout, decode_schedule, inference_schedule

KEPT_PROGRAMS = 128
"""Programs that a rank keeps, the least used go first: a task's lengths, or the steps of a text."""


class Program:
    """One plan on one sequence: what this rank runs, how long each operation takes at full speed, and what it will receive.

    host: the profile of one unslowed core, None for operations that are not paced.
    """

    def __init__(
        self, layout: InferenceLayout, schedule: Schedule, rank: int, cluster: Cluster, host: InferenceProfile | None, width: int
    ) -> None:
        self.layout, self.schedule, self.rank = layout, schedule, rank
        self._width = width
        self._seconds: dict[int, float] = {}
        if host is not None:
            costs = InferenceCosts(replace(host, costs=(host.costs[0],) * cluster.world_size), cluster, layout)
            # By identity: hashing an operation costs more than many a small one computes.
            self._seconds = {id(op): costs.seconds(rank, op) for op in schedule.ops[rank] if op.kind not in COMMUNICATION}

    def full_speed_s(self, op: Op) -> float:
        """Return the seconds of a compute operation of this rank on one unslowed core."""
        return self._seconds.get(id(op), 0.0)

    def spec(self, value: Value) -> TensorSpec:
        """Return shape and type of a value that arrives: the tokens of a tile, of a whole sequence, or keys and values of a tile."""
        layout, name = self.layout, value.name
        if name == "lay":
            stack = next((block.stack for block in layout.blocks if block.layer == value.stage), len(layout.stacks) - 1)
            return TensorSpec((1, layout.lengths[stack], layout.stacks[stack].hidden_size), torch.float32)
        stack = 0 if name == "mem" else layout.stack_of(value.stage)
        shape = layout.stacks[stack]
        tiles = layout.tiles[stack]
        tokens = tiles[value.part].tokens if value.part >= 0 and tiles else layout.lengths[stack]
        return TensorSpec((1, tokens, self._width if name == "kv" else shape.hidden_size), torch.float32)


class Programs:
    """A rank's programs, by plan and lengths.  kv_width: numbers of one token's keys and values of all units."""

    def __init__(
        self, rank: int, cluster: Cluster, stacks: tuple[StackShape, ...], host: InferenceProfile | None, *, kv_width: int
    ) -> None:
        self.rank, self.cluster, self.stacks, self.host = rank, cluster, stacks, host
        self._kv_width = kv_width
        self._kept: OrderedDict[tuple, Program] = OrderedDict()

    def sequence(self, plan: InferencePlan, lengths: tuple[int, ...]) -> Program:
        """Return the program of one sequence (one length for each stack)."""
        return self._program(
            (plan, lengths),
            lambda: InferenceLayout.build(plan, self.stacks, lengths),
            lambda layout: inference_schedule(layout, self.cluster.world_size),
        )

    def token(self, plan: InferencePlan, *, past: int, memory_length: int, exchange: Exchange) -> Program:
        """Return the program of one more token behind `past`."""
        return self._program(
            (plan, past, memory_length, exchange),
            lambda: InferenceLayout.decode(plan, self.stacks, past=past, memory_length=memory_length),
            lambda layout: decode_schedule(layout, self.cluster.world_size, exchange=exchange),
        )

    def _program(self, key: tuple, layout_of: Callable[[], InferenceLayout], schedule_of: Callable[[InferenceLayout], Schedule]) -> Program:
        found = self._kept.get(key)
        if found is None:
            layout = layout_of()
            found = Program(layout, schedule_of(layout), self.rank, self.cluster, self.host, self._kv_width)
            self._kept[key] = found
            if len(self._kept) > KEPT_PROGRAMS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return found
