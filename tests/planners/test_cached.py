import itertools
import math
import random

import pytest

from tests.clusters import cluster_of, device
from tests.plans import stages
from tests.profiles import grid
from workbench.core.cluster import Cluster
from workbench.core.costs import collective_s
from workbench.core.errors import ConfigError, PlanError
from workbench.core.profile import Bytes, LayerProfile, trainable_bytes
from workbench.core.schedule import ALLREDUCE
from workbench.planners import hybrid, plan_cached

from .builders import SEQUENCE_LENGTH, per_sample, problem_of, profile_of


def cached_layer(
    sample_s: float, *, fixed_s: float = 0.0, step_s: float = 0.0, trainable_bytes: int = 100
) -> LayerProfile:
    """Return a layer whose backbone is so slow and large that a mistaken use of it would show."""
    return LayerProfile(
        name="layer",
        times={
            "F": per_sample(1e6),
            "LOAD": per_sample(0.25 * sample_s),
            "SF": per_sample(0.25 * sample_s, fixed_s),
            "SB": per_sample(0.5 * sample_s),
            "STEP": grid(step_s, length=SEQUENCE_LENGTH),
        },
        frozen_bytes=10**12,
        trainable_bytes=trainable_bytes,
        output_bytes=Bytes(8),
        context_bytes=Bytes(10),
        tap_bytes=Bytes(5),
    )


def cached_step_s(profile, cluster, stage):
    """Return the predicted seconds of one cached step with the stage's shares."""
    slowest = max(hybrid._sample_s(profile, share.rank, share.samples, SEQUENCE_LENGTH) for share in stage.shares)
    step = max(hybrid._step_s(profile, rank, SEQUENCE_LENGTH) for rank in stage.ranks)
    return slowest + collective_s(cluster, ALLREDUCE, stage.ranks, trainable_bytes(profile.layers[0])) + step


def shares(stage):
    return {share.rank: share.samples for share in stage.shares}


def test_shares_follow_speed():
    profile = profile_of([[cached_layer(1.0)] * 2, [cached_layer(2.0)] * 2])
    cluster = cluster_of("ab")
    stage = plan_cached(problem_of(profile, cluster, 12))
    assert (stage.start, stage.stop, shares(stage)) == (0, 2, {0: 8, 1: 4})
    assert cached_step_s(profile, cluster, stage) == pytest.approx(16, rel=1e-3)


def test_the_plan_is_the_best_of_all_divisions():
    draw = random.Random(4)
    left_out = 0
    for _ in range(60):
        count, batch = draw.randint(1, 4), draw.randint(1, 6)
        rows = [
            [
                cached_layer(
                    draw.uniform(0.5, 3), fixed_s=draw.choice((0, draw.uniform(0, 4))), step_s=draw.uniform(0, 1)
                )
            ]
            for _ in range(count)
        ]
        devices = [
            device(
                f"d{i}",
                bytes_per_s=draw.choice((20.0, 100.0, 1e6)),
                latency_s=draw.uniform(0, 0.2),
                memory_bytes=draw.choice((650, 10**6)),
            )
            for i in range(count)
        ]
        profile, cluster = profile_of(rows), Cluster(name="c", devices=tuple(devices))
        best = math.inf
        for division in itertools.product(range(batch + 1), repeat=count):
            if sum(division) != batch:
                continue
            if any(
                n and 400 + n * SEQUENCE_LENGTH * 15 > cluster.devices[rank].memory_bytes
                for rank, n in enumerate(division)
            ):
                continue
            used = {rank: n for rank, n in enumerate(division) if n}
            best = min(best, cached_step_s(profile, cluster, stages((1, used))[0]))
        if math.isinf(best):
            with pytest.raises(PlanError):
                plan_cached(problem_of(profile, cluster, batch))
            continue
        stage = plan_cached(problem_of(profile, cluster, batch))
        assert sum(shares(stage).values()) == batch
        assert min(shares(stage).values()) >= 1
        assert cached_step_s(profile, cluster, stage) == pytest.approx(best)
        left_out += len(stage.shares) < min(count, batch)
    assert left_out > 5


def test_many_devices_are_taken_fastest_first():
    profile = profile_of([[cached_layer(1.0 + (rank % 4))] for rank in range(12)])
    cluster = cluster_of(12)
    stage = plan_cached(problem_of(profile, cluster, 24))
    assert sum(shares(stage).values()) == 24
    assert {0, 4, 8} <= set(stage.ranks)
    assert shares(stage)[0] > shares(stage).get(3, 0)


def test_adapters_that_fit_nowhere_are_refused_with_numbers():
    profile = profile_of([[cached_layer(1.0)]])
    with pytest.raises(
        PlanError, match=r"Device 'a' has 300 bytes; in the cached epochs the adapters and one sample need 460 bytes"
    ):
        plan_cached(problem_of(profile, cluster_of("a", memory_bytes=300), 1))


def test_an_empty_batch_is_refused():
    profile = profile_of([[cached_layer(1.0)]])
    with pytest.raises(ConfigError):
        plan_cached(problem_of(profile, cluster_of("a"), 0))


def test_only_the_named_devices_take_part():
    profile = profile_of([[cached_layer(1.0)]] * 3)
    cluster = cluster_of("abc")
    assert shares(plan_cached(problem_of(profile, cluster, 4), ranks=(2, 1))) == {1: 2, 2: 2}
