from __future__ import annotations

import re
import threading

import pytest

from tests.waiting import LIMIT_S
from workbench.core.catalogue import load_cluster
from workbench.core.errors import ConfigError, PlanError
from workbench.planners import Problem
from workbench.simulator.steps import step_s
from workbench.widgets.explorer import Latest
from workbench_labs.planning import PLANNERS, compare, needs_of, on, paper_problem, refusals
from workbench_labs.split_editor import PlannerExplorer, SplitEditor
from workbench_labs.tables import comparison_table, orders_table, phases_table

CLUSTER = load_cluster("pac-env-b")


@pytest.fixture(scope="module")
def problem() -> Problem:
    return paper_problem("BART-Large", CLUSTER)


def test_latest_does_the_newest_request_and_drops_what_is_stale() -> None:
    begun, go, done = threading.Event(), threading.Event(), []

    def work(request: int) -> None:
        begun.set()
        assert go.wait(LIMIT_S)
        done.append(request)

    latest = Latest(work)
    latest.ask(0)
    assert begun.wait(LIMIT_S)
    for request in range(1, 50):
        latest.ask(request)
    go.set()
    latest.wait()
    assert done == [0, 49]
    latest.ask(50)  # a thread that has ended is started again
    latest.wait()
    assert done[-1] == 50


def test_a_slower_device_scales_its_layers_and_no_others(problem: Problem) -> None:
    half = problem.cluster.slowed(2, 2.0)
    slow = on(problem, half)
    before, after = problem.profile.layers, slow.profile.layers
    assert after[2][5].forward_s(4, 128) == pytest.approx(2 * before[2][5].forward_s(4, 128))
    assert (after[0], after[3]) == (before[0], before[3])
    with pytest.raises(ConfigError, match="alpha"):
        on(problem, load_cluster("laptop"))


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_gives_a_plan_that_fits_or_says_who_lacks_what(planner: str, problem: Problem) -> None:
    try:
        plan = PLANNERS[planner](problem)
    except PlanError as error:
        assert "nano" in str(error) and "GB" in str(error)
        assert planner == "data parallel"  # two copies of BART-Large are too large for the Nanos
        return
    assert not refusals(problem, plan) and step_s(problem, plan) > 0
    assert sum(stage.num_layers for stage in plan.stages) == problem.profile.num_layers


def test_refined_is_never_slower_than_algorithm_1_and_ignoring_heterogeneity_costs(problem: Problem) -> None:
    rate = {
        comparison.planner: comparison.samples_per_s
        for comparison in compare(problem, ("Algorithm 1", "simulated and refined", "as if all were equal"))
    }
    assert rate["simulated and refined"] >= rate["Algorithm 1"] > rate["as if all were equal"]


def test_tables_show_what_does_not_fit(problem: Problem) -> None:
    shown = str(comparison_table(compare(problem, ("data parallel", "Algorithm 1"))))
    assert "out of memory" in shown and "needs" in shown and "(weights" not in shown
    plan = PLANNERS["Algorithm 1"](problem)
    assert f"{plan.total_s * 1e3:.0f}" in str(phases_table([plan], [step_s(problem, plan)]))


def test_the_order_table_says_what_the_listed_order_loses(problem: Problem) -> None:
    table = orders_table(problem)
    [listed_ms] = re.findall(r"lists: (\d+) ms", table.note)
    assert f"{int(listed_ms) / int(table.rows[0][3]) - 1:.0%} more than the best" in table.note


def test_moving_a_slider_plans_anew_in_place(problem: Problem) -> None:
    explorer = PlannerExplorer(problem)
    first, figure = explorer.answer, explorer.tabs.children[0].shown
    assert first is not None and first.plan == PLANNERS["Algorithm 1"](problem) and len(figure.data) > 2
    explorer.form.rows["tx2-h"].speed.value /= 4
    explorer.wait()
    assert explorer.answer.samples_per_s < first.samples_per_s and "against the beginning" in explorer.headline.value
    assert explorer.tabs.children[0].shown is figure
    assert explorer.answer.plan == PLANNERS["Algorithm 1"](explorer.problem)
    explorer.micro_batches.value = 1
    explorer.planner.value = "one device"
    explorer.wait()
    assert (
        explorer.answer.plan is not None
        and len(explorer.answer.plan.stages) == explorer.answer.plan.num_micro_batches == 1
    )
    explorer.tabs.selected_index = 2
    assert "every device is within its budget" in explorer.tabs.children[2].heading.value


