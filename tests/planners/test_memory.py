import contextlib
from dataclasses import replace

import pytest

from tests.clusters import cluster_of, device
from tests.plans import stage, staged_plan
from workbench.core.cluster import Link
from workbench.core.errors import PlanError
from workbench.core.profile import Bytes
from workbench.core.units import duration_words, size_words
from workbench.planners import fixed_plan, memory
from workbench.planners.recomputation import plan_within_memory, recomputing
from workbench.simulator.steps import step_s

from .builders import SEQUENCE_LENGTH, equal, layer, problem_of, profile_of


def test_the_parts_of_a_middle_stage_by_hand():
    profile, _ = equal(4, 1)
    need = memory.rank_need(profile, 0, 1, 3, samples=2, sequence_length=SEQUENCE_LENGTH, in_flight=3)
    tokens = 2 * SEQUENCE_LENGTH
    assert need.weights_bytes == 2 * (1000 + 100)
    assert need.gradient_bytes == 2 * 100
    assert need.optimizer_bytes == 2 * 200
    assert need.context_bytes == 3 * tokens * 2 * (10 + 5)
    assert need.workspace_bytes == tokens * 3
    assert need.boundary_bytes == tokens * 2 * (8 + 2)
    assert need.total_bytes == 2200 + 200 + 400 + 720 + 24 + 160


def test_a_stage_has_room_for_a_copy_of_its_state_if_that_is_small():
    profile, _ = equal(4, 1)
    sizes = {"samples": 2, "sequence_length": SEQUENCE_LENGTH, "in_flight": 1}
    copying = replace(profile, most_copied_bytes=2 * 3 * 100)
    for start, stop, copied_bytes in ((0, 1, 300), (1, 3, 600), (0, 3, 0)):
        plain, with_copy = (memory.rank_need(each, 0, start, stop, **sizes) for each in (profile, copying))
        assert with_copy.total_bytes - plain.total_bytes == copied_bytes


def test_the_whole_model_has_no_boundary():
    profile, _ = equal(4, 1)
    assert memory.rank_need(profile, 0, 0, 4, samples=2, sequence_length=1, in_flight=1).boundary_bytes == 0


def test_a_stage_that_recomputes_keeps_inputs_and_one_layers_activations():
    """Of three micro-batches in flight, the inputs of its two layers, and the activations of one."""
    profile, _ = equal(4, 1)
    sizes = {"samples": 2, "sequence_length": SEQUENCE_LENGTH}
    kept, again = (
        memory.rank_need(profile, 0, 1, 3, in_flight=3, activations=activations, **sizes)
        for activations in ("memory", "recompute")
    )
    tokens = 2 * SEQUENCE_LENGTH
    assert again.context_bytes == 3 * tokens * 2 * 8 + 3 * tokens * 2 * 5  # and the taps, which this profile has
    assert again.workspace_bytes == tokens * (3 + 10)
    assert again.weights_bytes == kept.weights_bytes and again.boundary_bytes == kept.boundary_bytes


def test_the_planner_recomputes_only_where_activations_do_not_fit():
    """Of two equal stages the first has two micro-batches in flight, and memory for the inputs of one of them."""
    layers = [layer(frozen_bytes=0, trainable_bytes=0, tap_bytes=Bytes(), context_bytes=Bytes(1000))] * 4
    layers = [replace(one, times=one.times | {"B": one.times["SB"]}) for one in layers]
    profile = profile_of([layers, layers])

    def plan_with(profile):
        problem = problem_of(profile, cluster, 2, 2)
        return fixed_plan(problem, layers=(2, 2), groups=((0,), (1,)))

    def needs(plan):
        by_rank = memory.plan_needs(profile, plan, sequence_length=SEQUENCE_LENGTH)
        return {rank: need.total_bytes for rank, need in by_rank.items()}

    for megabytes, expected in (
        (1.0, ["memory", "memory"]),
        (0.01, ["recompute", "memory"]),
        (0.005, ["recompute"] * 2),
    ):
        cluster = cluster_of(("one", "two"), memory_bytes=int(1e6 * megabytes))
        plan = plan_within_memory("auto", profile, cluster, plan_with, needs, lambda plan: 1.0)
        assert [stage.activations for stage in plan.stages] == expected
        assert all(nbytes <= 1e6 * megabytes for nbytes in needs(plan).values())
        assert bool(plan.notes) == ("recompute" in expected)
    with pytest.raises(PlanError, match=r"has 5\.0 kB"):
        plan_within_memory("memory", profile, cluster, plan_with, needs, lambda plan: 1.0)


