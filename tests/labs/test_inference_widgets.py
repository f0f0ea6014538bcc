"""Widgets of single-shot inference: what they show is what planners, simulator and memory check say of the plan in
hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workbench.core.catalogue import load_cluster
from workbench.core.errors import ConfigError
from workbench.core.inference import InferencePlan
from workbench.methods.galaxy_plus.prices import SequencePrice
from workbench.tasks import load_task
from workbench.widgets import SchedulePlayer, passages_folder
from workbench_labs.inference_explorer import InferenceExplorer, LayerCutter, SchemeEditor
from workbench_labs.inference_problem import (
    PLANNERS,
    SequenceProblem,
    StragglerLab,
    compare_inference,
    described_problem,
    one_layer,
    overlap_cells,
    with_schemes,
)
from workbench_labs.planning import on, with_memory
from workbench_labs.tables import inference_table


@pytest.fixture(scope="module")
def problem() -> SequenceProblem:
    """DistilBERT in the paper's heterogeneous environment: six layers."""
    return described_problem("DistilBERT", load_cluster("galaxy-env-b"), length=284)


@pytest.fixture(scope="module")
def tight(problem: SequenceProblem) -> SequenceProblem:
    """Devices of 100 MB, embedding (95 MB) left out: three layers can be in scheme 2."""
    small = replace(problem.profile, first_bytes=0, last_bytes=0)
    return on(replace(problem, profile=small), with_memory(problem.cluster, 100_000_000))


@pytest.fixture(scope="module")
def algorithm_1(problem: SequenceProblem) -> InferencePlan:
    return PLANNERS["Algorithm 1"](problem)


def test_prices_of_few_layers_are_those_of_all(problem: SequenceProblem, algorithm_1: InferencePlan) -> None:
    mixed = with_schemes(problem, algorithm_1, [1, 1, 1, 1, 1, 2])
    price = SequencePrice(problem)
    for made in (algorithm_1, mixed):
        assert price(made) == pytest.approx(price.timeline(made).makespan_s, rel=0.01)
    with pytest.raises(ConfigError, match="6"):
        with_schemes(problem, algorithm_1, [1, 2])


def test_a_slower_device_scales_its_operations_and_no_others(problem: SequenceProblem) -> None:
    slow = on(problem, problem.cluster.slowed(1, 2.0)).profile.costs
    was = problem.profile.costs
    assert (
        slow[1][0].seconds("UP", 10, 100) == pytest.approx(2 * was[1][0].seconds("UP", 10, 100)) and slow[0] == was[0]
    )
    with pytest.raises(ConfigError, match="alpha"):
        on(problem, load_cluster("laptop"))


def test_planners_stand_beside_each_other_and_who_does_not_fit_says_why(problem: SequenceProblem) -> None:
    result = compare_inference(problem, ("Galaxy+", "Algorithm 1", "Megatron-LM"))
    assert result[0].seconds <= result[1].seconds < result[2].seconds
    table = str(inference_table(result, problem))
    assert f"{result[2].seconds / result[0].seconds:.2f}" in table and "[0, 6]" in table
    small = on(problem, with_memory(problem.cluster, 150_000_000))
    alone = compare_inference(small, ("one device",))
    assert alone[0].plan is None and "150 MB" in str(inference_table(alone, small))


def test_cutting_a_layer_follows_the_sliders(problem: SequenceProblem) -> None:
    cutter = LayerCutter(problem.profile.stacks[0], problem.cluster, length=284, weights=[2, 2, 1, 1])
    assert cutter.plan.units == (4, 4, 2, 2) and "scheme 1" in cutter.figure.heading.value
    cutter.way.value = "scheme 2"
    cutter.weights[3].value = 0
    cutter.wait()
    assert (
        cutter.plan.num_positions == 3
        and "on 3 devices" in cutter.figure.heading.value
        and "scheme 2" in cutter.figure.heading.value
    )
    cutter.way.value = "Megatron-LM"
    assert set(cutter.plan.units) == {4}  # equal, whatever the sliders say
    for slider in cutter.weights:
        slider.value = 0
    cutter.wait()
    assert "No device takes part" in cutter.message.value


