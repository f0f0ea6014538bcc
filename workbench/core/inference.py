"""Single-shot inference split inside the layers: the parts of a Transformer, and which device has each (Galaxy+,
section III).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from workbench.core.errors import ConfigError
from workbench.core.proportions import proportional_parts
from workbench.core.schedule import Ranks

Paradigm = Literal["hybrid", "tensor", "sequence", "pipeline"]


class LayerWeights(NamedTuple):
    """The bytes of a device's weights of one layer: of the attention (both, in a decoder with cross-attention), of the
    feed-forward network, and of norms and output biases.
    """

    attention: int
    feed_forward: int
    undivided: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StackShape:
    """A stack of equal layers, an encoder's or a decoder's, described for the partition.

    num_units: the smallest parts of the attention that can be split: heads, or groups of heads that share keys and
    values.
    columns: number of columns of the first feed-forward matrix.  has_cross_attention: a third block between the other
    two.
    _bytes: bytes of one layer's weights in memory: for one unit of the self-attention (its slices of the four
    matrices), for one unit of the cross-attention, for one column (its slices of the two or three matrices), and for
    the weights on every device (norms, output biases).
    hidden_bytes: bytes of one token's hidden state in a message.  kv_unit_bytes: bytes of one token's keys and values
    of one unit in a message, 0 if they are as wide as the hidden state (twice hidden_bytes for all units).
    head_size: width of one head's queries, keys or values; 0: not known, so that FLOPs cannot be computed.
    heads_per_unit: 1, or the number of heads in a group.  keys_per_unit: the number of its heads of keys and values.
    """

    num_layers: int
    num_units: int
    hidden_size: int
    columns: int
    unit_bytes: int
    column_bytes: int
    layer_bytes: int = 0
    cross_unit_bytes: int = 0
    hidden_bytes: int = 0
    kv_unit_bytes: int = 0
    has_cross_attention: bool = False
    is_causal: bool = False
    head_size: int = 0
    heads_per_unit: int = 1
    keys_per_unit: int = 1
    is_gated: bool = False

    def weights(self, units: int, columns: int, connects: bool = True) -> LayerWeights:
        """Return the weights of a device with so many units and columns of a layer (Galaxy+ Eq. 8).  connects: whether
        it has norms and output biases.
        """
        attention = units * (self.unit_bytes + self.cross_unit_bytes)
        return LayerWeights(attention, columns * self.column_bytes, connects * self.layer_bytes)

    @property
    def whole(self) -> LayerWeights:
        """Return the weights of a whole layer: M_MHA and M_MLP of Galaxy+ Eq. 8, and the undivided weights."""
        return self.weights(self.num_units, self.columns)

    @property
    def attention_bytes(self) -> int:
        """Return the bytes of one layer's attention."""
        return self.whole.attention

    @property
    def feed_forward_bytes(self) -> int:
        """Return the bytes of one layer's feed-forward network."""
        return self.whole.feed_forward

    def kept_bytes(self, tokens: int, memory_tokens: int = 0) -> int:
        """Return the bytes of the keys and values that one unit of a layer keeps.

        tokens: number of tokens that the self-attention has read.  memory_tokens: number of tokens in the encoder's
        output.
        """
        per_token = self.kv_unit_bytes or 2 * self.hidden_bytes // self.num_units
        return per_token * (tokens + memory_tokens * self.has_cross_attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferencePlan:
    """Where one sequence is computed.  Position i of the plan is device ranks[i]; the ring visits the positions in
    order.

    paradigm: 'hybrid' (Galaxy+), 'tensor' (Megatron-LM: all-reduce, no sequence parallelism), 'sequence' (all weights
    on all devices, keys and values gathered), 'pipeline' (EdgeShard; Local with one device).
    units, columns: partition A and B of Galaxy+ Table III, in units of the attention and columns of the feed-forward
    network.  These are the first stack's; the second stack of an encoder-decoder is split in the same proportion.
    shares: relative parts of the sequence, partition S; `tokens(length)` converts them to numbers of tokens.
    schemes: 1 or 2 for each layer of all stacks ('hybrid' only).  layers: numbers of layers by position ('pipeline'
    only).
    overlap: whether transfers of tiles around the ring overlap with the GEMMs of tiles (section III-D).  both_ways:
    whether half of each tile travels in the opposite direction.
    tile_tokens: a tile is cut into pieces of at most this many tokens; 0: not cut.
    predicted_s: seconds of one sequence of `length` tokens, by the planner's cost model.
    """

    method: str
    paradigm: Paradigm
    ranks: Ranks
    units: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    schemes: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    overlap: bool = False
    both_ways: bool = False
    tile_tokens: int = 0
    length: int = 0
    predicted_s: float = 0.0
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        request = f"A plan of '{self.method}' on devices {self.ranks} was asked for."
        if not self.ranks or len(set(self.ranks)) != len(self.ranks):
            raise ConfigError(request, "A device is missing or named twice.", "Name each device once.")
        for name in ("units", "columns", "shares", "layers"):
            parts = getattr(self, name)
            if parts and not (len(parts) == len(self.ranks) and min(parts) >= 0 and 0 < sum(parts) < math.inf):
                raise ConfigError(
                    request, f"Its {name} are {parts}.", "Give one number of at least 0 for each device, not all 0."
                )
        if not {1, 2}.issuperset(self.schemes):
            raise ConfigError(request, f"Its schemes are {self.schemes}.", "Give each layer 1 or 2.")

    @classmethod
    def on_one_device(
        cls, rank: int, stacks: Sequence[StackShape], *, method: str = "local", length: int = 0
    ) -> InferencePlan:
        """Return the plan of the whole model on one device."""
        layers = sum(stack.num_layers for stack in stacks)
        return cls(method=method, paradigm="pipeline", ranks=(rank,), layers=(layers,), length=length)

    @property
    def num_positions(self) -> int:
        """Return the number of devices that take part."""
        return len(self.ranks)

    @property
    def configuration(self) -> tuple[int, int]:
        """Return [P, Q], the layers of scheme 1 and of scheme 2 (Galaxy+ Table V)."""
        return self.schemes.count(1), self.schemes.count(2)

    def tokens(self, length: int) -> tuple[int, ...]:
        """Return partition S of a sequence of `length` tokens: proportional to the shares, by largest remainder."""
        return proportional_parts(length, self.shares)

    def cut(self, stack: StackShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the units and the columns of each position in a stack; a second stack is split in the first's
        proportion.
        """
        return proportional_parts(stack.num_units, self.units), proportional_parts(stack.columns, self.columns)

    def takes_part(self, position: int) -> bool:
        """Return whether a position computes anything: the first one embeds, any other needs a part of the layers or
        of the tokens.
        """
        parts = {"hybrid": (self.units, self.columns, self.shares), "pipeline": (self.layers,)}.get(self.paradigm)
        return position == 0 or parts is None or any(part[position] for part in parts)

    def position_of(self, rank: int) -> int | None:
        """Return the position of a device, None if the plan does not use it."""
        return self.ranks.index(rank) if rank in self.ranks else None
