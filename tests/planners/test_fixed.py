from dataclasses import replace

import pytest

from tests.clusters import device
from workbench.core.errors import ConfigError, PlanError
from workbench.planners import Problem, data_parallel, fixed_plan, pipeline_parallel, standalone

from .builders import SEQUENCE_LENGTH, equal, problem_of, unequal

JOB = {"batch_size": 16, "micro_batches": 4, "sequence_length": SEQUENCE_LENGTH}


def samples(plan):
    return [[share.samples for share in stage.shares] for stage in plan.stages]


def scaled(profile, *factors):
    return replace(
        profile,
        layers=tuple(
            tuple(one.scaled(factor) for one in row) for row, factor in zip(profile.layers, factors, strict=True)
        ),
    )


@pytest.mark.parametrize(
    ("layers", "groups", "grouping"),
    [
        ((6,), ((0, 1, 2, 3),), "[4]"),
        ((3, 3), ((0, 1), (2, 3)), "[2-2]"),
        ((2, 2, 1, 1), ((0,), (1,), (2,), (3,)), "[1-1-1-1]"),
    ],
)
def test_partition_and_grouping_are_as_given(layers, groups, grouping):
    profile, cluster = equal(6, 4)
    plan = fixed_plan(Problem(profile, cluster, **JOB), layers=layers, groups=groups)
    assert plan.partition() == str(list(layers))
    assert plan.grouping() == grouping
    assert tuple(stage.ranks for stage in plan.stages) == groups
    assert plan.total_s > 0


def test_samples_follow_speed_unless_told_otherwise():
    profile, cluster = equal(6, 4)
    profile = scaled(profile, 1, 3, 1, 1)
    form = {"layers": (3, 3), "groups": ((0, 1), (2, 3))}
    assert samples(fixed_plan(Problem(profile, cluster, **JOB), **form)) == [[3, 1], [2, 2]]
    assert samples(fixed_plan(Problem(profile, cluster, **JOB), **form, dispatch="equal")) == [[2, 2], [2, 2]]
    assert samples(fixed_plan(Problem(profile, cluster, **JOB), **form, dispatch="best")) == [[3, 1], [2, 2]]


def test_each_rank_works_if_there_are_samples_enough():
    profile, cluster = equal(6, 4)
    profile = scaled(profile, 1, 100, 1, 1)
    assert samples(fixed_plan(Problem(profile, cluster, **JOB), layers=(6,), groups=((0, 1, 2, 3),))) == [[1, 1, 1, 1]]
    few = fixed_plan(
        problem_of(profile, cluster, 8, 4),
        layers=(6,),
        groups=((0, 1, 2, 3),),
    )
    assert sum(samples(few)[0]) == 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layers": (3, 2)}, "sum to 6"),
        ({"layers": (6, 0)}, "no stage may be empty"),
        ({"layers": (6,)}, "1 stages and 2 groups"),
        ({"groups": ((0, 1), ())}, "A group is empty"),
        ({"groups": ((0, 1), (1,))}, "more than once"),
        ({"groups": ((0, 1), (7,))}, r"Drop \[7\]"),
        ({"dispatch": "fair"}, "speed, equal, best"),
        ({"batch_size": 15}, "not a multiple"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(changes, expected):
    profile, cluster = equal(6, 4)
    job = {name: changes.get(name, size) for name, size in JOB.items()}
    form = {
        "layers": (3, 3),
        "groups": ((0, 1), (2, 3)),
        **{name: value for name, value in changes.items() if name not in JOB},
    }
    with pytest.raises(ConfigError, match=expected):
        fixed_plan(Problem(profile, cluster, **job), **form)


@pytest.mark.parametrize("dispatch", ["speed", "best"])
def test_memory_is_checked_unless_told_otherwise(dispatch):
    profile, cluster = equal(6, 2)
    tight = replace(cluster, devices=(cluster.devices[0], device("rpi-s", memory_bytes=1000)))
    form = {"layers": (3, 3), "groups": ((0,), (1,)), "dispatch": dispatch}
    with pytest.raises(PlanError, match=r"'rpi-s' has 1\.0 kB; stage 1"):
        fixed_plan(Problem(profile, tight, **JOB), **form)
    assert fixed_plan(Problem(profile, tight, **JOB), **form, check_memory=False).grouping() == "[1-1]"


def test_standalone_takes_the_fastest_device_that_holds_the_model():
    profile, cluster = equal(6, 3)
    profile = scaled(profile, 1, 2, 3)
    small = replace(cluster, devices=(device("small", memory_bytes=2000), *cluster.devices[1:]))
    assert standalone(problem_of(profile, cluster, 4)).stages[0].ranks == (0,)
    assert standalone(problem_of(profile, small, 4)).stages[0].ranks == (1,)
    tiny = replace(cluster, devices=tuple(device(f"d{i}", memory_bytes=1000 + i) for i in range(3)))
    with pytest.raises(PlanError, match="'d2'"):
        standalone(problem_of(profile, tiny, 4))


def test_data_parallel_puts_the_whole_model_everywhere():
    profile, cluster = equal(6, 4)
    plan = data_parallel(problem_of(profile, cluster, 16))
    assert (plan.grouping(), plan.partition(), plan.num_micro_batches, samples(plan)) == (
        "[4]",
        "[6]",
        1,
        [[4, 4, 4, 4]],
    )
    one_small = replace(cluster, devices=(*cluster.devices[:3], device("small", memory_bytes=5000)))
    with pytest.raises(PlanError, match="'small'"):
        data_parallel(problem_of(profile, one_small, 16))


def test_pipeline_parallel_gives_each_device_a_stage():
    profile, cluster = equal(6, 3)
    plan = pipeline_parallel(problem_of(profile, cluster, 16, 4))
    assert (plan.grouping(), plan.partition(), plan.num_micro_batches, plan.method) == (
        "[1-1-1]",
        "[2, 2, 2]",
        4,
        "pipeline_parallel",
    )
    few, many = equal(2, 5)
    assert pipeline_parallel(problem_of(few, many, 4, 4)).grouping() == "[1-1]"
    profile, cluster = unequal(1, num_layers=6, world_size=4, tight=False)
    assert pipeline_parallel(problem_of(profile, cluster, 4, 4)).grouping() == "[1-1-1-1]"
