import random
from dataclasses import replace

import pytest
from galaxy_plus_builders import instance, shape

from tests.plans import inference_plan
from workbench.core.cluster import Link
from workbench.core.errors import ConfigError
from workbench.core.inference import StackShape
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile, PieceCost, StackTimes
from workbench.methods.galaxy_plus.planners import (
    LayerTimes,
    all_gather_s,
    capacity,
    stack_lengths,
    terms,
)
from workbench.methods.galaxy_plus.planners.equation9 import Equation9, cut_of
from workbench.methods.galaxy_plus.planners.terms import hop_lines, ring_s
from workbench.methods.galaxy_plus.prices import SequencePrice
from workbench.methods.galaxy_plus.profiles import as_profile, inference_of
from workbench.planners import Problem
from workbench_studies.papers.galaxy_plus.printed_times import price_plan

STACK = StackShape(
    num_layers=3, num_units=4, hidden_size=8, columns=16, unit_bytes=10, column_bytes=5, hidden_bytes=100
)


def by_hand() -> InferenceProfile:
    """Device 0 takes 1 s a token and unit or column, device 1 twice as long; attention 0.1 s a pair and unit."""

    def row(factor):
        each = PieceCost(token_unit_s=1.0 * factor)
        pieces = {kind: each for kind in ("QKV", "OUT", "UP", "DOWN")}
        pieces |= {"ATT": PieceCost(token_unit_s=0.1 * factor), "CONN": PieceCost(token_s=3.0 * factor)}
        return (StackTimes(pieces=pieces),)

    return InferenceProfile(model="hand", source="analytic", stacks=(STACK,), costs=(row(1), row(2)))


def hybrid(schemes, **parts):
    given = {"units": (3, 1), "columns": (10, 6), "shares": (6.0, 4.0)} | parts
    return inference_plan(schemes=schemes, length=10, **given)


def test_equations_5_to_7_and_10_by_hand():
    profile = by_hand()
    _, cluster = instance([1.0, 1.0], (STACK,), mbit_per_s=8e-3, latency_s=0.0)  # 1000 bytes/s: a token takes 0.1 s
    lengths = stack_lengths(profile, 10)
    fast, slow = (LayerTimes(profile, rank, 0, lengths) for rank in (0, 1))
    assert sum(fast.attention_s(3)) == pytest.approx(2 * 10 * 3 + 0.1 * 100 * 3)
    assert slow.mlp_s(columns=6) == pytest.approx(2 * 2 * 10 * 6)
    assert slow.mlp_s(tokens=4) == pytest.approx(2 * 2 * 4 * 16)
    assert fast.con_s(6) == pytest.approx(2 * 3 * 6)
    assert 1 / capacity(profile, 1, lengths) == pytest.approx(2 * (80 + 40 + 320 + 60))
    result = price_plan(hybrid((2, 1, 1)), profile, cluster)
    mha, tensor, sequence, con, ring = 90.0, 240.0, 256.0, 48.0, 2 * 0.6
    assert result.layers_s == pytest.approx(
        2 * (mha + tensor + con + 2 * ring) + mha + sequence + con + ring
    )  # Eq. 6 + Eq. 7
    assert result.ends_s == pytest.approx(2 * 0.4)


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0), (1,)])
def test_the_profile_of_some_devices_has_their_costs_in_their_order(ranks):
    profile = as_profile(by_hand())
    slower = {1: 3.0}
    part = profile.part(ranks, slower)
    for place, rank in enumerate(ranks):
        factor = slower.get(rank, 1.0)
        ours, whole = (inference_of(one).costs[at][0] for one, at in ((part, place), (profile, rank)))
        assert ours.pieces["QKV"].token_unit_s == pytest.approx(factor * whole.pieces["QKV"].token_unit_s)
        part_s, whole_s = (one.layers[at][0].times["F"].seconds for one, at in ((part, place), (profile, rank)))
        assert part_s[0] == pytest.approx([factor * second for second in whole_s[0]])
    assert len(inference_of(part).costs) == len(part.layers) == len(ranks)


def test_nothing_takes_no_time():
    profile = by_hand()
    times = LayerTimes(profile, 0, 0, (10,))
    assert sum(times.attention_s(0)) == times.mlp_s(columns=0) == times.mlp_s(tokens=0) == 0
    with pytest.raises(ConfigError, match="at least one token"):
        stack_lengths(profile, 0)


