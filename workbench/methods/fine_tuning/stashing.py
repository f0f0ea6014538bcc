"""Windows of mini-batches in which a pipeline does not drain, and the stashed versions of weights that they need.

Asynchronous 1F1B with weight stashing (Confidant, section 2.2; PipeDream, Narayanan et al., 2019): every mini-batch
updates a stage's weights as soon as its backward pass there is finished, and uses the same weight version in its
backward pass as in its forward pass.
A step of the trainer is a window: consecutive mini-batches.  It ends on every stage with the update by the same
mini-batch: this state is used for snapshots and for the next generation.  The pipeline does not drain there, because
the forward passes of the next mini-batches have begun, and the next window continues them.  After a pause they are
computed again, with the newest weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.core.schedule import STEP, Op
from workbench.methods.fine_tuning.handlers import (
    BackpropagationHandlers,
    WindowShape,
)
from workbench.methods.training.handlers import PlannedStep, cut_mini_batch, named
from workbench.runtime.executor import Contents, Handler
from workbench.runtime.flat_optimizer import FlatAdamW
from workbench.schedules.recomputation import AGAIN, READ
from workbench.schedules.tensor import BEGIN, END
from workbench.tasks.batching import epoch_batches

ALIKE = 32
"""Number of mini-batches that are sorted by length together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(PlannedStep):
    """A step of an asynchronous pipeline.  ahead: the samples of the mini-batches after it that begin in it (see
    WindowShape).
    """

    ahead: tuple[tuple[int, ...], ...] = ()


def all_parts(planned: PlannedStep) -> PlannedStep:
    """Return a step with the mini-batches ahead as additional parts."""
    if not isinstance(planned, Window):
        return planned
    assert isinstance(planned.shape, WindowShape)
    return PlannedStep(samples=planned.samples + planned.ahead, shape=planned.shape.all_parts)


@lru_cache(maxsize=4)
def windows(
    lengths: tuple[int, ...], batch_size: int, size: int, *, seed: int, epochs: int, ahead: int = 0, parts: int = 1
) -> tuple[tuple[PlannedStep, ...], ...]:
    """Return every epoch's windows; their parts are mini-batches.

    lengths: tokens of each sample.  size: number of mini-batches in a window; 0 is an epoch.

    ahead: number of parts whose forward passes begin in the window before theirs; 0: the pipeline drains after each
    window.  It also drains after a window that begins with an empty pipeline and is shorter than that.  parts: number
    of parts of a mini-batch.
    Raises ConfigError if a mini-batch has fewer samples than parts.
    Runs of mini-batches are sorted by length, because stages that compute mini-batches of unequal length at the same
    time wait for each other.
    """
    counts: list[list[int]] = []  # every epoch's windows, in mini-batches
    batches: list[Sequence[int]] = []
    for epoch in range(epochs):
        drawn = epoch_batches(lengths, batch_size, seed, epoch)
        window_size = size or len(drawn)
        for start in range(0, len(drawn), min(window_size, ALIKE)):
            alike = drawn[start : start + min(window_size, ALIKE)]
            for batch in sorted(alike, key=lambda batch: max(lengths[i] for i in batch)):
                if len(batch) < parts:
                    raise ConfigError(
                        f"Two versions of the weights on {parts} stages were asked for: a mini-batch has as many "
                        "micro-batches.",
                        f"An epoch's last mini-batch has {len(batch)} samples.",
                        "Choose another batch_size, or versions=stashing.",
                    )
                batches += cut_mini_batch(batch, parts)
        counts.append([parts * min(window_size, len(drawn) - start) for start in range(0, len(drawn), window_size)])
    start, before, all_windows = 0, None, []
    for epoch_counts in counts:
        steps: list[PlannedStep] = []
        for count in epoch_counts:
            step = PlannedStep.of(batches[start : start + count], lengths)
            start += count
            is_short = count < (ahead + 1) * parts  # then it does not fill an empty pipeline
            following = PlannedStep.of([] if is_short and before is None else batches[start : start + ahead], lengths)
            shape = WindowShape(
                sizes=step.shape.sizes, lengths=step.shape.lengths, ahead=following.shape, continues=before
            )
            steps.append(Window(samples=step.samples, shape=shape, ahead=following.samples))
            before = (shape if is_short else replace(shape, continues=None)) if following.samples else None
        all_windows.append(tuple(steps))
    return tuple(all_windows)


