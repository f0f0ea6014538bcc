"""Costs of layers on a device, stored, scaled to emulated devices, or computed from sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from workbench.core.cluster import Cluster
from workbench.core.names import FLOAT_TYPES, FloatType
from workbench.core.profile import Bytes, Layers, Profile
from workbench.methods.base import TIMED, Event, Notify, counting
from workbench.models.configuration import ModelFacts
from workbench.models.hub import has_weights
from workbench.models.quantization.config import QuantizationConfig
from workbench.models.quantization.stored import embedding_block_size
from workbench.models.stack import LayerStack
from workbench.models.stored_tensors import made_up_weights
from workbench.profiler.analytic import NumberFormat
from workbench.profiler.cache import cached
from workbench.profiler.descriptions import ModelDescription
from workbench.profiler.timing import CoreShare, core_share, counted_timings, tiny

TARGET_LENGTH = 1
"""Tokens of a decoder: classification and regression need only the first."""

T = TypeVar("T")
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
SEQUENCE_LENGTHS = (8, 16, 32, 64)


def lengths_up_to(max_length: int, lengths: tuple[int, ...], *, reads_images: bool) -> tuple[int, ...]:
    """Return the sequence lengths to measure.

    reads_images: whether the model reads pictures, which all have the same length.
    """
    return (max_length,) if reads_images else (*(length for length in lengths if length < max_length), max_length)


def profiled_length(longest: int, most: int) -> int:
    """Return the largest sequence length to measure: the next power of two, so that one profile serves data of many
    lengths.

    longest: tokens of the longest sample.  most: tokens that the model accepts.  Grid interpolates between the measured
    lengths.
    """
    return max(longest, min(most, 1 << (longest - 1).bit_length()))


def crossing_bytes(stack: LayerStack, index: int, side_width: int = 0) -> dict[str, Bytes]:
    """Return the bytes that cross the boundary after a layer, in both directions, and its scratch, as fields of
    LayerProfile.
    """
    hidden = 4 * stack.hidden_size
    decoder_tokens = TARGET_LENGTH * (stack.num_encoder_layers is not None and index >= stack.num_encoder_layers)
    side = 4 * side_width
    return bytes_of_tokens(decoder_tokens, output=hidden + side, gradient=side or hidden, workspace=4 * hidden)


def bytes_of_tokens(decoder_tokens: int, **sizes: int) -> dict[str, Bytes]:
    """Return bytes of each token, such as output=4, as fields of LayerProfile.

    decoder_tokens: number of the target's tokens, counted with each sample.
    """
    return {f"{quantity}_bytes": Bytes(size, decoder_tokens * size) for quantity, size in sizes.items()}


LEAST_CORE_SHARE = 0.8
"""A measurement that had a core for a smaller share of its time is repeated once, and then not stored."""
HOST_MODELS = ("", "laptop-core")
"""Models of devices that are defined by their share of this host."""


def is_measured_here(model: str, cluster: Cluster) -> bool:
    """Return whether a simulation's costs are measured on this host: the model has weights, and every device is a share
    of this host.  All others are computed from sizes.
    """
    return has_weights(model) and all(device.model in HOST_MODELS and device.host_share for device in cluster.devices)


def cached_measurement(
    key: Mapping[str, Any], kind: type[T], measure: Callable[[], T], words: str, notify: Notify, *, refresh: bool
) -> T:
    """Return what was measured on this host under a key, or measure and store it.  words: what it is stored for.

    Measurements with the smallest settings are stored separately, and always: their numbers mean nothing.
    """
    share = 1.0

    def had_core() -> bool:
        return share >= LEAST_CORE_SHARE or tiny()

    def measured_once() -> T:
        nonlocal share
        with made_up_weights(), counted_timings(counting(notify, TIMED)), core_share(CoreShare()) as counted:
            measurement = measure()
        share = counted.value
        return measurement

    def measured() -> T:
        message = f"Profiling this machine (stored for {words})"
        notify(Event("phase", message=message, stage="profile"))
        measurement = measured_once()
        if had_core():
            return measurement
        message = f"Profiling this machine again: it had a core for {share:.0%} of the time only"
        notify(Event("phase", message=message, stage="profile"))
        return measured_once()

    def distrust() -> str:
        advice = "Its speeds may be wrong. End other programs; the next call measures again."
        return "" if had_core() else f"it had a core for {share:.0%} of its time only. {advice}"

    def wait() -> None:
        message = "Waiting for another run, which measures this machine"
        notify(Event("phase", message=message, stage="profile"))

    key = {**key, "smallest": True} if tiny() else key
    measurement, note = cached(key, measured, kind, refresh=refresh, wait=wait, distrust=distrust)
    notify(Event("note", message=note))
    return measurement


def scale_to_cluster(host_layers: Layers, cluster: Cluster, *, model: str, method: str) -> Profile:
    """Return every emulated device's profile: the host's, divided by the device's share of a core.

    Raises ConfigError if a device has no host_share.
    """
    rows = tuple(tuple(layer.scaled(1 / share) for layer in host_layers) for share in cluster.host_shares())
    return Profile(model=model, method=method, source="scaled", layers=rows)


def number_format(
    facts: ModelFacts,
    compute: FloatType,
    stored: QuantizationConfig | None = None,
    *,
    taps: tuple[float, float] = (4.0, 4.0),
) -> NumberFormat:
    """Return the analytic costs' number format.

    compute: dtype of hidden states.  stored: how the weights are stored; None: like hidden states.  taps: bytes of a
    cached value, in memory and on the disk.
    """
    notes = []
    if compute != "float32":
        notes.append(f"The catalogue states speeds only in float32: computing in {compute} is taken to be as fast.")
    sizes = {
        "tap_bytes": taps[0],
        "stored_tap_bytes": taps[1],
        "value_bytes": 2.0 if compute in ("float16", "bfloat16") else 4.0,
    }
    if stored is None:
        return NumberFormat(
            **dict.fromkeys(("matrix_bytes", "table_bytes"), sizes["value_bytes"]), **sizes, notes=tuple(notes)
        )
    tables = stored.embedding_storage
    block = None if tables in FLOAT_TYPES else embedding_block_size(facts.hidden_size, stored.block_size)
    if stored.unpack_flops:
        cost = f"{stored.unpack_flops:.0f} operations, as measured on an x86-64 processor"
        notes.append(
            f"Unpacking a weight from {stored.storage} is taken to cost {cost}: the catalogue does not state it."
        )
    return NumberFormat(
        matrix_bytes=stored.bytes_of(stored.storage),
        table_bytes=stored.bytes_of(tables, block),
        unpack_flops=stored.unpack_flops,
        notes=tuple(notes),
        **sizes,
    )


def describe_facts(facts: ModelFacts) -> ModelDescription:
    """Return a loadable model's sizes in the form that the analytic costs need."""
    return ModelDescription(
        name=facts.name,
        kind="encoder-decoder" if facts.num_encoder_layers is not None else "decoder" if facts.is_causal else "encoder",
        num_layers=facts.num_encoder_layers or facts.num_layers,
        hidden=facts.hidden_size,
        heads=facts.num_heads,
        kv_heads=facts.num_key_value_heads,
        feed_forward=facts.feed_forward_size,
        # A picture's model has no words, but as many rows: those that project the patches.
        vocab=facts.vocabulary_size or max(1, facts.embedding_parameters // facts.hidden_size - facts.max_length),
        gated=facts.is_gated,
        positions=facts.max_length,
    )
