"""Single-shot inference split inside the layers: the parts of a Transformer and their costs (Galaxy+, section III)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from operator import mul
from typing import Literal, NamedTuple

from workbench.core.errors import ConfigError
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
        """Return the weights of a whole layer: M_MHA and M_MLP of Galaxy+ Eq. 8, and what is not divided."""
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

    @property
    def query_width(self) -> int:
        """Return the width of one token's queries in one unit.  Raises ConfigError if the heads' size is not known."""
        if self.head_size < 1:
            request = f"The FLOPs of a stack of {self.num_layers} layers were asked for."
            raise ConfigError(request, f"Its heads are {self.head_size} wide.", "Give head_size, at least 1.")
        return self.heads_per_unit * self.head_size

    def unit_width(self, kind: str) -> int:
        """Return the width of the part of a product's weights in one unit or column; the other dimension is the hidden
        size.
        """
        query, both = self.query_width, 2 * self.keys_per_unit * self.head_size
        return {
            "QKV": query + both,
            "OUT": query,
            "CQ": query,
            "CKV": both,
            "COUT": query,
            "UP": 1 + self.is_gated,
            "DOWN": 1,
        }[kind]

    def unit_flops(self, kind: str) -> float:
        """Return the FLOPs of one unit for one token; for ATT and CATT for one query-key pair.  The kinds are those of
        StackCosts.
        """
        if kind in ("ATT", "CATT"):
            return 4.0 * self.query_width
        return 2.0 * self.hidden_size * self.unit_width(kind)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of a layer's operations that are split by units or columns."""
        crossed = ("CQ", "CKV", "CATT", "COUT") if self.has_cross_attention else ()
        return ("QKV", "ATT", "OUT", *crossed, "UP", "DOWN")

    def layer_flops(self, tokens: int, memory_tokens: int = 0) -> float:
        """Return the FLOPs of one layer.

        memory_tokens: number of tokens of the encoder's output, for cross-attention.
        """
        flops = 0.0
        for kind in self.kinds:
            units = self.columns if kind in ("UP", "DOWN") else self.num_units
            count = {"ATT": tokens * tokens, "CATT": tokens * memory_tokens, "CKV": memory_tokens}.get(kind, tokens)
            flops += self.unit_flops(kind) * units * count
        return flops


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
class StackCosts:
    """Seconds of the operations of one layer of a stack on one device, by operation kind.

    Kinds: QKV, ATT, OUT (units: heads or groups), CQ, CKV, CATT, COUT (the cross-attention's), UP, DOWN (units:
    columns), CONN and ADD (units: 1), EMB and HEAD (units: 1; the whole model's, with the stack that they belong to).
    """

    pieces: dict[str, PieceCost]

    def seconds(self, kind: str, tokens: int, units: int = 1) -> float:
        """Return the seconds of an operation, 0 for a kind that the stack does not have."""
        cost = self.pieces.get(kind)
        return 0.0 if cost is None else cost.seconds(tokens, units)

    def scaled(self, factor: float) -> StackCosts:
        """Return the costs on a device that is `factor` times slower."""
        return StackCosts(pieces={kind: cost.scaled(factor) for kind, cost in self.pieces.items()})


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
    costs: tuple[tuple[StackCosts, ...], ...]
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


class Run(NamedTuple):
    """Equal layers: their shape, their number, and of one of them each position's units and the weights it has."""

    shape: StackShape
    num_layers: int
    units: tuple[int, ...]
    weights: tuple[LayerWeights, ...]


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

    def runs(self, stacks: Sequence[StackShape], *, full_everywhere: bool = False) -> Iterator[Run]:
        """Yield runs of equal layers in order, with the weights that each position has (Galaxy+ Eq. 8).

        A position without tokens has only its own columns of a scheme-2 layer, unless full_everywhere.  Norms and
        output biases of all layers are on each position that takes part, in a pipeline on those with the layer.
        """
        first, everywhere = 0, range(self.num_positions)
        is_pipeline, is_cut = self.paradigm == "pipeline", self.paradigm in ("hybrid", "tensor")
        kinds = (
            [position for position, count in enumerate(self.layers) for _ in range(count)]
            if is_pipeline
            else self.schemes
        )
        for shape in stacks:
            last = first + shape.num_layers
            cut = (
                self.cut(shape)
                if is_cut
                else ((shape.num_units,) * len(everywhere), (shape.columns,) * len(everywhere))
            )
            for kind, run in groupby(kinds[first:last] if kinds else (1,) * shape.num_layers):
                units, columns = cut
                if is_pipeline:
                    has = [position == kind for position in everywhere]
                    units, columns = (tuple(map(mul, has, parts)) for parts in cut)
                else:
                    has = [self.takes_part(position) for position in everywhere]
                    if kind == 2:
                        is_full = [full_everywhere or share > 0 for share in self.shares]
                        columns = tuple(
                            shape.columns if full else part for full, part in zip(is_full, columns, strict=True)
                        )
                yield Run(shape, len(list(run)), units, tuple(map(shape.weights, units, columns, has)))
            first = last

    def position_of(self, rank: int) -> int | None:
        """Return the position of a device, None if the plan does not use it."""
        return self.ranks.index(rank) if rank in self.ranks else None


def proportional_parts(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Split `total` items in proportion to the weights, by largest remainder; among equals the first gets more."""
    total_weight = math.fsum(weights)
    if not 0 < total_weight < math.inf or min(weights) < 0:
        raise ConfigError(
            f"Dividing {total} was asked for.",
            f"The weights are {tuple(weights)}.",
            "Give numbers of at least 0, not all 0.",
        )
    if total_weight == total and not any(weight % 1 for weight in weights):
        return tuple(map(int, weights))
    exact = [total * weight / total_weight for weight in weights]
    parts = [math.floor(part + 1e-9) for part in exact]
    by_remainder = sorted(
        (index for index in range(len(weights)) if weights[index] > 0), key=lambda i: (round(parts[i] - exact[i], 9), i)
    )
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return tuple(parts)
