"""The cost of each layer on each device: the planners' input (PAC+, section V-A, 'Profiling')."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from workbench.core.cluster import Factors
from workbench.core.errors import ConfigError

FORWARD_KINDS = ("F", "SF")
BACKWARD_KINDS = ("B", "SB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Seconds over batch size and sequence length, interpolated linearly in both.

    batch_sizes: (m,) ascending.  sequence_lengths: (n,) ascending.  seconds: (m, n).
    """

    batch_sizes: tuple[int, ...]
    sequence_lengths: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if len(self.seconds) != len(self.batch_sizes) or any(
            len(row) != len(self.sequence_lengths) for row in self.seconds
        ):
            raise ConfigError(
                f"A cost grid of {len(self.batch_sizes)} x {len(self.sequence_lengths)} was asked for.",
                f"Its rows have lengths {[len(row) for row in self.seconds]}.",
                "Measure every combination.",
            )
        for axis in (self.batch_sizes, self.sequence_lengths):
            if not axis or list(axis) != sorted(set(axis)) or axis[0] <= 0:
                raise ConfigError("A cost grid needs ascending positive axes.", f"Found {axis}.", "Sort them.")

    @classmethod
    def of(
        cls, batch_sizes: Sequence[int], sequence_lengths: Sequence[int], seconds: Callable[[int, int], float]
    ) -> Grid:
        """Return a grid over some sizes.  seconds: (batch size, sequence length) -> seconds."""
        cells = tuple(tuple(seconds(batch, length) for length in sequence_lengths) for batch in batch_sizes)
        return cls(batch_sizes=tuple(batch_sizes), sequence_lengths=tuple(sequence_lengths), seconds=cells)

    def __call__(self, batch: int, sequence_length: int) -> float:
        """Return the seconds of a batch: 0 for an empty one, extrapolated linearly outside the grid, never below 0."""
        if batch == 0:
            return 0.0
        low, high, weight = _bracket(self.batch_sizes, batch)
        left, right, share = _bracket(self.sequence_lengths, sequence_length)
        lower = (1 - share) * self.seconds[low][left] + share * self.seconds[low][right]
        upper = (1 - share) * self.seconds[high][left] + share * self.seconds[high][right]
        return max(0.0, (1 - weight) * lower + weight * upper)

    def scaled(self, factor: float) -> Grid:
        """Return the grid of a device that is `factor` times slower."""
        return replace(self, seconds=tuple(tuple(factor * cell for cell in row) for row in self.seconds))

    def plus(self, other: Grid) -> Grid:
        """Return the grid of both operations in sequence.  other: a grid with the same axes."""
        cells = tuple(
            tuple(map(sum, zip(*rows, strict=True))) for rows in zip(self.seconds, other.seconds, strict=True)
        )
        return replace(self, seconds=cells)


