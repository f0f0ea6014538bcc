"""The seconds of the operations inside the layers on each device, which Galaxy+'s planners and schedules read (Galaxy+,
section III-C).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from workbench.core.errors import ConfigError
from workbench.core.inference import StackShape


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceCost:
    """Seconds of one operation on `tokens` tokens and `units` units: fixed + tokens + units + their product.

    For ATT and CATT `tokens` are query-key pairs.  Without tokens or units it takes no time, because the operation is
    left out.
    """

    fixed_s: float = 0.0
    token_s: float = 0.0
    unit_s: float = 0.0
    token_unit_s: float = 0.0

    def seconds(self, tokens: int, units: int) -> float:
        """Return the seconds, never below 0."""
        if tokens <= 0 or units <= 0:
            return 0.0
        return max(0.0, self.fixed_s + tokens * self.token_s + units * self.unit_s + tokens * units * self.token_unit_s)

    def scaled(self, factor: float) -> PieceCost:
        """Return the cost on a device that is `factor` times slower."""
        return PieceCost(**{name: factor * seconds for name, seconds in asdict(self).items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class StackTimes:
    """Seconds of the operations of one layer of a stack on one device, by operation kind.

    Kinds: QKV, ATT, OUT (units: heads or groups), CQ, CKV, CATT, COUT (the cross-attention's), UP, DOWN (units:
    columns), CONN and ADD (units: 1), EMB and HEAD (units: 1; the whole model's, with the stack that they belong to).
    """

    pieces: dict[str, PieceCost]

    def seconds(self, kind: str, tokens: int, units: int = 1) -> float:
        """Return the seconds of an operation, 0 for a kind that the stack does not have."""
        cost = self.pieces.get(kind)
        return 0.0 if cost is None else cost.seconds(tokens, units)

    def scaled(self, factor: float) -> StackTimes:
        """Return the costs on a device that is `factor` times slower."""
        return StackTimes(pieces={kind: cost.scaled(factor) for kind, cost in self.pieces.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceProfile:
    """The costs that inference planners read.  costs[rank][stack]; stacks: one, or encoder and decoder.

    first_bytes, last_bytes: bytes of the embedding and of the head (final norm, language model head), which are on the
    first device of the plan.
    working_bytes_per_token: bytes of activations on every device that computes.
    full_everywhere: whether every device has the whole feed-forward network of a scheme-2 layer (Galaxy+ Eq. 8 as
    printed), not only devices with tokens.
    source: 'measured' on the devices, 'scaled' from a measurement of the host, or 'analytic'.
    """

    model: str
    source: Literal["measured", "scaled", "analytic"]
    stacks: tuple[StackShape, ...]
    costs: tuple[tuple[StackTimes, ...], ...]
    first_bytes: int = 0
    last_bytes: int = 0
    working_bytes_per_token: int = 0
    full_everywhere: bool = False

    def __post_init__(self) -> None:
        if not self.stacks or not self.costs or any(len(row) != len(self.stacks) for row in self.costs):
            raise ConfigError(
                f"A profile of '{self.model}' was asked for.",
                f"It has {len(self.stacks)} stacks, and its devices have {[len(row) for row in self.costs]}.",
                "Profile every stack on every device.",
            )

    @property
    def world_size(self) -> int:
        """Return the number of devices."""
        return len(self.costs)

    @property
    def num_layers(self) -> int:
        """Return the number of layers of all stacks together."""
        return sum(stack.num_layers for stack in self.stacks)

    @property
    def ends_bytes(self) -> int:
        """Return the bytes of embedding and head."""
        return self.first_bytes + self.last_bytes

    def working_bytes(self, lengths: Sequence[int]) -> int:
        """Return the bytes of activations on a device that computes a sequence of so many tokens in each stack."""
        return self.working_bytes_per_token * max(lengths)

    def slowed(self, rank: int, factor: float) -> InferenceProfile:
        """Return the profile with one device `factor` times slower (a straggler)."""
        row = tuple(costs.scaled(factor) for costs in self.costs[rank])
        return replace(self, costs=(*self.costs[:rank], row, *self.costs[rank + 1 :]))

    def stack_of(self, layer: int) -> int:
        """Return the index of the stack that contains a layer; layers are counted through all stacks."""
        for index, stack in enumerate(self.stacks):
            if layer < stack.num_layers:
                return index
            layer -= stack.num_layers
        raise ConfigError(
            f"Layer {layer} beyond the last was asked for.",
            f"The model has {self.num_layers}.",
            "Ask for one of those.",
        )