def test_schemes_are_chosen_by_slider_and_layer_by_layer(tight: SequenceProblem) -> None:
    editor = SchemeEditor(tight, schemes=[1] * 6, planner="Algorithm 1")
    assert editor.plan.configuration == (6, 0) and "a sequence" in editor.headline.value and editor.message.value == ""
    editor.count.value = 2
    assert editor.schemes == (2, 2, 1, 1, 1, 1)
    editor.layers[5].value = True
    editor.wait()
    assert editor.schemes == (2, 2, 1, 1, 1, 2) and editor.count.value == 3 and "[3, 3]" in editor.headline.value
    seconds = SequencePrice(tight)(editor.plan)
    assert f"{seconds * 1e3:.0f} ms" in editor.headline.value
    editor.count.value = 6
    editor.wait()
    assert "Out of memory" in editor.headline.value and "rpi" in editor.message.value
    for tab, said in ((1, "trades memory"), (2, "One layer"), (3, "your schemes")):
        editor.tabs.selected_index = tab
        editor.wait()
        assert said in editor.tabs.children[tab].heading.value
    editor.take_plan.click()
    editor.wait()
    assert editor.schemes == editor.planned.schemes and "+0.0% against the planner" in editor.headline.value


def test_the_player_steps_through_the_ring_by_operations(problem: SequenceProblem, algorithm_1: InferencePlan) -> None:
    layer = one_layer(problem)
    timeline = SequencePrice(layer).timeline(replace(algorithm_1, schemes=(1,), overlap=True), title="ring")
    player = SchedulePlayer(timeline)
    seen = []
    for _ in range(12):
        before = player.slider.value
        player.forth.click()
        assert player.slider.value > before
        seen.append(player.table.value)
    assert any("queries, keys, values of tile" in table for table in seen) and any(
        "send embedded tile" in table for table in seen
    )
    player.back.click()
    assert player.table.value == seen[-2]
    player.slider.value = 0
    player.back.click()
    assert player.slider.value == 0


def test_overlap_lies_between_the_longer_part_and_the_sum(problem: SequenceProblem, algorithm_1: InferencePlan) -> None:
    [slow, quick] = overlap_cells(problem, algorithm_1, (125, 1000))
    for cell in (slow, quick):
        parts = (cell.computation_s.median, cell.communication_s.median)
        assert max(parts) * 0.999 <= cell.together_s.median <= sum(parts) * 1.001
    assert slow.computation_s == quick.computation_s and slow.communication_s.median > 4 * quick.communication_s.median


def test_the_explorer_follows_its_sliders(problem: SequenceProblem) -> None:
    explorer = InferenceExplorer(problem, planners=("Algorithm 1", "EdgeShard"))
    before = explorer.compared[0].seconds
    explorer.form.rows["rpi-l-0"].speed.value /= 4
    explorer.wait()
    assert explorer.compared[0].seconds > 1.1 * before and "against the beginning" in explorer.headline.value
    assert "EdgeShard" in explorer.table.value
    for device in problem.cluster.devices:
        explorer.form.rows[device.name].memory.value = 20
    explorer.wait()
    assert "No plan fits" in explorer.headline.value and "role='alert'" in explorer.message.value


def test_a_straggler_is_left_out_and_a_killed_device_costs_no_request(problem: SequenceProblem) -> None:
    lab = StragglerLab(problem, num_requests=120)
    with_it, without = lab.reports["with re-scheduling"], lab.reports["without"]
    assert with_it.events_of("excluded", rank=1) and not without.events_of("excluded")
    assert with_it.end_s < without.end_s and "without re-scheduling" in lab.headline.value
    lab.kind.value = "kill"
    lab.wait()
    assert lab.factor.disabled and set(lab.reports) == {"with re-scheduling"}
    assert len(lab.report.requests) == 120 and lab.report.num_lost == 0 and lab.report.events_of("lost", rank=1)


def test_passages_are_a_task_of_longer_texts(tmp_path) -> None:
    task = load_task("sst2", data=passages_folder(tmp_path, count=3, sentences=8))
    assert len(task.test) == 3 and min(len(text.split()) for text in task.test.texts) > 60
