"""The job of a rank in a PAC+ run, its programs, and its two phases: the pipeline that fills the cache, and the cached
epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from operator import attrgetter
from pathlib import Path

from torch import Tensor

from workbench.core.cluster import Cluster
from workbench.core.costs import Spec, TableCosts, opaque
from workbench.core.once import once, once_for
from workbench.core.plan import Plan, Stage, homes_of
from workbench.core.profile import Bytes, LayerProfile, Profile, trainable_bytes
from workbench.core.program import Program
from workbench.core.run_files import INITIAL
from workbench.core.schedule import RECV, SEND, STEP, Op, Schedule, Value
from workbench.core.serial import to_json
from workbench.methods.pac_plus.prepare import PreparedJob, StageTaps, crossing_of, rank_taps, record_layout, whole_taps
from workbench.methods.training.handlers import PlannedStep, StepShape, cut_mini_batch
from workbench.methods.training.phases import Phase, RankJob
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.parallel_adapter import ParallelAdapterStage
from workbench.runtime.activation_cache import ActivationCache, CacheManifest
from workbench.runtime.flat_optimizer import STATE_KINDS
from workbench.runtime.state import spec_of
from workbench.schedules.costs import plan_costs
from workbench.schedules.least import HYBRID, least_s
from workbench.schedules.lowering import insert_transfers
from workbench.schedules.moves import Move, moves
from workbench.schedules.pipeline import ORDERS, cached_step, hybrid_1f1b
from workbench.tasks.batching import assign_shards, cached_epoch_batches


def taped_samples(plan: Plan, rank: int, steps: Sequence[PlannedStep]) -> tuple[int, ...]:
    """Return the samples whose activations the rank computes in the first epoch, in that order."""
    index = plan.stage_of(rank)
    if index is None:
        return ()
    stage = plan.stages[index]
    position = stage.ranks.index(rank)
    return tuple(
        sample
        for step in steps
        for micro in step.samples
        for sample in micro[slice(*stage.split(len(micro))[position])]
    )


def shard_weights(stage: Stage, world_size: int) -> tuple[int, ...]:
    """Return each rank's samples of a whole mini-batch, 0 for an idle rank."""
    weights = [0] * world_size
    for share in stage.shares:
        weights[share.rank] = share.samples
    return tuple(weights)


@once
def shard_owners(stage: Stage, lengths: Sequence[int], world_size: int, seed: int) -> tuple[int, ...]:
    """Return the rank that keeps each sample's activations."""
    return tuple(assign_shards(lengths, shard_weights(stage, world_size), seed))


@once
def cached_steps(
    stage: Stage, owners: Sequence[int], lengths: Sequence[int], world_size: int, *, seed: int, epoch: int
) -> tuple[PlannedStep, ...]:
    """Return the steps of an epoch from the cache; part r of a mini-batch is rank r's."""
    batches = cached_epoch_batches(owners, lengths, shard_weights(stage, world_size), seed, epoch)
    return tuple(PlannedStep.of(per_rank, lengths) for per_rank in batches)


@cache
def adapter_state(config: ParallelAdapterConfig) -> tuple[dict[str, Spec], dict[str, tuple[int, ...]]]:
    """Return the whole adapter's parameters and moments by name, and the layer of each."""
    specs: dict[str, Spec] = {}
    layers: dict[str, tuple[int, ...]] = {}
    for layer in range(config.num_layers):
        for name, parameter in ParallelAdapterStage(config, layer, layer + 1).named_parameters():
            for kind in STATE_KINDS:
                specs[f"{kind}/{name}"], layers[f"{kind}/{name}"] = spec_of(parameter), (layer,)
    return specs, layers


def part_name(sample: int, taps: StageTaps) -> str:
    """Return the name of some taps of a sample's record."""
    return f"sample.{sample}.taps.{taps.first}+{taps.total}"


def taped(tape: ActivationCache | None, taps: StageTaps | None) -> dict[str, Tensor]:
    """Return the parts in a cache of whole records, by name."""
    return (
        {} if tape is None or taps is None else {part_name(sample, taps): tape.raw(sample) for sample in tape.samples}
    )


