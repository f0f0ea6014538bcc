"""The single phase of a RingAda run on a device, and the operations of a round, by kind: the runtime's dispatch
table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from workbench.core.costs import Costs
from workbench.core.schedule import ALLREDUCE, NONE, STEP, Op
from workbench.methods.common.rank_results import RankResult
from workbench.methods.common.session import RankSession
from workbench.methods.ringada import schedule as ring
from workbench.methods.ringada.compute import PrefixCache, RingCompute, RingOptimizer
from workbench.methods.ringada.costs import RingLayout
from workbench.methods.ringada.moves import ring_homes
from workbench.methods.ringada.rank_job import RingRankJob, Round, RoundShape
from workbench.methods.training.handlers import PlannedStep, Targets, named
from workbench.methods.training.phases import Loaded
from workbench.methods.training.rank_phases import StagePhase
from workbench.runtime.executor import Contents, Handler
from workbench.runtime.flat_optimizer import LinearSchedule
from workbench.runtime.memory import read_memory
from workbench.schedules.recomputation import AGAIN, CONTEXT, READ
from workbench.tasks.tokenize import Batch, collate


@dataclass(frozen=True, slots=True, kw_only=True)
class RingHandlers:
    """One round's operations on one rank.

    number: the round's number in the run.  first_step: mini-batches before it.
    by_loss: whether an adaptive policy uses the loss, otherwise the gradients.
    batches[m]: micro-batch m; for another initiator's, only its attention mask.
    prefix: cached outputs of the frozen layers, None without a cache.  cached: micro-batches that start from it.
    noted: this rank's loss and squared gradients of the round, each a mean over its mini-batches.
    """

    rank: int
    number: int
    first_step: int
    by_loss: bool
    layout: RingLayout
    costs: Costs
    batches: Sequence[Batch]
    compute: RingCompute
    optimizer: RingOptimizer
    epoch: int
    prefix: PrefixCache | None = None
    cached: tuple[int, ...] = ()
    noted: Tensor = field(default_factory=lambda: torch.zeros(2))

    def table(self) -> dict[str, Handler]:
        """Return the handlers by operation kind."""
        return {
            ring.EMBED: self._embed,
            ring.LOAD: self._load,
            ring.PREFIX: self._frozen,
            ring.FORWARD: self._forward,
            ring.HEAD: self._score,
            ring.BACKWARD: self._backward,
            **dict.fromkeys((AGAIN, READ), self._again),
            STEP: self._update,
            ring.HEAD_STEP: lambda op, reads: (
                self.optimizer.update_head(self.first_step + op.microbatch),
                torch.zeros(1, dtype=torch.uint8),
            ),
            ring.TAKE: self._take,
            ALLREDUCE: self._contribute,
            ring.MEAN: self._mean,
            ring.HEAR: self._hear,
        }

    def _embed(self, op: Op, reads: Contents) -> Contents:
        batch = self.batches[op.microbatch]
        return (self.compute.embed(batch.input_ids, batch.attention_mask),)

    def _load(self, op: Op, reads: Contents) -> Contents:
        batch = self.batches[op.microbatch]
        assert self.prefix is not None
        first, last = self.layout.first_unfrozen(op.microbatch), self.layout.plan.num_layers
        read_prefix = partial(self.prefix.read, samples=batch.indices, padded_length=batch.attention_mask.shape[1])
        if not self.compute.side_width:
            return (read_prefix(first),)
        if op.stage == NONE:
            return (self.compute.parted(read_prefix(last))[0],)
        layers = self.layout.layers(op)
        taps, sides = zip(
            *(
                self.compute.parted(read_prefix(layer))
                for layer in ([last + 1] if layers.start == 0 else []) + [*layers]
            ),
            strict=True,
        )
        return ((sides[0], list(taps)),)

    def _frozen(self, op: Op, reads: Contents) -> Contents:
        batch, first, stage = (
            self.batches[op.microbatch],
            self.layout.first_unfrozen(op.microbatch),
            self.layout.plan.stages[op.stage],
        )
        if self.prefix is None:
            return self.compute.ahead(reads[0], batch.attention_mask, range(stage.start, stage.stop), first)
        if self.compute.side_width:
            return self._ahead(reads[0], batch, range(stage.start, stage.stop), first)
        for layer in self.layout.layers(op):
            self.prefix.keep(layer, batch.indices, reads[0])
            reads = self.compute.ahead(reads[0], batch.attention_mask, range(layer, layer + 1), first)
        return reads

    def _ahead(self, state: Tensor, batch: Batch, layers: range, first: int) -> Contents:
        """Run the model and the frozen side layers (see RingCompute.ahead), and keep what the side layers take, layer
        by layer.

        A layer's record has the tap after it and the side state before it, which is constant while all side layers
        below are frozen.
        The embedding's and, at the initiator, the last hidden state have records of their own, behind the layers'.
        """
        assert self.prefix is not None
        keep, taps, beside = partial(self.prefix.keep, samples=batch.indices), list[Tensor](), state
        for layer in layers:
            hidden, below = self.compute.parted(state)
            if layer == 0:
                keep(self.layout.plan.num_layers + 1, hidden=self.compute.widened(hidden))
            outputs = self.compute.ahead(state, batch.attention_mask, range(layer, layer + 1), first)
            if len(outputs) == 2:
                state, (side, more) = outputs
                beside, taps = (side if not taps else beside), [*taps, *more]
            else:
                [state] = outputs
            keep(layer, hidden=self.compute.widened(torch.cat([self.compute.parted(state)[0], below], dim=2)))
        return (state, (beside, taps)) if first < layers.stop else (state,)

    def _forward(self, op: Op, reads: Contents) -> Contents:
        layers, batch = self.layout.layers(op), self.batches[op.microbatch]
        is_lowest = layers.start == self.layout.first_unfrozen(op.microbatch)
        if self.prefix is not None and not self.compute.side_width and is_lowest and op.microbatch not in self.cached:
            self.prefix.keep(layers.start, batch.indices, reads[0])
        mask, last = batch.attention_mask, op.writes[-1]
        if last.name == CONTEXT:
            context = self.compute.forward(reads, mask, layers, is_lowest=is_lowest)
            context.nbytes = self.costs.spec(last).nbytes
            return context.output.detach(), context
        keeps_last = last.name.startswith(CONTEXT)
        output, inputs, saved = self.compute.first_pass(
            reads[0], mask, layers, is_lowest=is_lowest, keeps_last=keeps_last
        )
        if saved is None:
            return output, *inputs
        saved.nbytes = self.costs.spec(last).nbytes
        return output, *inputs, saved

    def _again(self, op: Op, reads: Contents) -> Contents:
        context = self.compute.again(op.part, reads[0], self.batches[op.microbatch].attention_mask)
        context.nbytes = self.costs.spec(op.writes[0]).nbytes
        return (context,)

    def _score(self, op: Op, reads: Contents) -> Contents:
        number, batch, iterations = (
            self.layout.iteration_of[op.microbatch],
            self.batches[op.microbatch],
            self.layout.iterations,
        )
        if (head := named(op, reads, "head")) and iterations[number - 1].initiator != self.rank:
            self.optimizer.take_head(head[0], self.first_step + number)
        if self.prefix is not None and self.compute.side_width and op.microbatch not in self.cached:
            self.prefix.keep(
                self.layout.plan.num_layers, batch.indices, self.compute.widened(named(op, reads, "act")[0])
            )
        total = sum(
            size
            for size, iteration in zip(self.layout.sizes, self.layout.iteration_of, strict=True)
            if iteration == number
        )
        targets = Targets(labels=batch.labels, sample_ids=batch.sample_ids, epoch=self.epoch, total=total)
        loss, gradient = self.compute.score(
            [*named(op, reads, "act"), *named(op, reads, "side")], batch.attention_mask, targets
        )
        mean_loss = loss / len(iterations)  # a round's loss is the mean of its mini-batches'
        self.noted[0] += mean_loss
        return mean_loss, gradient, None

    def _backward(self, op: Op, reads: Contents) -> Contents:
        gradient = reads[0].backward(reads[1])
        return tuple(None if value.name == "gacc" else gradient for value in op.writes)

    def _update(self, op: Op, reads: Contents) -> Contents:
        layers = self.layout.layers(op)
        if self.optimizer.history is not None:
            self.noted[1] += self.optimizer.squared_gradients(layers) / len(self.layout.iterations)
        self.optimizer.update(layers, self.first_step + op.microbatch)
        return (None,)

    def _take(self, op: Op, reads: Contents) -> Contents:
        self.optimizer.take_head(reads[0], self.first_step + len(self.layout.iterations))
        return (None,)

    def _mean(self, op: Op, reads: Contents) -> Contents:
        self.optimizer.take_all(reads[0])
        return (None,)

    def _contribute(self, op: Op, reads: Contents) -> Contents:
        is_told = op.writes[0].name == "told"
        return (self.noted if is_told else torch.cat(self.optimizer.state_vectors()) / len(op.ranks),)

    def _hear(self, op: Op, reads: Contents) -> Contents:
        assert self.optimizer.history is not None
        loss, squared = reads[0]
        self.optimizer.history[self.number] = loss if self.by_loss else squared.sqrt()
        return ()


class RingPhase(StagePhase[RingRankJob]):
    """A block of layers with their adapters, embedding and head.

    With an adaptive policy, the earlier rounds determine each round's depth.
    """

    _prefix: PrefixCache | None = None

    def shape(self, planned: PlannedStep) -> RoundShape:
        """Return the next round with its current depth (see RankPhase)."""
        shape = planned.shape
        assert isinstance(shape, RoundShape)
        if not isinstance(self.optimizer, RingOptimizer) or self.optimizer.history is None:
            return shape
        lowest = self.rank_job.policy.adapted(self.optimizer.history[: self.optimizer.num_steps].tolist())[-1]
        return replace(
            shape, iterations=tuple(iteration._replace(first_unfrozen=lowest) for iteration in shape.iterations)
        )

    def load(self, epoch: int) -> None:
        """Load the block (see RankPhase)."""
        if self.index is not None:
            backbone = self.rank_job.load_backbone(*self.layers, with_embedding=True)
            self._train(RingCompute(self.rank_job.config, backbone))
        self.result.nbytes["private memory with the model"] = read_memory().anonymous_bytes

    def take(self, loaded: Loaded) -> bool:
        """Use a loaded block (see RankPhase), with an optimizer for this ring: another device may keep the head."""
        is_taken = super().take(loaded)
        if is_taken:
            self._train(loaded.compute)
        return is_taken

    def _train(self, compute: RingCompute) -> None:
        """Train a block from now on, with empty caches or those of former jobs."""
        rank_job, job = self.rank_job, self.rank_job.job
        self.compute = compute
        compute.folder = self.activations_folder
        self.optimizer = RingOptimizer(
            compute,
            LinearSchedule(
                peak=job.peak_learning_rate, num_steps=rank_job.num_steps, warmup_fraction=job.warmup_fraction
            ),
            job.weight_decay,
            updates=rank_job.updates,
            keeps_head=rank_job.options.federated or self.session.rank == rank_job.initiators[0],
            num_noted=rank_job.num_rounds if rank_job.policy.is_adaptive else 0,
        )
        if rank_job.options.cache:
            folder = self.session.context.own_folder(rank_job.folder) / "prefix"
            self._prefix = PrefixCache(
                folder=folder, lengths=rank_job.lengths, crossing=rank_job.crossing, lowest=rank_job.lowest
            )
            if rank_job.cache_homes:
                self._take_over(self._prefix)

    def _take_over(self, prefix: PrefixCache) -> None:
        """Continue with the caches of former jobs, whose layers may have moved."""
        rank_job, rank, start_s = self.rank_job, self.session.rank, self.session.context.now_s()
        homes = ring_homes(rank_job.present.stages)
        moving = [
            (layer, rank_job.cache_homes[layer], homes[layer]) for layer in rank_job.cached_layers(rank_job.start)
        ]
        if rank_job.config.side_width:
            last = rank_job.plan.num_layers
            moving.append((last, rank, rank))  # the last hidden states of the device's samples stay
            moving += [
                (last + 1, holder, receiver) for layer, holder, receiver in moving if layer == 0
            ]  # the embedding's
        prefix.take_over(moving, rank, self.session.run, rank_job.cluster)
        self.result.spent_s["moving the cache"] = self.session.context.now_s() - start_s

    def handlers(self, epoch: int, planned: PlannedStep) -> dict[str, Handler]:
        """Return the handlers of a round (see RankPhase)."""
        assert isinstance(planned, Round) and isinstance(self.optimizer, RingOptimizer)
        rank_job, shape = self.rank_job, self.shape(planned)
        if self._prefix is not None and not rank_job.config.side_width:
            self._prefix.forget_above(shape.iterations[0].first_unfrozen)
        self.optimizer.num_steps = (
            planned.number + 1
        )  # counts only once the round is done; the state of a failed round is not saved
        return RingHandlers(
            rank=self.session.rank,
            number=planned.number,
            first_step=planned.number * rank_job.steps_per_round,
            by_loss=rank_job.policy.unfreezing == "plateau",
            layout=rank_job.layout(shape),
            costs=rank_job.costs(shape),
            batches=[collate(rank_job.split, samples) for samples in planned.samples],
            compute=self.compute,
            optimizer=self.optimizer,
            epoch=epoch,
            prefix=self._prefix,
            cached=shape.cached,
        ).table()

    def release(self) -> None:
        """Free memory and disk (see RankPhase)."""
        if self._prefix is not None:
            self.result.nbytes["activation cache"] = self._prefix.nbytes
            self._prefix.forget_above(-1)
        super().release()


def phases_on(session: RankSession[RingRankJob], result: RankResult) -> tuple[RingPhase, ...]:
    """Return the phase as a rank does it."""
    return (RingPhase(session, session.rank_job.phases()[0], result),)
