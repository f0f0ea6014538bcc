"""Fine-tuning through the backbone in groups of devices, with parameters of which several stages hold copies."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_plans import equal_plan, peaks, plan_of

from workbench.schedules import backpropagation, check, insert_transfers


def test_without_shared_parameters_it_is_1f1b() -> None:
    """The paradigms differ in their plans, not in their schedule."""
    assert peaks(insert_transfers(backpropagation(equal_plan(3), (1,) * 6)), "ctx", F=1.0, B=2.0) == (3, 2, 1)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_plan_with_any_shared_parameters_can_run(data: st.DataObject) -> None:
    """The dry run finds no deadlock, whoever shares what."""
    groups = data.draw(
        st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).filter(any), min_size=1, max_size=4)
    )
    stages = st.lists(st.sampled_from(range(len(groups))), min_size=2, unique=True).map(sorted)
    shared = data.draw(st.lists(stages, max_size=3)) if len(groups) > 1 else []
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    check(insert_transfers(backpropagation(plan_of(*groups), sizes, shared=shared)))