def test_what_fits_nowhere_is_refused_with_device_and_bytes(problem: Problem) -> None:
    explorer = PlannerExplorer(problem)
    for device in problem.cluster.devices:
        explorer.form.rows[device.name].memory.value = 100
    explorer.wait()
    assert explorer.answer.plan is None and "No plan fits" in explorer.headline.value
    assert "100 MB" in explorer.message.value and "role='alert'" in explorer.message.value
    explorer.form.reset.click()
    explorer.wait()
    assert explorer.answer.plan == PLANNERS["Algorithm 1"](problem) and explorer.message.value == ""


def test_a_split_is_priced_beside_the_planners(problem: Problem) -> None:
    editor = SplitEditor(problem, layers=[12, 12], groups=[[0, 2], [3]])
    assert (editor.layers, editor.groups) == ([12, 12], [[0, 2], [3]])
    assert f"{step_s(problem, editor.plan) * 1e3:.0f} ms a step" in editor.headline.value
    editor.take_plan.click()
    editor.wait()
    assert editor.plan.stages == editor.planned.stages and "(+0.0% against the planner)" in editor.headline.value


def test_ends_push_each_other_and_no_stage_becomes_empty(problem: Problem) -> None:
    editor = SplitEditor(problem)
    editor.num_stages.value = 4
    assert editor.layers == [6, 6, 6, 6] and editor.groups == [[0], [1], [2], [3]]
    editor.ends.children[0].value = 23
    assert editor.layers == [21, 1, 1, 1]
    editor.ends.children[2].value = 1
    assert editor.layers == [1, 1, 1, 21]
    editor.wait()


def test_a_split_that_does_not_fit_names_device_and_bytes(problem: Problem) -> None:
    editor = SplitEditor(problem, layers=[21, 3], groups=[[0], [2]])
    need = needs_of(problem, editor.plan)[0].total_bytes
    assert need > problem.cluster.devices[0].memory_bytes
    assert (
        "Out of memory" in editor.headline.value
        and "nano-h" in editor.message.value
        and f"{need / 1e9:.1f} GB" in editor.message.value
    )
    editor.tabs.selected_index = 2
    editor.wait()
    assert "Out of memory: nano-h" in editor.tabs.children[2].heading.value


def test_an_answer_is_kept_next_to_the_next_ones_and_reset_puts_everything_back(problem: Problem) -> None:
    explorer = PlannerExplorer(problem)
    first, micro_batches = explorer.headline.value, explorer.micro_batches.value
    explorer.pin.value = True
    explorer.micro_batches.value = 1
    explorer.form.rows["tx2-h"].speed.value /= 4
    explorer.wait()
    assert first in explorer.kept_headline.value and explorer.headline.value != first
    assert "A, kept" in explorer.kept_figure.heading.value and explorer.kept_figure.layout.display != "none"
    kept, now = explorer.kept_figure.shown, explorer.figure.shown
    assert [list(trace.x or ()) for trace in kept.data] != [list(trace.x or ()) for trace in now.data]
    explorer.tabs.selected_index = 2
    assert len(explorer.kept_figure.shown.data) == len(explorer.tabs.children[2].shown.data)
    explorer.form.reset.click()
    explorer.wait()
    assert explorer.micro_batches.value == micro_batches and "+0% against the beginning" in explorer.headline.value
    assert explorer.kept_headline.value == "" and explorer.kept_figure.layout.display == "none"


def test_a_stage_without_a_device_is_told(problem: Problem) -> None:
    editor = SplitEditor(problem, layers=[12, 12], groups=[[0], [2]])
    editor.devices[0].value = -1
    editor.wait()
    assert "A group is empty" in editor.message.value and editor.headline.value == ""
    with pytest.raises(ConfigError):
        _ = editor.plan


def test_layers_that_do_not_add_up_are_refused(problem: Problem) -> None:
    with pytest.raises(ConfigError, match="sum to 24"):
        SplitEditor(problem, layers=[2, 2], groups=[[0], [1]])
