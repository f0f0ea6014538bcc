"""What a step is to every device: which samples, which groups of parts, which schedule.  Pure, so that each works it out by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from workbench.core.packing import pack_length, packs_of
from workbench.core.plan import Plan
from workbench.core.schedule import Schedule
from workbench.methods.p_rge.prepare import PAD_TO_MULTIPLE
from workbench.planners.adaptive import Setting
from workbench.planners.query_costs import Passing
from workbench.schedules import insert_transfers, query_groups, staged_query_step
from workbench.schedules.queries import Group
from workbench.tasks.prompts import EncodedPrompts, step_indices
from workbench.tasks.tokenize import padded_length


class Change(NamedTuple):
    """From `step` on the settings are these; `samples` were seen before it."""

    step: int
    samples: int
    setting: Setting

    def samples_before(self, step: int) -> int:
        """Return how many samples were seen before a step from `step` on."""
        return self.samples + (step - self.step) * self.setting.batch_size


def samples_of(num_samples: int, seed: int, change: Change, step: int) -> list[int]:
    """Return a step's samples: the next E of seeded permutations laid end to end, whatever E was before."""
    first = change.samples_before(step)
    return [step_indices(num_samples, 1, seed, at)[0] for at in range(first, first + change.setting.batch_size)]


class Shape(NamedTuple):
    """What is computed in a step: one part's hidden states have `rows` rows of `tokens` tokens.

    That is E rows of the padded length, or packs without the padding.  target_length: tokens that a decoder reads.
    """

    setting: Setting
    rows: int
    tokens: int
    target_length: int = 0

    @property
    def length(self) -> int:
        """Return for how many tokens a sample is computed, on average and rounded up."""
        return -(-self.rows * self.tokens // self.setting.batch_size)


def shape_of(train: EncodedPrompts, seed: int, change: Change, step: int, *, width: int) -> Shape:
    """Return the shape of a step's batch.  width: see packs_of."""
    rows = [train.rows[index] for index in samples_of(len(train), seed, change, step)]
    lengths = [len(row.ids) for row in rows]
    padded = padded_length(lengths, PAD_TO_MULTIPLE)
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
        """Return the step, its transfers inserted; ranks that the plan leaves idle have nothing to do."""
        groups: list[Group] = []
        first = 0
        for share in plan.stages[-1].shares:
            groups += query_groups(first, share.queries, passings[share.rank].queries)
            first += share.queries
        schedule = insert_transfers(staged_query_step(plan.stages, groups, world_size=world_size))
        return cls(plan=plan, passings=passings, groups=tuple(groups), schedule=schedule)

    def queries(self, part: int) -> range:
        """Return the queries of the group whose first part is `part`."""
        group = next(group for group in self.groups if group[0] == part)
        return range(group[0] // 2, group[-1] // 2 + 1)