@pytest.mark.parametrize(("transfer_s", "expected"), [(0.1, ["memory", "memory"]), (50.0, ["recompute"])])
def test_a_faster_plan_that_recomputes_is_chosen_before_a_slower_one_that_fits(transfer_s, expected):
    """Only two devices together have memory for all activations, and one for the inputs; the link decides."""
    layers = [layer(frozen_bytes=0, trainable_bytes=0, tap_bytes=Bytes(), context_bytes=Bytes(1000))] * 4
    layers = [replace(one, times=one.times | {"B": one.times["SB"]}) for one in layers]
    profile = replace(profile_of([layers, layers]), method="full")
    need = memory.rank_need(profile, 0, 0, 4, samples=2, sequence_length=SEQUENCE_LENGTH, in_flight=1).total_bytes
    link = Link(bytes_per_s=2 * layers[0].output_bytes(2, SEQUENCE_LENGTH) / transfer_s)
    cluster = cluster_of(("one", "two"), memory_bytes=need - 1, link=link)

    def problem(profile):
        return problem_of(profile, cluster, 2, 1)

    def plan_with(profile):
        plans = []
        for groups in (((0,),), ((0,), (1,))):
            with contextlib.suppress(PlanError):
                plans.append(fixed_plan(problem(profile), layers=(4 // len(groups),) * len(groups), groups=groups))
        return min(plans, key=lambda plan: step_s(problem(profile), plan))

    def needs(plan):
        by_rank = memory.plan_needs(profile, plan, sequence_length=SEQUENCE_LENGTH)
        return {rank: need.total_bytes for rank, need in by_rank.items()}

    def seconds(plan):
        again = plan.stages[0].activations == "recompute"
        return step_s(problem(recomputing(profile) if again else profile), plan)

    plan = plan_within_memory("auto", profile, cluster, plan_with, needs, seconds)
    assert [stage.activations for stage in plan.stages] == expected
    assert [note[:12] for note in plan.notes] == (["The activati", "A step takes"] if expected == ["recompute"] else [])


def test_earlier_stages_hold_more_contexts_but_never_more_than_there_are_micro_batches():
    assert [memory.in_flight(stage, 4, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [memory.in_flight(stage, 4, 2) for stage in range(4)] == [2, 2, 2, 1]


def test_plan_needs_follows_shares_and_position():
    profile, _ = equal(4, 3)
    plan = staged_plan((2, {2: 3, 0: 1}), (2, {1: 4}), micro_batches=2)
    needs = memory.plan_needs(profile, plan, sequence_length=SEQUENCE_LENGTH)
    assert needs[2].context_bytes == 3 * needs[0].context_bytes == 2 * 3 * SEQUENCE_LENGTH * 30
    assert needs[1].context_bytes == 1 * 4 * SEQUENCE_LENGTH * 30
    gpipe = memory.plan_needs(profile, plan, sequence_length=SEQUENCE_LENGTH, order="gpipe")
    assert (
        gpipe[1].context_bytes == 2 * needs[1].context_bytes and gpipe[0] == needs[0]
    )  # the last stage keeps both micro-batches


def test_cached_epochs_release_the_backbone():
    profile, _ = equal(4, 2)
    needs = memory.cached_needs(profile, stage(0, 4, {0: 3, 1: 1}), sequence_length=SEQUENCE_LENGTH)
    assert needs[0].weights_bytes == 400
    assert needs[0].total_bytes == 4 * 400 + 3 * SEQUENCE_LENGTH * 4 * 15


def test_check_names_device_stage_and_bytes():
    profile, cluster = equal(4, 2)
    small = replace(cluster, devices=(cluster.devices[0], device("rpi-s", memory_bytes=2000)))
    plan = staged_plan((2, {0: 1}), (2, {1: 1}))
    memory.check(profile, cluster, plan, sequence_length=SEQUENCE_LENGTH)
    with pytest.raises(PlanError, match=r"Device 'rpi-s' has 2\.0 kB; stage 1 \(layers 2-3\) needs 3\.0 kB"):
        memory.check(profile, small, plan, sequence_length=SEQUENCE_LENGTH)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (1_400_000_000, "1.4 GB"),
        (350_000_000, "350 MB"),
        (12_300, "12.3 kB"),
        (12, "12 bytes"),
        (99_900_000, "99.9 MB"),
    ],
)
def test_bytes_are_readable(nbytes, text):
    assert size_words(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (119.0, "119 s"), (120.0, "2 min"), (7199.0, "120 min"), (7200.0, "2 h"), (172_800.0, "2 days")],
)
def test_durations_have_the_unit_of_which_they_are_two_or_more(seconds: float, text: str) -> None:
    assert duration_words(seconds) == text
