"""Small profiles and clusters for the planners' tests."""

from __future__ import annotations

import random

from workbench.core.cluster import Cluster, Device, Link
from workbench.core.profile import Grid, LayerProfile, Profile

SEQUENCE_LENGTH = 4


def grid(per_sample_s: float, fixed_s: float = 0.0) -> Grid:
    """Return fixed + per sample x batch, the same at any sequence length."""
    return Grid(batch_sizes=(1, 2), sequence_lengths=(SEQUENCE_LENGTH,), seconds=((fixed_s + per_sample_s,), (fixed_s + 2 * per_sample_s,)))


def layer(forward_s: float = 1.0, backward_s: float = 1.0, *, fixed_s: float = 0.0, **sizes: int) -> LayerProfile:
    """Return a layer; sizes not given are small."""
    given = {
        "frozen_bytes": 1000,
        "trainable_bytes": 100,
        "output_bytes_per_token": 8,
        "gradient_bytes_per_token": 2,
        "context_bytes_per_token": 10,
        "tap_bytes_per_token": 5,
        "workspace_bytes_per_token": 3,
    } | sizes
    return LayerProfile(
        name="layer",
        times={
            "F": grid(forward_s, fixed_s),
            "SB": grid(backward_s, fixed_s),
            "STEP": Grid(batch_sizes=(1,), sequence_lengths=(SEQUENCE_LENGTH,), seconds=((0.01,),)),
        },
        **given,
    )


def device(name: str, *, memory_bytes: int = 10**9, bytes_per_s: float = 1e9, latency_s: float = 0.0) -> Device:
    """Return a device; its speed is in the profile."""
    return Device(name=name, flops_per_s=1e9, memory_bytes=memory_bytes, link=Link(bytes_per_s=bytes_per_s, latency_s=latency_s))


def profile_of(rows: list[list[LayerProfile]]) -> Profile:
    """Return a measured profile."""
    return Profile(model="toy", method="pac_plus", source="measured", layers=tuple(tuple(row) for row in rows))


def equal(num_layers: int, world_size: int, **sizes: int) -> tuple[Profile, Cluster]:
    """Return equal layers of 1 s forward and 1 s backward for each sample, on equal devices."""
    cluster = Cluster(name="equal", devices=tuple(device(f"d{rank}") for rank in range(world_size)))
    return profile_of([[layer(**sizes) for _ in range(num_layers)] for _ in range(world_size)]), cluster


def unequal(seed: int, *, num_layers: int, world_size: int, tight: bool) -> tuple[Profile, Cluster]:
    """Return random layers on devices of random speed, overhead, memory and links."""
    draw = random.Random(seed)
    speeds = [draw.choice((1.0, 0.5, 0.27, 0.13)) * draw.uniform(0.9, 1.1) for _ in range(world_size)]
    sizes = [
        {
            "frozen_bytes": draw.randrange(500, 2000),
            "trainable_bytes": draw.randrange(50, 150),
            "context_bytes_per_token": draw.randrange(5, 40),
            "output_bytes_per_token": draw.randrange(4, 16),
            "workspace_bytes_per_token": draw.randrange(0, 20),
        }
        for _ in range(num_layers)
    ]
    times = [(draw.uniform(0.5, 2), draw.uniform(0.2, 3), draw.uniform(0, 1)) for _ in range(num_layers)]
    rows = [[layer(f / v, b / v, fixed_s=c / v, **size) for (f, b, c), size in zip(times, sizes, strict=True)] for v in speeds]
    whole = sum(size["frozen_bytes"] + 4 * size["trainable_bytes"] for size in sizes)
    devices = tuple(
        device(
            f"d{rank}",
            memory_bytes=int(whole * draw.uniform(0.35, 1.3)) if tight else 10**9,
            bytes_per_s=draw.choice((50.0, 200.0, 1e4)),
            latency_s=draw.choice((0.0, 0.1)),
        )
        for rank in range(world_size)
    )
    return profile_of(rows), Cluster(name="unequal", devices=devices)
