"""The published schedules by name, each built from a few integers: to print, simulate and draw without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from workbench.core.errors import ScheduleError, did_you_mean
from workbench.core.inference import proportional_parts
from workbench.core.plan import Plan, Share, Stage
from workbench.core.schedule import Schedule
from workbench.core.virtual_workers import VirtualWorkers
from workbench.schedules.hetpipe import asynchronous_1f1b, hetpipe
from workbench.schedules.lowering import insert_transfers
from workbench.schedules.pipeline import cached_step, gpipe, hybrid_1f1b, one_f_one_b
from workbench.schedules.queries import query_groups, query_step
from workbench.schedules.ringada import Iteration, ring_round
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A schedule described in a paper.  sizes: the integers that it is built from, each with its default."""

    paper: str
    sizes: Sizes
    build: Callable[[Sizes], Schedule]


def build_published(name: str, given: Sizes) -> Schedule:
    """Return a schedule by its name in PUBLISHED, complete with its transfers.  given: sizes that differ from the defaults.

    Raises ScheduleError for an unknown name or size, and for a size out of range.
    """
    if name not in PUBLISHED:
        asked, found = f"The schedule '{name}' was asked for.", f"There are {', '.join(PUBLISHED)}."
        raise ScheduleError(asked, found, did_you_mean(name, PUBLISHED, "Choose one of them, or name a file."))
    published = PUBLISHED[name]
    for key, value in given.items():
        asked = f"The schedule '{name}' with {key} = {value!r} was asked for."
        if key not in published.sizes:
            raise ScheduleError(asked, f"It has {', '.join(published.sizes)}.", did_you_mean(key, published.sizes))
        least = 0 if key in MAY_BE_0 else 1
        if type(value) is not int or not least <= value <= MOST:
            raise ScheduleError(asked, f"{key} is a whole number from {least} to {MOST}.", "Give it such a number.")
    sizes = {**published.sizes, **given}
    cells = sizes.get("ranks", 1) * sizes.get("micro_batches", 1)
    if cells > MOST_CELLS:
        asked = f"The schedule '{name}' of {cells:,} micro-batches on all ranks was asked for."
        raise ScheduleError(asked, f"At most {MOST_CELLS:,} are built.", "Lower ranks or micro_batches.")
    return insert_transfers(published.build(sizes))


