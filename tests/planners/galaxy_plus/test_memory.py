from dataclasses import replace

import pytest
from galaxy_plus_builders import check_inference, inference_needs, instance, shape

from tests.clusters import with_devices
from tests.plans import inference_plan
from workbench.core.errors import PlanError
from workbench.methods.galaxy_plus.planners import edgeshard, needs, plan
from workbench.planners.problem import Problem
from workbench_studies.papers.galaxy_plus.testbed import as_printed

STACK = shape(4, 4)
PLAN = inference_plan(ranks=(1, 0), units=(3, 1), columns=(1024, 0), shares=(1, 0), schemes=(2, 1, 1, 1), length=6)


def made():
    profile, cluster = instance([1e9, 1e9], (STACK,), first_bytes=500)
    return replace(profile, working_bytes_per_token=7, last_bytes=60), cluster


def test_equation_8_and_what_it_leaves_out():
    profile, cluster = made()
    needs = inference_needs(PLAN, profile)
    first, second = needs[1], needs[0]
    assert first.attention_bytes == 4 * 3 * STACK.unit_bytes
    assert first.feed_forward_bytes == 4 * STACK.feed_forward_bytes
    assert (first.ends_bytes, second.ends_bytes) == (560, 0)
    assert first.working_bytes == second.working_bytes == 42
    assert second.feed_forward_bytes == 0  # no tokens: no scheme-2 layer in full
    printed = inference_needs(PLAN, as_printed(profile, cluster)[0])
    assert printed[0].total_bytes == 4 * STACK.unit_bytes + STACK.feed_forward_bytes
    assert printed[1].total_bytes == first.attention_bytes + first.feed_forward_bytes
    shared, _ = as_printed(profile, cluster, embedding_share=0.25)[1].devices
    assert shared.memory_bytes == cluster.devices[0].memory_bytes - 140 - 1


@pytest.mark.parametrize(
    ("paradigm", "parts", "layers_held"),
    [
        ("sequence", {"shares": (1, 1)}, (4, 4)),
        ("pipeline", {"layers": (3, 1)}, (3, 1)),
        ("tensor", {"units": (2, 2), "columns": (512, 512)}, (2, 2)),
    ],
)
def test_other_paradigms(paradigm, parts, layers_held):
    profile, _ = made()
    needs = inference_needs(inference_plan(paradigm, length=6, **parts), profile)
    each = STACK.attention_bytes + STACK.feed_forward_bytes
    assert tuple(need.attention_bytes + need.feed_forward_bytes for need in needs.values()) == tuple(
        count * each for count in layers_held
    )


def test_the_error_names_the_device_and_what_is_missing():
    profile, cluster = made()
    need = inference_needs(PLAN, profile)[1].total_bytes
    small = with_devices(cluster, memory_bytes=need - 2_000_000)
    with pytest.raises(PlanError, match=r"Device 'd1' has .*needs .*: 2.0 MB are missing\.") as caught:
        check_inference(PLAN, profile, small)
    assert "'d0'" not in str(caught.value)
    exact = with_devices(cluster, memory_bytes=need)
    check_inference(PLAN, profile, exact)
    assert all(
        device.memory_bytes == need - 1 for device in as_printed(profile, exact)[1].devices
    )  # Eq. 9: below the budget


def test_texts_that_do_not_fit_are_refused_with_their_keys_and_values():
    """Each head's keys and values stay with its device: half of them fit on each of two, all of them on none."""
    profile, cluster = instance([1e9, 1e9], (replace(STACK, kv_unit_bytes=100_000),))
    room = 4 * (STACK.attention_bytes + STACK.feed_forward_bytes) + 2 * 10**7
    cluster = with_devices(cluster, memory_bytes=room)
    problem = Problem(profile, cluster, sequence_length=6, kept_tokens=20)
    result = plan(problem)
    assert sorted(result.units) == [2, 2] and plan(replace(problem, kept_tokens=0)) is not None
    assert {need.cache_bytes for need in needs(problem, result).values()} == {4 * 2 * 20 * 100_000}
    for planner in (plan, edgeshard):
        with pytest.raises(PlanError, match=r"keys and values 64\.0 MB.*or shorter texts"):
            planner(replace(problem, kept_tokens=40))