class WindowOptimizer:
    """An Optimizer: a FlatAdamW whose steps are windows.

    num_batches: number of mini-batches in an epoch.  size: see windows.
    """

    def __init__(self, inner: FlatAdamW, num_batches: int, size: int) -> None:
        self.inner, self._num_batches, self._size = inner, num_batches, size or num_batches

    @property
    def num_steps(self) -> int:
        """Return the number of finished windows."""
        epochs, batches = divmod(self.inner.num_steps, self._num_batches)
        return epochs * -(-self._num_batches // self._size) + -(-batches // self._size)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of parameters, gradients and moments (see Optimizer)."""
        return self.inner.state_bytes

    def state_vectors(self) -> tuple[Tensor, ...]:
        """Return all state that determines the next step (see Optimizer)."""
        return self.inner.state_vectors()

    def set_num_steps(self, num_steps: int) -> None:
        """Continue after this many windows."""
        epochs, windows = divmod(num_steps, -(-self._num_batches // self._size))
        self.inner.set_num_steps(epochs * self._num_batches + windows * self._size)

    def give_up_step(self) -> None:
        """Forget a window that was given up, and its versions (see Optimizer)."""
        self.inner.give_up_step()

    def named_tensors(self) -> dict[str, Tensor]:
        """Return parameters and moments by name (see Optimizer)."""
        return self.inner.named_tensors()


@dataclass(slots=True, eq=False)
class Version:
    """A version of a stage's trained weights, (total,).

    in_flight: mini-batches between their forward and backward pass that use it.
    """

    weights: Tensor
    in_flight: int = 0

    @property
    def nbytes(self) -> int:
        """Return its size in bytes."""
        return self.weights.nbytes


@dataclass(slots=True, kw_only=True)
class StashingHandlers:
    """One window's operations on one rank.

    each: the operations of a mini-batch.  per_update: number of its micro-batches.

    num_versions: 0 if only mini-batches in flight need an older version; else the number of updates for which every
    version is stored.
    begins: whether the pipeline is empty at first.  Then `first`, the window's first version, arrives without content;
    it is stored while a mini-batch needs it.  Every other version is the content of the value that an operation reads.
    """

    each: BackpropagationHandlers
    begins: bool = True
    num_versions: int = 0
    per_update: int = 1
    first: Version | None = field(init=False)

    def __post_init__(self) -> None:
        self.first = Version(self.each.optimizer.parameters) if self.begins else None

    def table(self) -> dict[str, Handler]:
        """Return the handlers by operation kind."""
        handlers = {
            "F": self._forward,
            BEGIN: self._begin,
            END: self._score,
            "B": self._backward,
            **dict.fromkeys((AGAIN, READ, f"{END}B"), self._with_version),
            f"{BEGIN}B": self._backward,
            STEP: self._step,
        }
        return self.each.table() | handlers

    def _of_each(self, op: Op, reads: Contents) -> Contents:
        return self.each.table()[op.kind](op, reads)

    def _forward(self, op: Op, reads: Contents) -> Contents:
        self._version(op, reads).in_flight += 1
        return self._score(op, reads)

    def _begin(self, op: Op, reads: Contents) -> Contents:
        self._version(op, reads).in_flight += 1
        return self._of_each(op, reads)

    def _with_version(self, op: Op, reads: Contents) -> Contents:
        self._version(op, reads)
        return self._of_each(op, reads)

    def _score(self, op: Op, reads: Contents) -> Contents:
        first = op.microbatch // self.per_update * self.per_update
        size = sum(len(batch.sample_ids) for batch in self.each.batches[first : first + self.per_update])
        written = replace(self.each, total=size).table()[op.kind](op, reads)
        share = size / self.each.total  # a window's loss is the mean over its samples
        return tuple(
            result * share if value.name == "loss" else result for value, result in zip(op.writes, written, strict=True)
        )

    def _backward(self, op: Op, reads: Contents) -> Contents:
        version = self._version(op, reads)
        if all(value.name != "gacc" for value in op.writes):  # a recomputed layer, but not the stage's first
            return self._of_each(op, reads)
        version.in_flight -= 1
        is_read_again = version.in_flight or (
            op.microbatch < (self.num_versions + 1) * self.per_update - 1 and self.num_versions
        )
        if version is self.first and version.weights is not self.each.optimizer.parameters and not is_read_again:
            self.first = None
        return self._of_each(op, reads)

    def _step(self, op: Op, reads: Contents) -> Contents:
        optimizer, newest = (
            self.each.optimizer,
            self._version(op, reads),
        )  # releases the backward pass's version before another is made
        if newest.in_flight or self.num_versions:
            optimizer.keep_version()
        elif newest is self.first:
            self.first = None
        optimizer.step()
        optimizer.compute_with(optimizer.parameters)
        return (Version(optimizer.parameters),)

    def _version(self, op: Op, reads: Contents) -> Version:
        """Set the stage to the version that an operation reads, and return it."""
        version: Version | None = named(op, reads, "weight")[0] or self.first
        assert version is not None, f"{op.label} reads the window's first version, which is gone"
        self.each.optimizer.compute_with(version.weights)
        return version
