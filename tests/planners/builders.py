"""Small profiles and clusters for the planners' tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from tests.clusters import cluster_of, device
from tests.profiles import grid
from tests.simulated import simulated
from workbench.core.cluster import Cluster, Link
from workbench.core.plan import Plan, Stage
from workbench.core.profile import Bytes, Grid, LayerProfile, Profile
from workbench.planners import Problem
from workbench.planners.closed_form import ClosedForm, PhaseTimes
from workbench.schedules import hybrid_1f1b, insert_transfers, plan_costs

SEQUENCE_LENGTH = 4


def per_sample(seconds: float, fixed_s: float = 0.0) -> Grid:
    """Return fixed + per sample x batch, the same at any sequence length."""
    return grid(fixed_s + seconds, fixed_s + 2 * seconds, length=SEQUENCE_LENGTH)


def layer(forward_s: float = 1.0, backward_s: float = 1.0, *, fixed_s: float = 0.0, **sizes: int) -> LayerProfile:
    """Return a layer; sizes not given are small."""
    given = {
        "frozen_bytes": 1000,
        "trainable_bytes": 100,
        "output_bytes": Bytes(8),
        "gradient_bytes": Bytes(2),
        "context_bytes": Bytes(10),
        "tap_bytes": Bytes(5),
        "workspace_bytes": Bytes(3),
    } | sizes
    return LayerProfile(
        name="layer",
        times={
            "F": per_sample(forward_s, fixed_s),
            "SB": per_sample(backward_s, fixed_s),
            "STEP": grid(0.01, length=SEQUENCE_LENGTH),
        },
        **given,
    )


def profile_of(rows: list[list[LayerProfile]]) -> Profile:
    """Return a measured profile."""
    return Profile(model="toy", method="pac_plus", source="measured", layers=tuple(tuple(row) for row in rows))


def equal(num_layers: int, world_size: int, **sizes: int) -> tuple[Profile, Cluster]:
    """Return equal layers of 1 s forward and 1 s backward for each sample, on equal devices."""
    rows = [[layer(**sizes) for _ in range(num_layers)] for _ in range(world_size)]
    return profile_of(rows), cluster_of(world_size, name="equal")


def problem_of(
    profile: Profile, cluster: Cluster, batch_size: int = 1, micro_batches: int = 1, **settings: int
) -> Problem[Profile]:
    """Return the problem of a step of so many samples, all of SEQUENCE_LENGTH tokens."""
    sizes = {"batch_size": batch_size, "micro_batches": micro_batches, "sequence_length": SEQUENCE_LENGTH}
    return Problem(profile, cluster, **sizes | settings)


def closed_form(profile: Profile, cluster: Cluster, stages: Sequence[Stage], count: int) -> PhaseTimes:
    """Return Eq. 5-7 of stages whose shares sum to the micro-batch.  count: the micro-batches."""
    return ClosedForm(problem_of(profile, cluster))(stages, count)


def unequal(seed: int, *, num_layers: int, world_size: int, tight: bool) -> tuple[Profile, Cluster]:
    """Return random layers on devices of random speed, overhead, memory and links."""
    draw = random.Random(seed)
    speeds = [draw.choice((1.0, 0.5, 0.27, 0.13)) * draw.uniform(0.9, 1.1) for _ in range(world_size)]
    sizes = [
        {
            "frozen_bytes": draw.randrange(500, 2000),
            "trainable_bytes": draw.randrange(50, 150),
            "context_bytes": Bytes(draw.randrange(5, 40)),
            "output_bytes": Bytes(draw.randrange(4, 16)),
            "workspace_bytes": Bytes(draw.randrange(0, 20)),
        }
        for _ in range(num_layers)
    ]
    times = [(draw.uniform(0.5, 2), draw.uniform(0.2, 3), draw.uniform(0, 1)) for _ in range(num_layers)]
    rows = [
        [layer(f / v, b / v, fixed_s=c / v, **size) for (f, b, c), size in zip(times, sizes, strict=True)]
        for v in speeds
    ]
    total = sum(size["frozen_bytes"] + 4 * size["trainable_bytes"] for size in sizes)
    devices = tuple(
        device(
            f"d{rank}",
            memory_bytes=int(total * draw.uniform(0.35, 1.3)) if tight else 10**9,
            bytes_per_s=draw.choice((50.0, 200.0, 1e4)),
            latency_s=draw.choice((0.0, 0.1)),
        )
        for rank in range(world_size)
    )
    return profile_of(rows), Cluster(name="unequal", devices=devices)


def rough(seed: int, *, num_layers: int, world_size: int, tight: bool) -> tuple[Profile, Cluster]:
    """Return `unequal` with more that differs: times that fall with a sample more, links by pair, decoders' bytes per
    sample."""
    profile, cluster = unequal(seed, num_layers=num_layers, world_size=world_size, tight=tight)
    draw = random.Random(seed)
    falling = draw.random() < 0.7
    decoder_from = draw.randint(0, num_layers)
    per_sample = [
        {
            f"{name}_bytes": Bytes(0, draw.randrange(0, 60) if number >= decoder_from else 0)
            for name in ("output", "context", "gradient", "tap", "workspace")
        }
        for number in range(num_layers)
    ]
    for sizes in per_sample:  # what comes back was handed on
        sizes["output_bytes"] += sizes["gradient_bytes"]

    def measured() -> Grid:
        seconds = [draw.uniform(0.5, 3) if falling else 0.5 * batch + draw.random() / 4 for batch in (1, 2, 3, 4)]
        return grid(*seconds, length=SEQUENCE_LENGTH)

    rows = [
        [
            replace(
                one,
                times=one.times | {"F": measured()},
                **{name: getattr(one, name) + more for name, more in sizes.items()},
            )
            for one, sizes in zip(row, per_sample, strict=True)
        ]
        for row in profile.layers
    ]
    names = [one.name for one in cluster.devices]
    pairs = {
        f"{source}>{destination}": Link(bytes_per_s=draw.choice((20.0, 100.0, 1e3)), latency_s=draw.uniform(0, 0.3))
        for source in names
        for destination in names
        if source != destination and draw.random() < 0.5
    }
    return profile_of(rows), replace(cluster, pairs=pairs)


def env_b(num_layers: int = 12, *, memory_bytes: tuple[int, ...] = (10**9,) * 4) -> tuple[Profile, Cluster]:
    """Return equal layers on devices as unequal as PAC+'s Env. B: Nano-H, Nano-L, TX2-H, TX2-L, links of 1 MB/s."""
    speeds = (1.37, 0.95, 3.87, 2.53)
    rows = [[layer(1.0 / speed, 0.5 / speed) for _ in range(num_layers)] for speed in speeds]
    names = ("nano-h", "nano-l", "tx2-h", "tx2-l")
    return profile_of(rows), cluster_of(names, name="env-b", memory_bytes=list(memory_bytes), bytes_per_s=1e6)


def simulated_s(profile: Profile, cluster: Cluster, plan: Plan) -> float:
    """Return the simulated seconds of one mini-batch of PAC+'s first epoch."""
    sizes = (plan.micro_batch_size,) * plan.num_micro_batches
    schedule = insert_transfers(hybrid_1f1b(plan, sizes, world_size=cluster.world_size))
    costs = plan_costs(profile, cluster, plan, sizes=sizes, lengths=(SEQUENCE_LENGTH,) * len(sizes))
    return simulated(schedule, costs, memory=False).makespan_s