def _pipeline(num_stages: int, *, first_rank: int = 0, group: int = 1, micro_batch_size: int = 1) -> Plan:
    """Return a plan with one layer per stage, and one sample of a micro-batch on each of a stage's ranks."""
    stages = tuple(
        Stage(
            start=number,
            stop=number + 1,
            shares=tuple(Share(rank=first_rank + number * group + place, samples=micro_batch_size // group) for place in range(group)),
        )
        for number in range(num_stages)
    )
    return Plan(method="", stages=stages, micro_batch_size=micro_batch_size, num_micro_batches=1)


def _groups(sizes: Sizes, into: str) -> int:
    """Return the number of equal groups of `into` ranks."""
    ranks, size = sizes["ranks"], sizes[into]
    if ranks % size:
        asked = f"{ranks} ranks in groups of {size} were asked for."
        raise ScheduleError(asked, f"{ranks % size} are left over.", f"Choose ranks as a multiple of {into}.")
    return ranks // size


def _hybrid(sizes: Sizes) -> Schedule:
    group = sizes["ranks_per_stage"]
    plan = _pipeline(_groups(sizes, "ranks_per_stage"), group=group, micro_batch_size=group)
    return hybrid_1f1b(plan, (group,) * sizes["micro_batches"])


def _hetpipe(sizes: Sizes) -> Schedule:
    count = _groups(sizes, "ranks_per_worker")
    pipelines = tuple(_pipeline(sizes["ranks_per_worker"], first_rank=worker * sizes["ranks_per_worker"]) for worker in range(count))
    workers = VirtualWorkers(pipelines=pipelines, in_flight=sizes["in_flight"])
    return hetpipe(workers, sizes["waves"])


def _ring(sizes: Sizes) -> Schedule:
    if sizes["initiators"] > sizes["ranks"]:
        asked = f"{sizes['initiators']} initiators were asked for."
        raise ScheduleError(asked, f"The ring has {sizes['ranks']} ranks.", "Lower initiators, or raise ranks.")
    if sizes["unfrozen_layers"] > sizes["ranks"]:
        asked = f"An unfreezing depth of {sizes['unfrozen_layers']} was asked for."
        raise ScheduleError(asked, f"The ring has {sizes['ranks']} layers, one a rank.", "Unfreeze 1 to all of them.")
    turns = [rank for rank in range(sizes["initiators"]) for _ in range(sizes["micro_batches"])]
    mini_batches = [Iteration(rank, sizes["ranks"] - sizes["unfrozen_layers"], 1) for rank in turns]
    return ring_round(_pipeline(sizes["ranks"]), mini_batches, lambda rank, op: SECONDS.get(op.kind, 0.0), in_flight=len(mini_batches))


def _query_chain(sizes: Sizes) -> Schedule:
    queries = sizes["queries"]
    stages = tuple(Stage(start=number, stop=number + 1, shares=(Share(rank=number, queries=queries),)) for number in range(sizes["ranks"]))
    return query_step(stages, query_groups(0, queries, sizes["queries_per_group"]))


def _queries(sizes: Sizes) -> Schedule:
    counts = proportional_parts(sizes["queries"], (1,) * sizes["ranks"])
    shares = tuple(Share(rank=rank, queries=count) for rank, count in enumerate(counts) if count)
    return query_step((Stage(start=0, stop=1, shares=shares),), [(part,) for part in range(2 * sizes["queries"])])


def _cached(sizes: Sizes) -> Schedule:
    shares = tuple(Share(rank=rank, samples=1) for rank in range(sizes["ranks"]))
    return cached_step(Stage(start=0, stop=1, shares=shares), (1,) * sizes["ranks"])


PUBLISHED: Mapping[str, Published] = {
    "gpipe": Published(
        paper="GPipe (Huang et al., 2019)",
        sizes={"ranks": 4, "micro_batches": 8},
        build=lambda sizes: gpipe(_pipeline(sizes["ranks"]), (1,) * sizes["micro_batches"]),
    ),
    "1f1b": Published(
        paper="PipeDream-flush (Narayanan et al., 2021)",
        sizes={"ranks": 4, "micro_batches": 8},
        build=lambda sizes: one_f_one_b(_pipeline(sizes["ranks"]), (1,) * sizes["micro_batches"]),
    ),
    "hybrid_1f1b": Published(
        paper="PAC+, first epoch: 1F1B of device groups, with a side network (section V-A)",
        sizes={"ranks": 4, "micro_batches": 8, "ranks_per_stage": 1},
        build=_hybrid,
    ),
    "cached_step": Published(
        paper="PAC+, later epochs: data parallel from the activation cache (section V-B)", sizes={"ranks": 4}, build=_cached
    ),
    "asynchronous_1f1b": Published(
        paper="Confidant, PipeDream: 1F1B with weight stashing, without a flush (section 2.3)",
        sizes={"ranks": 4, "micro_batches": 8},
        build=lambda sizes: asynchronous_1f1b(_pipeline(sizes["ranks"]), sizes["micro_batches"]),
    ),
    "split_heads": Published(
        paper="Confidant: attention heads on the processors of one device (section 3.3)",
        sizes={"processors": 2, "heads": 12, "layers": 2},
        build=lambda sizes: split_heads(proportional_parts(sizes["heads"], (1,) * sizes["processors"]), num_layers=sizes["layers"]),
    ),
    "ring": Published(
        paper="RingAda: adapters on a ring, the upper layers unfrozen (sections III and IV)",
        sizes={"ranks": 4, "micro_batches": 4, "unfrozen_layers": 2, "initiators": 1},
        build=_ring,
    ),
    "hetpipe": Published(
        paper="HetPipe: virtual workers and a parameter server (Park et al., 2020)",
        sizes={"ranks": 4, "ranks_per_worker": 2, "in_flight": 2, "waves": 3},
        build=_hetpipe,
    ),
    "query_step": Published(
        paper="P-RGE: a step's queries divided among the devices (Algorithm 1)", sizes={"ranks": 4, "queries": 8}, build=_queries
    ),
    "query_chain": Published(
        paper="P-RGE: a step's queries one after the other through a chain of stages",
        sizes={"ranks": 4, "queries": 8, "queries_per_group": 1},
        build=_query_chain,
    ),
    "ring_allgather_gemm": Published(
        paper="Galaxy+: AllGather in tiles, overlapped with GEMM1 (Fig. 9)",
        sizes={"ranks": 4, "overlapped": 1},
        build=lambda sizes: ring_allgather_gemm(sizes["ranks"], overlapped=bool(sizes["overlapped"])),
    ),
    "ring_gemm_reducescatter": Published(
        paper="Galaxy+: GEMM2 in tiles, overlapped with ReduceScatter (Fig. 10)",
        sizes={"ranks": 4, "overlapped": 1},
        build=lambda sizes: ring_gemm_reducescatter(sizes["ranks"], overlapped=bool(sizes["overlapped"])),
    ),
}
