"""The published schedules by name, each built from a few integers: to print, simulate and draw without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from inspect import signature
from typing import NamedTuple

from workbench.core.errors import ConfigError, ScheduleError, did_you_mean
from workbench.core.methods import attribute, declaration_of, registered
from workbench.core.plan import Plan, Share, Stage
from workbench.core.proportions import proportional_parts
from workbench.core.schedule import Schedule
from workbench.core.virtual_workers import VirtualWorkers
from workbench.schedules.hetpipe import asynchronous_1f1b, hetpipe
from workbench.schedules.lowering import insert_transfers
from workbench.schedules.pipeline import backpropagation, cached_step, gpipe_order, hybrid_1f1b
from workbench.schedules.tensor import ring_allgather_gemm, ring_gemm_reducescatter, split_heads

Sizes = Mapping[str, int]

MOST, MOST_CELLS = 4096, 200_000
"""The maximum of an option, and of ranks times micro_batches."""

MAY_BE_0 = ("overlapped",)

SECONDS: Mapping[str, float] = {
    "F": 1.0, "P": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "SF": 0.25, "SB": 0.25, "LOAD": 0.1, "GEMM": 1.0,
    "ATTN": 0.35, "MLP": 0.65, "ATTNB": 0.7, "MLPB": 1.3,
}  # fmt: skip
"""Default times of operations: a backward pass two forward passes, a side network a quarter, others nothing."""


class Published(NamedTuple):
    """A schedule described in a paper.  build: takes integers by name, each with its default."""

    paper: str
    build: Callable[..., Schedule]

    @property
    def sizes(self) -> Sizes:
        """Return the integers that it is built from, with their defaults."""
        return {name: parameter.default for name, parameter in signature(self.build).parameters.items()}


def published_schedules() -> Mapping[str, Published]:
    """Return the shared schedules and those that installed methods declare, by name.  A package that cannot be imported
    adds none: whoever asks for its method reads why.
    """
    schedules = dict(SHARED)
    for method in registered():
        with suppress(ConfigError):
            if table := declaration_of(method).schedules:
                schedules |= {name: entry for name, entry in attribute(table).items() if name not in schedules}
    return schedules


def build_published(name: str, given: Sizes) -> Schedule:
    """Return a published schedule by its name, complete with its transfers.  given: sizes that differ from the
    defaults.

    Raises ScheduleError for an unknown name or size, and for a size out of range.
    """
    schedules = published_schedules()
    if name not in schedules:
        request, problem = f"The schedule '{name}' was asked for.", f"There are {', '.join(schedules)}."
        raise ScheduleError(request, problem, did_you_mean(name, schedules, "Choose one of them, or name a file."))
    published = schedules[name]
    for key, value in given.items():
        request = f"The schedule '{name}' with {key} = {value!r} was asked for."
        if key not in published.sizes:
            raise ScheduleError(request, f"It has {', '.join(published.sizes)}.", did_you_mean(key, published.sizes))
        least = 0 if key in MAY_BE_0 else 1
        if type(value) is not int or not least <= value <= MOST:
            raise ScheduleError(request, f"{key} is a whole number from {least} to {MOST}.", "Give it such a number.")
    sizes = {**published.sizes, **given}
    cells = sizes.get("ranks", 1) * sizes.get("micro_batches", 1)
    if cells > MOST_CELLS:
        request = f"The schedule '{name}' of {cells:,} micro-batches on all ranks was asked for."
        raise ScheduleError(request, f"At most {MOST_CELLS:,} are built.", "Lower ranks or micro_batches.")
    return insert_transfers(published.build(**sizes))


def equal_pipeline(num_stages: int, *, first_rank: int = 0, group: int = 1, micro_batch_size: int = 1) -> Plan:
    """Return a plan with one layer per stage, and one sample of a micro-batch on each of a stage's ranks."""
    stages = tuple(
        Stage(
            start=number,
            stop=number + 1,
            shares=tuple(
                Share(rank=first_rank + number * group + place, samples=micro_batch_size // group)
                for place in range(group)
            ),
        )
        for number in range(num_stages)
    )
    return Plan(method="", stages=stages, micro_batch_size=micro_batch_size, num_micro_batches=1)


def _num_groups(ranks: int, into: str, size: int) -> int:
    """Return the number of equal groups of `size` ranks."""
    if ranks % size:
        request = f"{ranks} ranks in groups of {size} were asked for."
        raise ScheduleError(request, f"{ranks % size} are left over.", f"Choose ranks as a multiple of {into}.")
    return ranks // size


def _hybrid(ranks: int = 4, micro_batches: int = 8, ranks_per_stage: int = 1) -> Schedule:
    plan = equal_pipeline(
        _num_groups(ranks, "ranks_per_stage", ranks_per_stage), group=ranks_per_stage, micro_batch_size=ranks_per_stage
    )
    return hybrid_1f1b(plan, (ranks_per_stage,) * micro_batches)


def _hetpipe(ranks: int = 4, ranks_per_worker: int = 2, in_flight: int = 2, waves: int = 3) -> Schedule:
    count = _num_groups(ranks, "ranks_per_worker", ranks_per_worker)
    pipelines = tuple(equal_pipeline(ranks_per_worker, first_rank=worker * ranks_per_worker) for worker in range(count))
    return hetpipe(VirtualWorkers(pipelines=pipelines, in_flight=in_flight), waves)


def _cached(ranks: int = 4) -> Schedule:
    shares = tuple(Share(rank=rank, samples=1) for rank in range(ranks))
    return cached_step(Stage(start=0, stop=1, shares=shares), (1,) * ranks)


SHARED: Mapping[str, Published] = {
    "gpipe": Published(
        "GPipe (Huang et al., 2019)",
        lambda ranks=4, micro_batches=8: backpropagation(
            equal_pipeline(ranks), (1,) * micro_batches, order=gpipe_order
        ),
    ),
    "1f1b": Published(
        "PipeDream-flush (Narayanan et al., 2021)",
        lambda ranks=4, micro_batches=8: backpropagation(equal_pipeline(ranks), (1,) * micro_batches),
    ),
    "hybrid_1f1b": Published("PAC+, first epoch: 1F1B of device groups, with a side network (section V-A)", _hybrid),
    "cached_step": Published("PAC+, later epochs: data parallel from the activation cache (section V-B)", _cached),
    "asynchronous_1f1b": Published(
        "Confidant, PipeDream: 1F1B with weight stashing, without a flush (section 2.3)",
        lambda ranks=4, micro_batches=8: asynchronous_1f1b(equal_pipeline(ranks), micro_batches),
    ),
    "split_heads": Published(
        "Confidant: attention heads on the processors of one device (section 3.3)",
        lambda processors=2, heads=12, layers=2: split_heads(
            proportional_parts(heads, (1,) * processors), num_layers=layers
        ),
    ),
    "hetpipe": Published("HetPipe: virtual workers and a parameter server (Park et al., 2020)", _hetpipe),
    "ring_allgather_gemm": Published(
        "Galaxy+: AllGather in tiles, overlapped with GEMM1 (Fig. 9)",
        lambda ranks=4, overlapped=1: ring_allgather_gemm(ranks, overlapped=bool(overlapped)),
    ),
    "ring_gemm_reducescatter": Published(
        "Galaxy+: GEMM2 in tiles, overlapped with ReduceScatter (Fig. 10)",
        lambda ranks=4, overlapped=1: ring_gemm_reducescatter(ranks, overlapped=bool(overlapped)),
    ),
}
"""The published schedules that several methods use; a method declares all others."""
