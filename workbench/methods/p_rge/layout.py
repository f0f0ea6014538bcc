"""The layout of a step: samples, groups of parts, schedule and program.  Pure functions; driver and ranks get the same result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.costs import TOKEN, Spec
from workbench.core.packing import pack_length, packs_of
from workbench.core.plan import Plan
from workbench.core.profile import LayerProfile, Profile
from workbench.core.program import Program
from workbench.core.schedule import SEND, STEP, Op, Schedule, Value
from workbench.methods.common.scaling import layers_seconds
from workbench.planners.adaptive import Setting
from workbench.planners.query_costs import Passing
from workbench.schedules import insert_transfers, query_groups, query_step
from workbench.schedules.plan_costs import Crossing
from workbench.schedules.queries import Group
from workbench.tasks.prompts import EncodedPrompts, step_indices
from workbench.tasks.tokenize import padded_length


class Change(NamedTuple):
    """From `step` on these settings apply; `samples` were processed before it."""

    step: int
    samples: int
    setting: Setting

    def samples_before(self, step: int) -> int:
        """Return the number of samples processed before a step from `step` on."""
        return self.samples + (step - self.step) * self.setting.batch_size


def samples_of(num_samples: int, seed: int, change: Change, step: int) -> list[int]:
    """Return a step's samples: the next E of consecutive seeded permutations, whatever E was before."""
    first = change.samples_before(step)
    return [step_indices(num_samples, 1, seed, at)[0] for at in range(first, first + change.setting.batch_size)]


class Shape(NamedTuple):
    """The shape of a step's computation: one part's hidden states have `rows` rows of `tokens` tokens.

    That is E rows of the padded length, or packs without the padding.  target_length: tokens that a decoder reads.
    """

    setting: Setting
    rows: int
    tokens: int
    target_length: int = 0

    @property
    def length(self) -> int:
        """Return the mean number of tokens computed for a sample, rounded up."""
        return -(-self.rows * self.tokens // self.setting.batch_size)


def shape_of(train: EncodedPrompts, seed: int, change: Change, step: int, *, width: int) -> Shape:
    """Return the shape of a step's batch.  width: see packs_of."""
    rows = [train.rows[index] for index in samples_of(len(train), seed, change, step)]
    lengths = [len(row.ids) for row in rows]
    padded = padded_length(lengths)
    packs = packs_of(lengths, padded, width)
    size = (len(rows), padded) if packs is None else (len(packs), pack_length(packs, lengths))
    return Shape(change.setting, *size, target_length=max(len(row.decoder_ids) for row in rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryStep:
    """A step under a plan.  groups: of parts, computed one after the other on each device.  passings: by rank."""

    plan: Plan
    passings: Mapping[int, Passing]
    groups: tuple[Group, ...]
    schedule: Schedule

    @classmethod
    def build(cls, plan: Plan, passings: Mapping[int, Passing], world_size: int) -> QueryStep:
        """Return the step with its transfers; ranks that the plan leaves idle do nothing."""
        groups: list[Group] = []
        first = 0
        for share in plan.stages[-1].shares:
            groups += query_groups(first, share.queries, passings[share.rank].queries)
            first += share.queries
        schedule = insert_transfers(query_step(plan.stages, groups, world_size=world_size))
        return cls(plan=plan, passings=passings, groups=tuple(groups), schedule=schedule)

    def queries(self, part: int) -> range:
        """Return the queries of the group whose first part is `part`."""
        group = next(group for group in self.groups if group[0] == part)
        return range(group[0] // 2, group[-1] // 2 + 1)

    def program(self, profile: Profile, cluster: Cluster, shape: Shape, crossing: Crossing) -> Program:
        """Return the step's program.  crossing: the hidden states sent from stage to stage."""
        layers = {rank: profile.layers[rank][stage.start : stage.stop] for stage in self.plan.stages for rank in stage.ranks}
        sized = replace(crossing, target_length=shape.target_length)
        return Program.on(cluster, self.schedule, QueryCosts(cluster=cluster, step=self, shape=shape, crossing=sized, layers=layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryCosts:
    """Costs of one step: a core.costs.Costs.  layers: of each rank that has some."""

    cluster: Cluster
    step: QueryStep
    shape: Shape
    crossing: Crossing
    layers: Mapping[int, tuple[LayerProfile, ...]]

    def seconds(self, rank: int, op: Op) -> float:
        """Return the seconds of an operation (see Costs)."""
        if op.kind == SEND:
            return self.cluster.link(*op.ranks).transfer_s(self.spec(op.reads[0]).nbytes)
        layers, shape = self.layers[rank], self.shape
        if op.kind == STEP:
            return layers_seconds(layers, STEP, shape.setting.queries, 1)
        queries = len(self.step.queries(op.part))
        count, parts = self.step.passings[rank].passes(queries)
        rows = parts * shape.setting.batch_size
        return count * layers_seconds(layers, "F", rows, shape.length) + layers_seconds(layers, STEP, queries, 1)

    def spec(self, value: Value) -> Spec:
        """Return a value's shape and dtype (see Costs): a flag that requests a pause is sent with the losses."""
        if value.name not in ("loss", "act"):
            return TOKEN
        parts = 2 * len(self.step.queries(value.part))
        if value.name == "loss":
            return Spec((parts + 1,))
        tokens = self.crossing.tokens(self.step.plan.stages[value.stage].stop, self.shape.tokens)
        return Spec((parts * self.shape.rows, tokens, self.crossing.hidden_size), self.crossing.dtype)

    def resident_bytes(self, rank: int) -> int:
        """Return the bytes that a device keeps: frozen weights, trained values and one query's noise."""
        return sum(layer.frozen_bytes + 2 * layer.trainable_bytes for layer in self.layers.get(rank, ()))
