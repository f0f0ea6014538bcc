"""From one host's measured layers to every emulated device's, and from a model's facts to the analytic costs' description."""

from __future__ import annotations

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.profile import LayerProfile, Profile
from workbench.models.facts import ModelFacts
from workbench.profiler.descriptions import ModelDescription


def scale_to_cluster(host_layers: tuple[LayerProfile, ...], cluster: Cluster, *, model: str) -> Profile:
    """Return every emulated device's profile: the host's, divided by the device's share of a core.

    Raises ConfigError if a device has no host_share.
    """
    for device in cluster.devices:
        if device.host_share is None:
            raise ConfigError(
                f"Cluster '{cluster.name}' was to be emulated here.",
                f"Device '{device.name}' has no host_share.",
                "Give each device one (0.5 is half as fast as a core of this machine), or use --mode simulate.",
            )
    return Profile(
        model=model,
        method="pac_plus",
        source="scaled",
        layers=tuple(tuple(layer.scaled(1 / (device.host_share or 1.0)) for layer in host_layers) for device in cluster.devices),
    )


def describe_facts(facts: ModelFacts) -> ModelDescription:
    """Return a loadable model's sizes as the analytic costs ask for them."""
    return ModelDescription(
        name=facts.name,
        kind="encoder-decoder" if facts.num_encoder_layers is not None else "decoder" if facts.is_causal else "encoder",
        num_layers=facts.num_encoder_layers or facts.num_layers,
        hidden=facts.hidden_size,
        heads=facts.num_heads,
        kv_heads=facts.num_key_value_heads,
        feed_forward=facts.feed_forward_size,
        vocab=facts.vocabulary_size,
        gated=facts.is_gated,
        positions=facts.max_length,
    )