def parts_of(shard: ActivationCache, taps: Iterable[StageTaps]) -> dict[str, Tensor]:
    """Return the location of a shard's record parts, by name.  taps: those in the parts."""
    return {
        part_name(sample, run): shard.raw_taps(sample, run.first, run.total)
        for sample in shard.samples
        for run in set(taps)
    }


class Programs:
    """Programs of a run.  Schedules are built once for each shape."""

    def __init__(self, job: PacPlusRankJob) -> None:
        self._profile, self._cluster, self._plan, self._order = job.profile, job.cluster, job.plan, ORDERS[job.schedule]
        self._crossing = crossing_of(job.adapter, job.quantization.compute)
        self._schedules: dict[object, Schedule] = {}

    def hybrid(self, shape: StepShape, *, backbone_only: bool = False) -> Program:
        """Return a step of the first epoch (section V-A).  backbone_only: without training, to refill the activation
        cache.
        """
        plan, world_size = self._plan, self._cluster.world_size
        shares = tuple(stage.shares for stage in plan.stages)  # it is the same however the layers are cut
        key = "hybrid", shares, shape.sizes, world_size, self._order, backbone_only
        if key not in self._schedules:

            def build() -> Schedule:
                step = insert_transfers(hybrid_1f1b(plan, shape.sizes, world_size=world_size, order=self._order))
                return backbone_part(step) if backbone_only else step

            self._schedules[key] = once_for(lambda: key, build)
        return Program.on(self._cluster, self._schedules[key], self._costs(shape))

    def least_s(self, shape: StepShape) -> float:
        """Return a lower bound of the simulated seconds of a step of the first epoch."""
        return least_s(self._plan, shape.sizes, shape.lengths, self._costs(shape), self._order, HYBRID)

    def _costs(self, shape: StepShape) -> TableCosts:
        return plan_costs(
            self._profile, self._cluster, self._plan, sizes=shape.sizes, lengths=shape.lengths, crossing=self._crossing
        )

    def cached(self, shape: StepShape) -> Program:
        """Return a step from the cache (section V-B).  shape: the shape of every rank's share; a rank with 0 samples
        only joins the all-reduce.
        """
        stage = self._plan.cached
        assert stage is not None, "a plan without shares for cached epochs"
        key = "cached", stage, shape.sizes
        if key not in self._schedules:
            sizes = [shape.sizes[rank] for rank in stage.ranks]
            self._schedules[key] = once_for(lambda: key, lambda: cached_step(stage, sizes, world_size=len(shape.sizes)))
        return Program.on(self._cluster, self._schedules[key], cached_costs(self._profile, self._cluster, shape))


def cached_costs(profile: Profile, cluster: Cluster, shape: StepShape) -> TableCosts:
    """Return the costs of a step from the cache.  shape: the shape of every rank's share.  The backbone is released; no
    value crosses on its own.
    """

    def pass_s(rank: int, op: Op) -> float:
        return profile.seconds(rank, op.kind, shape.sizes[rank], shape.lengths[rank])

    def bytes_of(value: Value, nbytes: Callable[[LayerProfile], Bytes]) -> Spec:
        rank = value.part
        return opaque(sum(nbytes(layer)(shape.sizes[rank], shape.lengths[rank]) for layer in profile.layers[rank]))

    return TableCosts(
        seconds_by_kind=dict.fromkeys(("LOAD", "SF", "SB"), pass_s)
        | {STEP: lambda rank, op: profile.seconds(rank, STEP, 1, 1)},
        bytes_by_name={
            "gsum": lambda value: opaque(trainable_bytes(profile.layers[value.part])),
            "tap": lambda value: bytes_of(value, attrgetter("tap_bytes")),
            "ctx": lambda value: bytes_of(value, attrgetter("context_bytes")),
        },
        resident_by_rank=lambda rank: (
            profile.stored_bytes(profile.layers[rank]) - sum(layer.frozen_bytes for layer in profile.layers[rank])
        ),
        cluster=cluster,
    )