def _bracket(axis: tuple[int, ...], value: float) -> tuple[int, int, float]:
    if len(axis) == 1:
        return 0, 0, 0.0
    low = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return low, low + 1, (value - axis[low]) / (axis[low + 1] - axis[low])


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of one sample: `per_token` of the sequence plus `per_sample`.  A decoder's tokens count per sample, because
    their number is one constant for the whole job.
    """

    per_token: float = 0
    per_sample: float = 0

    def __call__(self, batch: int, sequence_length: int) -> int:
        """Return the bytes of a batch."""
        return int(batch * (sequence_length * self.per_token + self.per_sample))

    def __add__(self, other: Bytes) -> Bytes:
        """Return the sum."""
        return Bytes(self.per_token + other.per_token, self.per_sample + other.per_sample)

    def rounded(self) -> Bytes:
        """Return whole bytes."""
        return Bytes(round(self.per_token), round(self.per_sample))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """The bytes of one layer for one sample.

    output: everything sent to the next layer (from a decoder's layer the encoder's output and the decoder's states).
    gradient: everything that the next layer sends back.  context: activations stored for the backward pass, without the
    tap.  tap: activations in the activation cache.  workspace: temporary memory of the forward pass.
    """

    output_bytes: Bytes = Bytes()
    gradient_bytes: Bytes = Bytes()
    context_bytes: Bytes = Bytes()
    tap_bytes: Bytes = Bytes()
    workspace_bytes: Bytes = Bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile(LayerBytes):
    """One layer on one device; the first layer includes the embedding, the last the head.

    times: seconds by operation kind: F backbone forward, B backbone backward, SF and SB side network, LOAD from the
    activation cache, TAPE into it, STEP optimizer.  frozen_bytes, trainable_bytes: bytes of the parameters.
    """

    name: str
    times: dict[str, Grid]
    frozen_bytes: int
    trainable_bytes: int

    def seconds(self, kind: str, batch: int, sequence_length: int) -> float:
        """Return the seconds of one operation kind, 0 if the layer does not have it."""
        grid = self.times.get(kind)
        return 0.0 if grid is None else grid(batch, sequence_length)

    def forward_s(self, batch: int, sequence_length: int) -> float:
        """Return t_f(beta) of PAC+ Table II in seconds."""
        return sum(self.seconds(kind, batch, sequence_length) for kind in FORWARD_KINDS)

    def backward_s(self, batch: int, sequence_length: int) -> float:
        """Return t_b(beta) of PAC+ Table II in seconds."""
        return sum(self.seconds(kind, batch, sequence_length) for kind in BACKWARD_KINDS)

    def scaled(self, factor: float) -> LayerProfile:
        """Return the profile of a device that is `factor` times slower."""
        return replace(self, times={kind: grid.scaled(factor) for kind, grid in self.times.items()})

    def with_times(self, times: Mapping[str, Grid]) -> LayerProfile:
        """Return the profile with other seconds of these kinds of operations."""
        return replace(self, times={**self.times, **times})


Layers = tuple[LayerProfile, ...]
"""The layers of a model on one device."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """layers[rank][layer] for every device.

    optimizer_bytes_per_trainable_byte: 2 for AdamW in fp32.
    most_copied_bytes: a stage whose trained parameters and optimizer state take at most so many bytes copies them for
    its snapshots.

    source: 'measured' on the devices, 'scaled' from a measurement of the host, or 'analytic'.
    notes: sentences on what the costs leave out.
    """

    model: str
    method: str
    source: Literal["measured", "scaled", "analytic"]
    layers: tuple[Layers, ...]
    optimizer_bytes_per_trainable_byte: float = 2.0
    most_copied_bytes: int = 0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers or not self.layers[0] or len({len(row) for row in self.layers}) != 1:
            raise ConfigError(
                f"A profile of '{self.model}' was asked for.",
                f"Its devices have {[len(row) for row in self.layers]} layers.",
                "Profile every layer on every device.",
            )

    @property
    def num_layers(self) -> int:
        """Return L of PAC+ Table II."""
        return len(self.layers[0])

    @property
    def world_size(self) -> int:
        """Return the number of devices."""
        return len(self.layers)

    def seconds(
        self, rank: int, kind: str, batch: int, sequence_length: int, start: int = 0, stop: int | None = None
    ) -> float:
        """Return the seconds of a kind of operation over layers [start, stop), by default over all, on a device."""
        key = (rank, kind, batch, sequence_length, start, stop)
        seconds = self._sums.get(key)
        if seconds is None:
            seconds = self._sums[key] = sum(self.layer_seconds(rank, kind, batch, sequence_length)[start:stop])
        return seconds

    def layer_seconds(self, rank: int, kind: str, batch: int, sequence_length: int) -> tuple[float, ...]:
        """Return the seconds of a kind of operation in each layer, on a device."""
        key = (rank, kind, batch, sequence_length)
        seconds = self._by_layer.get(key)
        if seconds is None:
            grids, numbers = self._grids_of(rank, kind)
            distinct_s = [0.0 if grid is None else grid(batch, sequence_length) for grid in grids]
            seconds = self._by_layer[key] = tuple([distinct_s[number] for number in numbers])
        return seconds

    def _grids_of(self, rank: int, kind: str) -> tuple[list[Grid | None], list[int]]:
        """Return the distinct grids of a device's layers, which are few, and the number of each layer's grid."""
        if (rank, kind) not in self._grids:
            grids = [layer.times.get(kind) for layer in self.layers[rank]]
            numbers = {grid: number for number, grid in enumerate(dict.fromkeys(grids))}
            self._grids[rank, kind] = list(numbers), [numbers[grid] for grid in grids]
        return self._grids[rank, kind]

    def optimizer_bytes(self, trainable_bytes: int) -> int:
        """Return the bytes of the optimizer's state of a stage's trained parameters, and of a copy of both."""
        state = round(self.optimizer_bytes_per_trainable_byte * trainable_bytes)
        copied = trainable_bytes + state
        return state + (copied if copied <= self.most_copied_bytes else 0)

    def stored_bytes(self, layers: Iterable[LayerProfile]) -> int:
        """Return the bytes of layers on a device throughout training: parameters, gradients, optimizer state."""
        listed = tuple(layers)
        trainable = trainable_bytes(listed)
        return sum(layer.frozen_bytes for layer in listed) + 2 * trainable + self.optimizer_bytes(trainable)

    # Planners and simulations ask for the same seconds again and again.

    @cached_property
    def _sums(self) -> dict[tuple[int, str, int, int, int, int | None], float]:
        return {}

    @cached_property
    def _by_layer(self) -> dict[tuple[int, str, int, int], tuple[float, ...]]:
        return {}

    @cached_property
    def _grids(self) -> dict[tuple[int, str], tuple[list[Grid | None], list[int]]]:
        return {}

    def forward_s(self, rank: int, batch: int, sequence_length: int) -> list[float]:
        """Return t_f of PAC+ Table II of each layer on a device."""
        return self._passes_s(rank, FORWARD_KINDS, batch, sequence_length)

    def backward_s(self, rank: int, batch: int, sequence_length: int) -> list[float]:
        """Return t_b of PAC+ Table II of each layer on a device."""
        return self._passes_s(rank, BACKWARD_KINDS, batch, sequence_length)

    def _passes_s(self, rank: int, kinds: Sequence[str], batch: int, sequence_length: int) -> list[float]:
        rows = (self.layer_seconds(rank, kind, batch, sequence_length) for kind in kinds)
        return [sum(seconds) for seconds in zip(*rows, strict=True)]

    def train_s(self, rank: int, batch: int, sequence_length: int, start: int = 0, stop: int | None = None) -> float:
        """Return t_f + t_b of layers [start, stop), by default of all layers, on a device in seconds."""
        size = batch, sequence_length
        both = zip(self.forward_s(rank, *size), self.backward_s(rank, *size), strict=True)
        return sum([forward + backward for forward, backward in both][start:stop])

    def with_layers(self, change: Callable[[LayerProfile, int, int], LayerProfile]) -> Profile:
        """Return the profile with every layer as `change` returns it for the layer, its rank and its number."""
        rows = (
            tuple(change(layer, rank, number) for number, layer in enumerate(row))
            for rank, row in enumerate(self.layers)
        )
        return replace(self, layers=tuple(rows))

    def part(self, ranks: Sequence[int], factors: Factors | None = None) -> Profile:
        """Return the profile of the given devices, in this order.  factors: the measured slow-down of some devices."""
        slower = factors or {}
        rows = (
            tuple(layer.scaled(slower[rank]) if rank in slower else layer for layer in self.layers[rank])
            for rank in ranks
        )
        return replace(self, layers=tuple(rows))


def trainable_bytes(layers: Iterable[LayerProfile]) -> int:
    """Return the bytes of the trainable parameters of some layers, and of their gradients."""
    return sum(layer.trainable_bytes for layer in layers)
