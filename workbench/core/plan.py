"""A plan assigns layers, samples, heads, columns, tokens or queries to devices.  So it decides which ranks have each
tensor.

Weights, optimizer moments, heads and cached activations are named by layer, not by stage, so a name means the same
under every plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Final, Literal, TypeVar

from msgspec import Meta

from workbench.core.errors import ConfigError, StateError
from workbench.core.inference import InferencePlan
from workbench.core.proportions import proportional_ranges
from workbench.core.ranges import Count, require_ranges
from workbench.core.serial import listed
from workbench.core.units import counted

T = TypeVar("T")
Part = Annotated[int, Meta(ge=0, le=10**9)]
"""How much of something divided a rank has."""
KEEP: Final = "memory"
RECOMPUTE: Final = "recompute"
DISK: Final = "disk"
Activations = Literal["memory", "recompute", "disk"]
"""What happens to a stage's activations between its forward and its backward pass: they stay in memory, or only each
layer's input does, and the backward pass computes the rest again or reads it from the device's disk
(schedules.recomputation)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of a stage; quantities that a method does not divide are 0."""

    rank: Annotated[int, Meta(ge=0)]
    samples: Part = 0
    heads: Part = 0
    columns: Part = 0
    tokens: Part = 0
    queries: Part = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive layers [start, stop) on a group of ranks (PAC+, section V-A)."""

    start: int
    stop: int
    shares: tuple[Share, ...]
    activations: Activations = "memory"

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ConfigError(
                f"A stage of layers [{self.start}, {self.stop}) was asked for.", "It is empty.", "Give it a layer."
            )
        if not self.shares:
            raise ConfigError(
                f"The stage of layers [{self.start}, {self.stop}) was asked for.", "No device holds it.", "Add a share."
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the group's ranks in order."""
        return tuple(share.rank for share in self.shares)

    @property
    def num_layers(self) -> int:
        """Return the number of layers."""
        return self.stop - self.start

    @property
    def layers_in_words(self) -> str:
        """Return the stage's layers (see named_layers)."""
        return named_layers(self.start, self.stop)

    def split(self, samples: int) -> tuple[tuple[int, int], ...]:
        """Divide `samples` among the shares in proportion: (first, end) for each, by largest remainder.

        If `samples` equals the sum of the shares, each rank gets exactly its share.
        """
        return proportional_ranges(samples, tuple(share.samples for share in self.shares))


def named_layers(start: int, stop: int) -> str:
    """Name layers [start, stop), first to last: 'layer 5' or 'layers 0-4'."""
    return f"layer {start}" if stop == start + 1 else f"layers {start}-{stop - 1}"


def one_device_stages(order: Iterable[int], cuts: Sequence[int], samples: int) -> tuple[Stage, ...]:
    """Return the stages [cuts[i], cuts[i + 1]), each on one device with all `samples`.  order: the devices' ranks."""
    blocks = zip(order, pairwise(cuts), strict=True)
    return tuple(
        Stage(start=start, stop=stop, shares=(Share(rank=rank, samples=samples),)) for rank, (start, stop) in blocks
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The stages in order, and the division of a mini-batch.

    predicted_s: named parts of the predicted mini-batch time (PAC+ Eq. 5-6: beginning, execution, ending).
    cached: the shares of the data-parallel epochs that run from the activation cache, if any.
    inference: the split of single sequences inside the layers, for inference methods; `stages` then gives the weights
    of each device.
    later: steps of the run, counted from 0, each with the stages that apply from that step on; `stages` applies before
    the first.
    in_flight: the number of mini-batches that may be computed at the same time; 0: the plan does not limit it.
    """

    method: str
    stages: tuple[Stage, ...]
    micro_batch_size: Count
    num_micro_batches: Count
    predicted_s: dict[str, Annotated[float, Meta(ge=0)]] = field(default_factory=dict)
    cached: Stage | None = None
    inference: InferencePlan | None = None
    notes: tuple[str, ...] = ()
    later: tuple[tuple[int, tuple[Stage, ...]], ...] = ()
    in_flight: Part = 0

    def __post_init__(self) -> None:
        require_ranges(self, "A plan")
        if not self.stages:
            raise ConfigError("A plan without stages was asked for.", "No device has a layer.", "Add a stage.")
        for _, stages in self.assignments:
            next_layer = 0
            for stage in stages:
                if stage.start != next_layer:
                    request = f"A stage that begins at layer {stage.start} was asked for."
                    raise ConfigError(request, f"Layer {next_layer} comes next.", "Close the gap.")
                next_layer = stage.stop
            if next_layer != self.num_layers:
                raise ConfigError(
                    f"Later stages of {next_layer} layers were asked for.",
                    f"The first have {self.num_layers}.",
                    "Cut all layers.",
                )
        begins = [first for first, _ in self.assignments]
        if any(second <= first for first, second in pairwise(begins)):
            request = f"Other stages from the steps {', '.join(map(str, begins[1:]))} on were asked for."
            raise ConfigError(request, "Each must follow the one before; the first step is 0.", "Put them in order.")

    @property
    def assignments(self) -> tuple[tuple[int, tuple[Stage, ...]], ...]:
        """Return pairs (step, stages): the stages that apply from each step on."""
        return ((0, self.stages), *self.later)

    @property
    def recomputes(self) -> bool:
        """Return whether a stage recomputes its activations."""
        return any(stage.activations == RECOMPUTE for _, stages in self.assignments for stage in stages)

    def at(self, step: int) -> Plan:
        """Return the plan that applies at one step of the run."""
        return replace(self, stages=[stages for first, stages in self.assignments if first <= step][-1], later=())

    @property
    def cut(self) -> str:
        """Describe how samples are divided."""
        if queries := sum(share.queries for share in self.stages[0].shares):
            return f"{queries} queries of {self.micro_batch_size} samples"
        at_once = f", {self.in_flight} mini-batches in flight" if self.in_flight else ""
        count = self.num_micro_batches
        return f"{count} micro-batch{'es' * (count > 1)} of {self.micro_batch_size}{at_once}"

    @property
    def num_layers(self) -> int:
        """Return the number of layers that the stages cover."""
        return self.stages[-1].stop

    @property
    def mini_batch_size(self) -> int:
        """Return the samples of one optimizer step."""
        return self.micro_batch_size * self.num_micro_batches

    @property
    def total_s(self) -> float:
        """Return the predicted seconds of a mini-batch, by the planner's cost model."""
        return sum(self.predicted_s.values())

    @property
    def busy_ranks(self) -> frozenset[int]:
        """Return the ranks that belong to a stage."""
        return frozenset(rank for stage in self.stages for rank in stage.ranks)

    def idle_note(self, names: Sequence[str]) -> str:
        """Return a sentence that names the devices without a part in any step, '' if all have one.

        names: the devices' names by rank.
        """
        stages = [stage for _, assigned in self.assignments for stage in assigned] + (
            [self.cached] if self.cached else []
        )
        busy = {rank for stage in stages for rank in stage.ranks}
        used, idle = ([name for rank, name in enumerate(names) if (rank in busy) is used] for used in (True, False))
        if not idle:
            return ""
        if len(idle) <= len(used):
            return f"Not used by this plan: {', '.join(idle)}."
        return f"{len(idle)} of {len(names)} devices are not used by this plan: all but {', '.join(used)}."

    def stage_of(self, rank: int) -> int | None:
        """Return the index of the rank's stage, None if the plan does not use the device."""
        for index, stage in enumerate(self.stages):
            if rank in stage.ranks:
                return index
        return None

    def renumbered(self, ranks: Mapping[int, int]) -> Plan:
        """Return the plan on other devices.  ranks: the new rank of each device that has a share."""

        def on(stage: Stage) -> Stage:
            return replace(stage, shares=tuple(replace(share, rank=ranks[share.rank]) for share in stage.shares))

        later = tuple((step, tuple(map(on, stages))) for step, stages in self.later)
        return replace(
            self, stages=tuple(map(on, self.stages)), cached=on(self.cached) if self.cached else None, later=later
        )

    def grouping(self) -> str:
        """Return the group sizes in the paper's notation: [2-1-1] (PAC+ Fig. 17)."""
        return "[" + "-".join(str(len(stage.shares)) for stage in self.stages) + "]"

    def where(self) -> str:
        """Describe the layers and devices of each stage: 'layers [3, 3] on 2 and 1 devices'."""
        sizes = [str(len(stage.shares)) for stage in self.stages]
        *first, last = sizes
        alike = len(set(sizes)) == 1
        counts = last if alike else f"{', '.join(first)} and {last}"
        later = "".join(f", from step {step + 1} on {self.at(step).partition()}" for step, _ in self.later)
        return (
            f"layers {self.partition()} on {counts} "
            f"device{'s' * (set(sizes) != {'1'})}{' each' * (alike and bool(first))}{later}"
        )

    def described(self, names: Sequence[str]) -> str:
        """Describe the work of each device.  names: the devices' names by rank."""

        def shares(stage: Stage) -> str:
            counts = [
                f"{share.queries} {'query' if share.queries == 1 else 'queries'}"
                if share.queries
                else counted(share.samples, "sample")
                for share in stage.shares
            ]
            return " and ".join(
                f"{names[share.rank]} ({count})" for share, count in zip(stage.shares, counts, strict=True)
            )

        again = {RECOMPUTE: ", activations recomputed", DISK: ", activations on the disk"}
        parts = [
            f"{stage.layers_in_words} on {shares(stage)}{again.get(stage.activations, '')}" for stage in self.stages
        ]
        return "; ".join([*parts, *([f"cached epochs on {shares(self.cached)}"] if self.cached else [])])

    def partition(self) -> str:
        """Return the number of layers of each stage: [3, 3]."""
        return "[" + ", ".join(str(stage.num_layers) for stage in self.stages) + "]"


Homes = Mapping[str, Sequence[int]]
"""For each tensor name: the ranks that have the tensor."""

_SHOWN_NAMES = 4


def homes_of(plan: Plan, layers: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return the ranks whose stages need each tensor.

    layers: the layers that use a tensor.  A shared tensor has several.  A tensor that every rank needs, such as a step
    count, has none.
    """
    everyone = tuple(sorted({rank for stage in plan.stages for rank in stage.ranks}))
    ranks_of = [stage.ranks for stage in plan.stages for _ in range(stage.num_layers)]
    return {
        name: tuple(sorted({rank for layer in tensor_layers for rank in ranks_of[layer]}))
        if tensor_layers
        else everyone
        for name, tensor_layers in layers.items()
    }


def with_neighbours(homes: Homes, ranks: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the homes, with a second home on the next of `ranks` for each tensor that has only one."""
    following = dict(zip(ranks, (*ranks[1:], *ranks[:1]), strict=True))
    return {
        name: tuple(dict.fromkeys((ranks_of[0], following[ranks_of[0]]))) if len(ranks_of) == 1 else tuple(ranks_of)
        for name, ranks_of in homes.items()
    }


def held_by(names_of: Mapping[int, Iterable[str]]) -> dict[str, tuple[int, ...]]:
    """Return the ranks that hold each tensor.  names_of: the tensors on each rank."""
    ranks_by_name: dict[str, list[int]] = {}
    for rank in sorted(names_of):
        for name in names_of[rank]:
            ranks_by_name.setdefault(name, []).append(rank)
    return {name: tuple(ranks) for name, ranks in ranks_by_name.items()}


def whole_states(states: Mapping[T, Homes], names: Iterable[str]) -> dict[T, Homes]:
    """Return the states of which every tensor is on some rank.

    states: for each state, the ranks that have each tensor.
    """
    name_tuple = tuple(names)
    return {state: homes for state, homes in states.items() if all(homes.get(name) for name in name_tuple)}


def require_holders(homes: Homes, names: Iterable[str]) -> None:
    """Raise StateError naming the tensors that are on no rank."""
    lost = [name for name in names if not homes.get(name)]
    if lost:
        raise StateError(
            "A state was to be moved to other devices.",
            f"No device holds {listed(lost, _SHOWN_NAMES)}.",
            "Resume from the last snapshot.",
        )
