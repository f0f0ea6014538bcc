"""HetPipe: pipelines inside virtual workers, asynchronous data parallelism between them (Park et al., USENIX ATC 2020;
PAC+, section VI-A).

A virtual worker runs mini-batches through its pipeline without a flush.  Every mini-batch updates the weights of a
stage as soon as its backward pass there is finished (STEP).  Its backward pass uses the same weights as its forward
pass.  N_m mini-batches are a wave.
Wave synchronous parallelism: after each wave a rank sends the sum of the wave's updates (PUSH) to the servers of its
layers' shards, which add the pushes of all virtual workers to the global weights (MERGE).  Before mini-batch p a rank
may replace its weights by the global weights plus its local updates that the global weights lack (PULL).  It does so if
its last PULL lacks more than s_global mini-batches (VirtualWorkers.waves_needed).  So a faster virtual
worker is at most one wave ahead, and nobody waits until then.
After the last wave every rank pulls.

Stages are numbered through all virtual workers (the second worker's begin where the first's end), mini-batches through
the data: number p of virtual worker v is batch p V + v.  MERGE runs on a separate stream, "server".  It is listed just
before its rank's own PULL of it.
This is late enough that a server running its list from top to bottom does not wait for others earlier than it must.
Values: act, grad, ctx, gacc, loss, tokens and weight:s._.v as in asynchronous_1f1b; push:k.c.v the sum of virtual
worker v's updates of shard k in wave c; global:k._.c the shard's global weights after c waves.

Confidant: asynchronous 1F1B with weight stashing (section 2.3, Fig. 2; PipeDream, Narayanan et al., 2019).
Every batch updates the weights as soon as its backward pass is finished, without a flush.  F reads weight:s._.v, the
newest version v at that time.  B of the same batch reads the same version, even if updates came between.  STEP makes
version v + 1 of stage s from the newest.  The number of versions that a stage stashes is not set anywhere: it follows
from the values' lifetimes (N - i - 1 extra ones on stage i of N, as in the paper's M_pipe).
Other values: act:s.m and grad:s.m (gradient with respect to stage s's input), ctx:s.m, gacc:s.m, loss:s.m, tokens:_.m.
A window is a part of it: it ends on every stage with the same STEP, when the forward passes of the next batches have
begun.  Their contexts, activations and versions are carried over to the next window, in which versions are numbered so
that batch m reads version m.
"""

from __future__ import annotations

from workbench.core.errors import ScheduleError
from workbench.core.plan import Plan
from workbench.core.schedule import MERGE, NONE, PULL, STEP, Op, RankList, Schedule, Value
from workbench.core.virtual_workers import Shard, VersionRule, VirtualWorkers, delay_of
from workbench.schedules.pieces import enclosing_world, world_size_of
from workbench.schedules.pipeline import FORWARD, in_flight_order
from workbench.schedules.recomputation import recompute

PUSH = "PUSH"
SERVER = "server"


def hetpipe(workers: VirtualWorkers, num_waves: int, *, world_size: int | None = None) -> Schedule:
    """Return `num_waves` waves of every virtual worker, without their transfers.  A single virtual worker needs no
    PUSH, MERGE or PULL.
    """
    return mini_batches(workers, num_waves * workers.in_flight, world_size=world_size)


def mini_batches(
    workers: VirtualWorkers,
    count: int,
    *,
    world_size: int | None = None,
    num_begun: int | None = None,
    ahead: int = 0,
    versions: VersionRule = "stashing",
) -> Schedule:
    """Return the first `count` mini-batches of every virtual worker; whole waves if there are several workers.

    num_begun, ahead, versions: see asynchronous_1f1b.
    """
    lists = [RankList() for _ in range(enclosing_world(workers.ranks, world_size))]
    shards = workers.shards() if len(workers.pipelines) > 1 else ()
    first_stage = 0
    for worker, plan in enumerate(workers.pipelines):
        for index, stage in enumerate(plan.stages):
            rank = stage.ranks[0]
            rank_shards = [(number, shard) for number, shard in enumerate(shards) if shard.owners[worker] == rank]
            listing = _Listing(workers, worker, first_stage, index, rank, rank_shards, num_begun, ahead, versions)
            ops, carried = listing.mini_batches(count), listing.carried(count)
            outputs = dict.fromkeys((*listing.outputs(count), *(output for output, _ in carried)))
            lists[rank] = RankList(ops, listing.inputs(count), list(outputs), carried)
        first_stage += len(plan.stages)
    return Schedule.of(lists)