def backbone_part(schedule: Schedule) -> Schedule:
    """Return the schedule with only backbone forward passes and the transfers between them."""

    def belongs(op: Op) -> bool:
        return op.kind == "F" or (op.kind in (SEND, RECV) and (op.reads or op.writes)[0].name == "act")

    return Schedule(ops=tuple(tuple(op for op in ops if belongs(op)) for ops in schedule.ops), inputs=schedule.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PacPlusRankJob(RankJob):
    """The description of a PAC+ run for a rank.  The folder also has the initial adapter."""

    adapter: ParallelAdapterConfig
    cache_dtype: str

    def manifest(self, rank: int, samples: tuple[int, ...], taps: StageTaps) -> CacheManifest:
        """Return the description of a rank's cache of some taps of some samples."""
        lengths = tuple(self.split.lengths[sample] for sample in samples)
        layout = asdict(record_layout(self.adapter, self.cache_dtype, taps))
        owner = self.cluster.devices[rank].name
        return CacheManifest(fingerprint=self.fingerprint, owner=owner, samples=samples, lengths=lengths, **layout)

    @property
    def owners(self) -> tuple[int, ...]:
        """Return the rank that keeps each sample's activations."""
        assert self.plan.cached is not None, "a plan without shares for cached epochs"
        return shard_owners(self.plan.cached, self.split.lengths, self.cluster.world_size, self.job.seed)

    def phases(self) -> tuple[Phase, ...]:
        """Return the first epoch and the cached epochs (see RankJob)."""
        has_cached, layout = self.job.epochs > 1, record_layout(self.adapter, self.cache_dtype)
        first = replace(
            self.first_epoch,
            moves=self._moves if has_cached else dict,
            nbytes={"activation cache": layout.total_bytes(self.split.lengths) if has_cached else 0},
        )
        if self.plan.cached is None:
            return (first,)
        cached, owners, lengths = self.plan.cached, self.owners, self.split.lengths

        def steps(epoch: int) -> Sequence[PlannedStep]:
            return cached_steps(cached, owners, lengths, self.cluster.world_size, seed=self.job.seed, epoch=epoch)

        return first, Phase(epochs=range(1, self.job.epochs), cached=True, steps=steps, program=Programs(self).cached)

    @property
    def first_epoch(self) -> Phase:
        """Return the steps that fill the activation cache."""
        return Phase(epochs=range(1), steps=self.planned_epoch, program=Programs(self).hybrid)

    def adapter_moves(self) -> tuple[Move, ...]:
        """Return the transfers that bring the whole adapter to every device (section V-B)."""
        assert self.plan.cached is not None, "a plan without shares for cached epochs"
        specs, layers = adapter_state(self.adapter)
        return moves(dict.fromkeys(specs, self.plan.cached.ranks), homes_of(self.plan, layers), specs, self.cluster)

    def filling_steps(self, samples: Sequence[int]) -> tuple[PlannedStep, ...]:
        """Return the steps in which the backbone recomputes the activations of some samples, exactly as in the first
        epoch.
        """
        if len(samples) == len(self.split):
            return self.planned_epoch(0)
        lengths, size = self.split.lengths, self.plan.mini_batch_size
        ordered = sorted(samples, key=lambda sample: lengths[sample])
        batches = [ordered[first : first + size] for first in range(0, len(ordered), size)]
        return tuple(PlannedStep.of(cut_mini_batch(batch, self.plan.num_micro_batches), lengths) for batch in batches)

    def shard_moves(self, holders: Mapping[int, Sequence[int]]) -> tuple[Move, ...]:
        """Return the transfers of activations from the shards of the ranks that have them to the devices that keep
        them.

        holders: by sample.
        """
        taps = whole_taps(self.adapter)
        return self._record_moves({(sample, taps): tuple(ranks) for sample, ranks in holders.items()})

    def tape_moves(self, steps: Sequence[PlannedStep]) -> tuple[Move, ...]:
        """Return the transfers of the activations taped in some steps to the devices that keep them (section V-B)."""
        holders: dict[tuple[int, StageTaps], tuple[int, ...]] = {}
        for rank, taps in sorted(rank_taps(self.plan, self.adapter.num_encoder_layers).items()):
            holders |= {(sample, taps): (rank,) for sample in sorted(taped_samples(self.plan, rank, steps))}
        return self._record_moves(holders)

    def _record_moves(self, holders: Mapping[tuple[int, StageTaps], tuple[int, ...]]) -> tuple[Move, ...]:
        """Return the transfers of parts of records to the devices that keep the samples.  holders: by sample and
        taps.
        """
        owners, lengths = self.owners, self.split.lengths
        layout_of = cache(partial(record_layout, self.adapter, self.cache_dtype))

        @cache  # there are many samples, but few lengths
        def spec(taps: StageTaps, length: int) -> Spec:
            return Spec((layout_of(taps).rows(length), layout_of(taps).row_bytes), "uint8")

        holders_of, wanted = dict[str, tuple[int, ...]](), dict[str, tuple[int, ...]]()
        specs: dict[str, Spec] = {}
        for (sample, taps), ranks in holders.items():
            name = part_name(sample, taps)
            holders_of[name], wanted[name] = ranks, (owners[sample],)
            specs[name] = spec(taps, lengths[sample])
        return moves(wanted, holders_of, specs, self.cluster)

    def _moves(self) -> Mapping[str, Iterable[Program]]:
        """Return the moves between the first and the second epoch: the same for every number format of a backbone."""
        plan = replace(self.plan, predicted_s={}, notes=())
        where = to_json((self.cluster.with_devices(memory_bytes=1), plan), indent=0)
        key = ("moves", self.adapter, self.cache_dtype, self.split.lengths, self.job.batch_size, self.job.seed, where)
        return once_for(lambda: key, self._find_moves)

    def _find_moves(self) -> Mapping[str, Iterable[Program]]:
        adapter, tapes = self.adapter_moves(), self._record_bytes(self.planned_epoch(0))
        # Messages are full whatever is in them: one tensor stands for all records on the same way (see tape_moves).
        ways = {f"{holder}>{owner}": (holder, owner, nbytes) for (holder, owner), nbytes in tapes.items()}
        records = moves(
            {name: (owner,) for name, (_, owner, _) in ways.items()},
            {name: (holder,) for name, (holder, _, _) in ways.items()},
            {name: Spec((nbytes,), "uint8") for name, (_, _, nbytes) in ways.items()},
            self.cluster,
        )
        return {
            "sharing the adapter": [move.program for move in adapter],
            "sharing the activations": [move.program for move in records],
        }

    def _record_bytes(self, steps: Sequence[PlannedStep]) -> dict[tuple[int, int], int]:
        """Return the bytes of the activations taped in some steps, by the device that taped them and the one that keeps
        them.
        """
        owners, lengths, nbytes = self.owners, self.split.lengths, dict[tuple[int, int], int]()
        for rank, taps in sorted(rank_taps(self.plan, self.adapter.num_encoder_layers).items()):
            record_bytes = cache(record_layout(self.adapter, self.cache_dtype, taps).record_bytes)
            for sample in sorted(taped_samples(self.plan, rank, steps)):
                way = rank, owners[sample]
                nbytes[way] = nbytes.get(way, 0) + record_bytes(lengths[sample])
        return nbytes

    def taken_over(self, former: RankJob, places: Mapping[int, int]) -> Iterable[Program]:
        """Return the transfers of activations to the devices that keep them from now on, and the steps that recompute
        lost ones.
        """
        assert isinstance(former, PacPlusRankJob)
        if (
            not any(phase.cached and self.start_epoch in phase.epochs for phase in self.phases())
            or not former.plan.cached
        ):
            return ()
        holders = {sample: (places[owner],) for sample, owner in enumerate(former.owners) if owner in places}
        steps = self.filling_steps([sample for sample in range(len(self.split)) if sample not in holders])
        programs = Programs(self)
        filling = [programs.hybrid(step.shape, backbone_only=True) for step in steps]
        return (*filling, *(move.program for move in (*self.shard_moves(holders), *self.tape_moves(steps))))

    def begins_with(self) -> tuple[Path, ...]:
        """Return the initial adapter's file (see RankJob)."""
        return (self.folder / INITIAL,)


def rank_job(prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan) -> PacPlusRankJob:
    """Return the description of a run under a plan, for every rank."""
    return PacPlusRankJob.of(
        prepared,
        profile,
        cluster,
        plan,
        adapter=prepared.adapter,
        cache_dtype=prepared.options.cache_dtype,
        schedule=prepared.options.schedule,
    )