def test_a_ring_of_equal_links_takes_n_less_1_hops_of_the_largest_part():
    _, cluster = instance([1.0] * 4, (shape(1, 4),), mbit_per_s=8.0, latency_s=0.05)  # 1e6 bytes/s, 0.1 s a hop
    ranks = (0, 1, 2, 3)
    assert all_gather_s(cluster, ranks, (5, 5, 5, 5), 1000) == pytest.approx(3 * (0.1 + 0.005))
    assert ring_s(hop_lines(cluster, ranks, 1000), (2, 9, 2, 2), shift=1) == pytest.approx(3 * (0.1 + 0.009))
    assert all_gather_s(cluster, (2,), (15,), 1000) == 0
    # The one tile goes round; the others have nothing to send.
    assert all_gather_s(cluster, ranks, (0, 7, 0, 0), 1000) == pytest.approx(3 * 0.107)


def test_a_slow_link_is_busy_with_every_tile_but_one():
    _, cluster = instance(
        [1.0] * 3, (shape(1, 3),), mbit_per_s=8e6, latency_s=0.0, pairs={"d0>d1": Link(bytes_per_s=1000.0)}
    )
    # Over 0 -> 1 go the tiles of 0 and 2, never that of 1: tokens behind the slow link are cheap.
    assert all_gather_s(cluster, (0, 1, 2), (1, 8, 1), 100) == pytest.approx(0.2, rel=1e-3)
    assert all_gather_s(cluster, (0, 1, 2), (8, 1, 1), 100) == pytest.approx(0.9, rel=1e-3)
    # Of partial sums the tiles of 2 and 1 pass it, not that of 0, which starts at 1.
    assert ring_s(hop_lines(cluster, (0, 1, 2), 100), (8, 1, 1), shift=1) == pytest.approx(0.2, rel=1e-3)


def test_a_decoder_has_two_attention_blocks_and_three_rings():
    profile, cluster = instance([1e9, 1e9], (shape(2, 4), shape(2, 4, cross=True)))
    plan = inference_plan(units=(2, 2), columns=(512, 512), shares=(1, 1), schemes=(1, 1, 2, 2), length=8)
    _, free = instance([1e9, 1e9], (shape(2, 4),), mbit_per_s=1e12, latency_s=0.0)
    with_links_s, without_s = (Equation9(profile, links, (8, 4))(cut_of(plan, profile)) for links in (cluster, free))
    ring = all_gather_s(cluster, (0, 1), (4, 4), 1024)
    short = all_gather_s(cluster, (0, 1), (2, 2), 1024)
    # A gather and a scatter for each block that is not of scheme 2's network.
    assert with_links_s - without_s == pytest.approx(2 * (2 * 2 * ring + 2 * 2 * short))
    decoder, encoder = LayerTimes(profile, 0, 1, (8, 4)), LayerTimes(profile, 0, 0, (4, 4))
    assert sum(decoder.attention_s(2)) > sum(encoder.attention_s(2))


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("scheme", [1, 2])
def test_equation_9_is_the_simulation_of_a_layer_on_equal_devices_without_overlap(devices: int, scheme: int) -> None:
    """Of one more layer: how the first layer's tiles arrive is not part of Eq. 9."""
    stack = shape(6, 12)
    profile, cluster = instance([2e9] * devices, (stack,))
    parts = {"units": 12, "columns": stack.columns, "shares": 48.0}
    equal = {
        name: (whole / devices if name == "shares" else whole // devices,) * devices for name, whole in parts.items()
    }
    seconds = []
    for layers in (6, 7):
        problem = Problem(replace(profile, stacks=(replace(stack, num_layers=layers),)), cluster, sequence_length=48)
        plan = inference_plan(schemes=(scheme,) * layers, length=48, **equal)
        seconds.append(SequencePrice(problem, message_s=0.0).timeline(plan).makespan_s)
    assert seconds[1] - seconds[0] == pytest.approx(price_plan(plan, problem.profile, cluster).layers_s / 7, rel=1e-12)


def test_a_pipeline_takes_the_sum_of_its_stages_and_links_on_any_devices() -> None:
    profile, cluster = instance([2e9, 1e9, 5e8], (shape(6, 12),), mbit_per_s=[100.0, 500.0, 20.0])
    plan = inference_plan("pipeline", ranks=(1, 0, 2), layers=(1, 3, 2), length=48)
    price = SequencePrice(Problem(profile, cluster, sequence_length=48), message_s=0.0)
    assert price(plan) == pytest.approx(price_plan(plan, profile, cluster).total_s, rel=1e-12)


@pytest.mark.parametrize("shift", [0, 1])
def test_large_rings_end_when_small_ones_would(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    for size in (2, 5, terms.LARGE_RING):
        lines = [(draw.uniform(0, 0.01), draw.uniform(0, 1e-4)) for _ in range(size)]
        tokens = [draw.choice((0, draw.randint(1, 99))) for _ in range(size)]
        ends = []
        for least in (1, size + 1):  # by arrays, and by lists
            monkeypatch.setattr(terms, "LARGE_RING", least)
            ends.append(ring_s(lines, tokens, shift))
        assert ends[0] == ends[1]
