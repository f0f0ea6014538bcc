"""A job's profile: this host's measured operations scaled to each device, or the catalogue's figures (Galaxy+, section
III-C).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cache, partial

import torch

from workbench.core.cluster import Cluster, Device, Factors, Link
from workbench.core.errors import ConfigError
from workbench.core.profile import Bytes, Grid, LayerProfile, Layers, Profile
from workbench.methods.base import Notify
from workbench.methods.common.scaling import cached_measurement
from workbench.methods.galaxy_plus.costs import analytic_from, query_width
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.methods.galaxy_plus.options import METHOD
from workbench.methods.galaxy_plus.planners import stack_lengths
from workbench.methods.galaxy_plus.planners.terms import LayerTimes
from workbench.methods.galaxy_plus.prepare import PreparedJob, shape_of_picture
from workbench.methods.galaxy_plus.timing import SHARES, TOKENS, Makers, measure_inference
from workbench.models.configuration import model_facts
from workbench.models.sharding import (
    LayerSlices,
    ModelLayout,
    ModelShard,
    ShardSpec,
    WeightSource,
    What,
    layout_facts,
    model_layout,
    open_weights,
)
from workbench.profiler.timing import Call

BUDGET_S = 4.0


def measure_host(
    layout: ModelLayout,
    source: WeightSource,
    *,
    longest: int,
    output: What,
    shares: Sequence[float] = SHARES,
    budget_s: float = BUDGET_S,
) -> InferenceProfile:
    """Return the cost of each operation of each stack on one core of this host.

    longest: tokens of the longest request.  shares: fractions of a layer's units and columns to time.
    """
    tokens = (*(count for count in TOKENS if count < longest), longest)
    if output == "last":
        tokens = (1, *tokens)  # a text grows by one token at a time
    first_bytes, last_bytes = layout.end_bytes
    return measure_inference(
        layout.name,
        layout.stacks,
        [stack_makers(layout, source, stack, output=output) for stack in range(len(layout.parts))],
        tokens=tuple(dict.fromkeys(tokens)),
        shares=shares,
        budget_s=budget_s,
        first_bytes=first_bytes,
        last_bytes=last_bytes,
    )


def stack_makers(layout: ModelLayout, source: WeightSource, stack: int, *, output: What) -> Makers:
    """Return the operations to time in a stack: those of its first layer, on a device with a given number of its units
    or columns.
    """
    part, hidden_size = layout.parts[stack], layout.hidden_size
    layer = layout.blocks[part.first_block].layer
    numbers = {block.kind: block.number for block in layout.blocks if block.layer == layer}
    attention, cross, feed_forward = numbers["attention"], numbers.get("cross_attention", -1), numbers["feed_forward"]

    @cache
    def shard(units: int = 0, columns: int = 0, ends: bool = False) -> ModelShard:
        slices = LayerSlices(units=_range(units), columns=_range(columns), own_columns=columns)
        layers = tuple(slices if index == layer else LayerSlices() for index in range(layout.num_layers))
        return ModelShard(layout, ShardSpec(layers=layers, has_ends=ends, connects_all=False), source)

    def hidden(tokens: int) -> torch.Tensor:
        return torch.randn(1, tokens, hidden_size)

    def attend(tokens: int, units: int) -> Call:
        part = shard(units)
        with torch.inference_mode():
            projected = part.qkv(attention, hidden(tokens))
        begin = partial(part.begin, tokens, target_length=tokens)  # work done once for a request is included
        return begin, lambda run: part.attend(attention, (projected,), run)

    def cross_attend(tokens: int, units: int) -> Call:
        part = shard(units)
        with torch.inference_mode():
            query, memory = part.qkv(cross, hidden(tokens)), part.cross_keys_values(cross, hidden(tokens))
        return partial(part.begin, tokens, target_length=tokens), lambda run: part.cross_attend(
            cross, (query,), (memory,), run
        )

    def product(function: str, number: int, *, columns: bool = False, width: int = 0) -> Callable[[int, int], Call]:
        def make(tokens: int, units: int) -> Call:
            part = shard(columns=units) if columns else shard(units)
            inputs = torch.randn(1, tokens, width * units) if width else hidden(tokens)
            return partial(getattr(part, function), number, inputs)

        return make

    def connect(tokens: int, units: int) -> Call:
        return partial(shard(units=1).connect, attention, hidden(tokens), hidden(tokens))

    def add(tokens: int, units: int) -> Call:
        products, arrived = hidden(tokens), hidden(tokens)
        return lambda: arrived.add_(products)

    def embed(tokens: int, units: int) -> Call:
        ids = torch.ones(1, tokens, dtype=torch.int64)
        if layout.family.reads_images:
            ids = torch.zeros(1, shape_of_picture(layout)[0], shape_of_picture(layout)[1], dtype=torch.uint8)
        return partial(shard(units=1, ends=True).embed, stack, ids)

    makers: dict[str, Callable[[int, int], Call]] = {
        "QKV": product("qkv", attention),
        "ATT": attend,
        "OUT": product("out", attention, width=query_width(part.shape)),
        "UP": product("up", feed_forward, columns=True),
        "DOWN": product("down", feed_forward, columns=True, width=1),
        "CONN": connect,
        "ADD": add,
        "ENTER": lambda tokens, units: partial(shard(units=1).enter, attention, hidden(tokens)),
        "EMB": embed,
        "HEAD": lambda tokens, units: partial(shard(units=1, ends=True).head, hidden(tokens), output),
    }
    if part.shape.has_cross_attention:
        makers |= {
            "CQ": product("qkv", cross),
            "CKV": product("cross_keys_values", cross),
            "CATT": cross_attend,
            "COUT": product("out", cross, width=part.shape.head_size),
        }
    return makers


def _range(count: int) -> tuple[tuple[int, int], ...]:
    return ((0, count),) if count else ()


LENGTHS = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostQuestion:
    """The parameters of a host profile.  longest: number of tokens of the longest request.  what: the head's output."""

    model: str
    longest: int
    what: What = "hidden"

    @classmethod
    def of(cls, prepared: PreparedJob) -> HostQuestion:
        """Return the parameters for a job."""
        output: What = "last" if prepared.options.generate else "hidden"
        return cls(model=prepared.job.model, longest=prepared.longest, what=output)