class _Listing:
    """The operations of one rank, while its list is built."""

    def __init__(
        self,
        workers: VirtualWorkers,
        worker: int,
        first_stage: int,
        index: int,
        rank: int,
        shards: list[tuple[int, Shard]],
        num_begun: int | None,
        ahead: int,
        versions: VersionRule,
    ) -> None:
        self._workers, self._worker, self._rank, self._shards = workers, worker, rank, shards
        self._stage, self._index = first_stage + index, index
        self._num_stages = len(workers.pipelines[worker].stages)
        self._delay = min(self._num_stages - index, workers.in_flight) - 1
        self._lag = delay_of(versions, self._delay, self._num_stages)
        self._per_update = self._num_stages if versions == "two" else 1
        self._begun, self._ahead = min(num_begun or 0, self._delay), ahead
        self._stashed = range(min(self._lag, -(-(num_begun or 0) // self._per_update)))
        self._first_act = (
            None if not index or (num_begun or 0) <= self._delay else Value("act", self._stage - 1, self._delay)
        )
        self._first = self._version = 0 if num_begun is None else self._lag
        self._merged = 0
        self._listed: list[Op] = []

    def mini_batches(self, count: int) -> list[Op]:
        """Return the operations of `count` mini-batches, then a PULL of the last wave."""
        size = self._workers.in_flight
        version_of = {p: self._version_of(p) for p in range(self._begun)}
        pulled = 0
        for phase, p in in_flight_order(self._delay, count, num_begun=self._begun, ahead=self._ahead):
            if phase == FORWARD:
                num_waves = self._workers.waves_needed(p)
                if self._shards and num_waves > pulled:
                    pulled = num_waves
                    self._pull(pulled)
                version_of[p] = self._version if self._shards else self._version_of(p)
                self._forward(p, version_of[p])
                continue
            self._backward(p, version_of[p])
            if self._shards and (p + 1) % size == 0:
                pushes = tuple(Value("push", number, p // size, self._worker) for number, _ in self._shards)
                self._listed.append(Op(PUSH, self._stage, p // size, NONE, (self._weight(),), pushes))
        if self._shards and count // size > pulled:
            self._pull(count // size)
        return self._listed

    def inputs(self, count: int) -> list[Value]:
        """Return the initial weights, the shards that this rank serves, and its mini-batches."""
        num_ahead = min(self._delay, self._ahead)
        tokens = (Value("tokens", NONE, self._batch(p)) for p in range(self._begun, count + num_ahead))
        served = (Value("global", number, NONE, 0) for number, shard in self._shards if shard.server == self._rank)
        initial = (*map(self._weight, self._stashed), *(Value("ctx", self._stage, p) for p in range(self._begun)))
        return [*initial, *filter(None, [self._first_act]), self._weight(self._first), *served, *tokens]

    def carried(self, count: int) -> list[tuple[Value, Value]]:
        """Return the values with which the next window continues."""
        if not self._ahead:
            return []
        stage, num_ahead = self._stage, min(self._delay, self._ahead)
        pairs = [(Value("ctx", stage, count + p), Value("ctx", stage, p)) for p in range(num_ahead)]
        stashed = range(min(self._lag, -(-self._ahead // self._per_update)))
        pairs += [(self._weight(self._version_of(count + p * self._per_update)), self._weight(p)) for p in stashed]
        if self._index and self._ahead > num_ahead:
            pairs.append((Value("act", stage - 1, count + num_ahead), Value("act", stage - 1, num_ahead)))
        return [*pairs, (self._weight(), self._weight(self._lag))]

    def _version_of(self, p: int) -> int:
        return max(0, self._first + p // self._per_update - self._lag)

    def outputs(self, count: int) -> tuple[Value, ...]:
        """Return the losses (on the last stage) and the final weights."""
        batches = range(count if self._index == self._num_stages - 1 else 0)
        return (*(Value("loss", self._stage, self._batch(p)) for p in batches), self._weight())

    def _batch(self, p: int) -> int:
        return p * len(self._workers.pipelines) + self._worker

    def _weight(self, version: int | None = None) -> Value:
        return Value("weight", self._stage, NONE, self._version if version is None else version)

    def _forward(self, p: int, version: int) -> None:
        m, stage = self._batch(p), self._stage
        source = (Value("act", stage - 1, m),) if self._index else ()
        end = Value("loss" if self._index == self._num_stages - 1 else "act", stage, m)
        reads = (Value("tokens", NONE, m), *source, self._weight(version))
        self._listed.append(Op(FORWARD, stage, m, NONE, reads, (end, Value("ctx", stage, m))))

    def _backward(self, p: int, version: int) -> None:
        m, stage = self._batch(p), self._stage
        gradient = () if self._index == self._num_stages - 1 else (Value("grad", stage + 1, m),)
        onward = (Value("grad", stage, m),) if self._index else ()
        accumulated = Value("gacc", stage, m)
        reads = (Value("ctx", stage, m), self._weight(version), *gradient)
        self._listed.append(Op("B", stage, m, NONE, reads, (*onward, accumulated)))
        if (p + 1) % self._per_update == 0:
            parts = range(p + 1 - self._per_update, p + 1)
            self._update(STEP, m, tuple(Value("gacc", stage, self._batch(part)) for part in parts))

    def _pull(self, waves: int) -> None:
        for wave in range(self._merged, waves):
            for number, shard in self._shards:
                if shard.server == self._rank:
                    pushes = (Value("push", number, wave, worker) for worker in range(len(shard.owners)))
                    reads = (*pushes, Value("global", number, NONE, wave))
                    self._listed.append(
                        Op(MERGE, number, wave, NONE, reads, (Value("global", number, NONE, wave + 1),), (), SERVER)
                    )
        self._merged = waves
        self._update(PULL, waves - 1, tuple(Value("global", number, NONE, waves) for number, _ in self._shards))

    def _update(self, kind: str, microbatch: int, reads: tuple[Value, ...]) -> None:
        before = self._weight()
        self._version += 1
        self._listed.append(Op(kind, self._stage, microbatch, NONE, (*reads, before), (self._weight(),)))


def asynchronous_1f1b(
    plan: Plan,
    num_batches: int,
    *,
    world_size: int | None = None,
    num_begun: int | None = None,
    ahead: int = 0,
    versions: VersionRule = "stashing",
) -> Schedule:
    """Return `num_batches` optimizer steps, without their transfers: HetPipe with one virtual worker.

    ahead: number of the batches after them whose forward passes begin here, so that the pipeline does not drain: as
    many as there are, up to the number of stages less one.  num_begun: the former window's `ahead`, if this window
    continues it.  versions: with two versions the batches are micro-batches, and as many as there are stages make an
    update.
    Raises ScheduleError if a stage has several ranks, or if a window after which the pipeline does not drain begins
    empty and is shorter than the pipeline.
    """
    if ahead and num_begun is None and num_batches < len(plan.stages) * (len(plan.stages) if versions == "two" else 1):
        raise ScheduleError(
            f"A window of {num_batches} mini-batches without a drain was asked for.",
            f"The pipeline has {len(plan.stages)} stages.",
            "Make it as long as the pipeline, or drain it.",
        )
    for stage in plan.stages:
        if len(stage.shares) != 1:
            raise ScheduleError(
                "Asynchronous 1F1B was asked for.", f"A stage has {len(stage.shares)} ranks.", "Give each stage one."
            )
    size = world_size_of(plan, world_size, (1,) * num_batches)
    schedule = mini_batches(
        VirtualWorkers(pipelines=(plan,), in_flight=len(plan.stages)),
        num_batches,
        world_size=size,
        num_begun=num_begun,
        ahead=ahead,
        versions=versions,
    )
    return recompute(schedule, plan)