def of_devices(rows: Sequence[InferenceProfile]) -> InferenceProfile:
    """Return the costs on all devices.  rows: each device's own profile, which has only this device."""
    return replace(rows[0], costs=tuple(row.costs[0] for row in rows))


def host_profile(question: HostQuestion, notify: Notify, *, refresh: bool = False) -> InferenceProfile:
    """Return the cost of each operation on one unslowed core of this host, measured now or stored earlier."""
    # The name alone may be a folder that contains another model by now.
    key = {
        "inference": 2,
        "model": question.model,
        "shape": asdict(model_facts(question.model)),
        "longest": question.longest,
        "head": question.what,
    }

    def measure() -> InferenceProfile:
        layout = model_layout(question.model)
        with closing(open_weights(question.model, layout=layout)) as source:
            return measure_host(layout, source, longest=question.longest, output=question.what)

    words = f"{question.model} and this length"
    return replace(
        cached_measurement(key, InferenceProfile, measure, words, notify, refresh=refresh), model=question.model
    )


def made_up_host(model: str, flops_per_s: float) -> InferenceProfile:
    """Return the profile of an imaginary core with this many FLOP/s, slower than this host's.

    With it, a tiny model takes as long on emulated devices as a large one would, and the host computes little.  This is
    for tests and for trying out the portal; the times belong to no real device.
    """
    device = Device(name="host", flops_per_s=flops_per_s, memory_bytes=1 << 40, link=Link(bytes_per_s=1e9))
    return analytic_profile(model, Cluster(name="host", devices=(device,)))


def analytic_profile(model: str, cluster: Cluster, vocabulary: int = 0) -> InferenceProfile:
    """Return a model's costs computed from the devices' FLOP/s.  vocabulary: rows of the head, 0 for none."""
    layout = layout_facts(model)
    first_bytes, last_bytes = layout.end_bytes
    return analytic_from(
        model, layout.stacks, cluster, first_bytes=first_bytes, last_bytes=last_bytes, vocabulary=vocabulary
    )


@dataclass(frozen=True, kw_only=True)
class GalaxyPlusProfile(Profile):
    """The costs of whole layers, as every method has them, and those of the operations inside them."""

    inference: InferenceProfile

    def part(self, ranks: Sequence[int], factors: Factors | None = None) -> GalaxyPlusProfile:
        """Return the profile of the given devices, in this order.  factors: the measured slow-down of some devices."""
        profile, inference = super().part(ranks, factors), self.inference
        for rank, factor in (factors or {}).items():
            inference = inference.slowed(rank, factor)
        inference = replace(inference, costs=tuple(inference.costs[rank] for rank in ranks))
        return replace(self, layers=profile.layers, inference=inference)


def inference_of(profile: Profile) -> InferenceProfile:
    """Return a profile's costs of the operations inside the layers."""
    if not isinstance(profile, GalaxyPlusProfile):
        raise ConfigError(
            f"Planning by a profile of '{profile.method}' was asked for.",
            "It does not say what the operations inside a layer cost.",
            f"Make it with method {METHOD}.",
        )
    return profile.inference


def as_profile(inference: InferenceProfile) -> Profile:
    """Return the profile in the form that all methods use: seconds of each whole layer on each device, for one sequence
    at a time.
    """
    rows = tuple(_layers(inference, rank) for rank in range(inference.world_size))
    return GalaxyPlusProfile(
        model=inference.model, method=METHOD, source=inference.source, layers=rows, inference=inference
    )


def _layers(inference: InferenceProfile, rank: int) -> Layers:
    layers: list[LayerProfile] = []
    for stack, shape in enumerate(inference.stacks):
        seconds = [LayerTimes(inference, rank, stack, stack_lengths(inference, length)).whole_s() for length in LENGTHS]
        grid = Grid(
            batch_sizes=(1, 2),
            sequence_lengths=LENGTHS,
            seconds=(tuple(seconds), tuple(2 * duration_s for duration_s in seconds)),
        )
        layers += [
            LayerProfile(
                name=f"layer {number}",
                times={"F": grid},
                frozen_bytes=sum(shape.whole),
                trainable_bytes=0,
                output_bytes=Bytes(shape.hidden_bytes),
                workspace_bytes=Bytes(inference.working_bytes_per_token),
            )
            for number in range(len(layers), len(layers) + shape.num_layers)
        ]
    return tuple(layers)
