"""Widgets of the lab on zeroth-order gradients: what they show is what Algorithm 1, the model and the planner say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from tests.widgets.widget_reports import make_report
from workbench.core.catalogue import load_cluster
from workbench.core.errors import ConfigError
from workbench.core.profile import Bytes, Grid, LayerProfile, Profile
from workbench.methods.p_rge.inference_engine import EngineConfig, EngineStep
from workbench.methods.p_rge.queries import plan_queries
from workbench.methods.p_rge.seeds import query_seed
from workbench.methods.p_rge.zeroth_order import CausalModel
from workbench.planners import Problem
from workbench.tasks.prompts import PromptBatch
from workbench.trainings.queries import QueryTraining, Trial
from workbench_labs import forward_only, step_memory, training_panel
from workbench_labs.course.verdict import usable
from workbench_labs.exercises import queries
from workbench_labs.planning import QueryDivider, query_counts, query_seconds, query_step_s, with_memory
from workbench_labs.query_division import divided, division_plan, division_table, equal_division, linear_costs
from workbench_labs.rooflines import RooflineExplorer, execution_costs, measure_roofline, one_by_one, paper_machines
from workbench_labs.slope_study import epsilon_curve, exact_gradient, plane_error, study_slopes
from workbench_labs.training_panel import TrainingPanel, continue_in_engine, figure_of, frozen_and_trained

SETTINGS = Trial(
    model="tiny-llama",
    method="P-RGE",
    queries=2,
    batch_size=2,
    learning_rate=5e-3,
    samples=(16, 8, 8),
    max_length=64,
    score_every=2,
)


@pytest.fixture(scope="module")
def training() -> QueryTraining:
    """An untrained model and its task; nobody trains it."""
    return QueryTraining(SETTINGS)


@pytest.fixture(scope="module")
def problem() -> Problem:
    """Two rows a millisecond and layer on the first device, the others 2, 4 and 8 times slower; eight queries."""

    def layers(slower: float) -> tuple[LayerProfile, ...]:
        grids = {
            kind: Grid(batch_sizes=(1, 2), sequence_lengths=(1, 2), seconds=((at, at), (2 * at, 2 * at)))
            for kind, at in (("F", 0.5e-3 * slower), ("STEP", 1e-6 * slower))
        }
        one = LayerProfile(
            name="layer",
            times=grids,
            frozen_bytes=10**6,
            trainable_bytes=1000,
            output_bytes=Bytes(64),
        )
        return (one, one)

    profile = Profile(
        model="made up", method="p_rge", source="measured", layers=tuple(layers(slower) for slower in (1, 2, 4, 8))
    )
    return Problem(profile, load_cluster("laptop"), queries=8, sequence_length=1)


def test_the_error_on_a_plane_is_d_plus_1_over_q() -> None:
    result = plane_error(30, (1, 8), repeats=400)
    assert [error for _, error in result.points] == pytest.approx([31, 31 / 8], rel=0.15)


def test_a_models_slopes_are_those_of_its_gradient(training: QueryTraining) -> None:
    model, batch = training.model, training.batch(0)
    before = model.trainables.state()
    study = study_slopes(model, batch, queries=8, epsilon=1e-3)
    assert study.deviation < 0.02 and len(study.slopes) == 8
    gradient = exact_gradient(model, batch)
    assert study.length == pytest.approx(float(gradient.norm()), rel=1e-5)
    # The error of the mean of all eight, made the long way.
    noise = [model.trainables.noise(query_seed(0, 0, query)) for query in range(8)]
    mean = sum(z * measured for z, (_, measured) in zip(noise, study.slopes, strict=True)) / 8
    queries, error = study.error.points[-1]
    assert queries == 8 and error == pytest.approx(
        float((mean - gradient).square().sum() / gradient.square().sum()), rel=1e-3
    )
    assert study.error.dimension == model.trainables.num_values == frozen_and_trained(model)[1]
    curve = epsilon_curve(model, batch, (1e-3, 1.0), queries=4, exact=gradient)
    assert curve[0].deviation < 0.05 < curve[1].deviation
    assert all(torch.equal(before[name], value) for name, value in model.trainables.state().items())


def test_passes_are_counted_and_timed_by_parts(training: QueryTraining) -> None:
    batch = training.batch(0, samples=1)
    host = measure_roofline(training.model, batch, (2, 1), seconds=0.01, pass_budget_s=0.01)
    one, two = host.passes
    assert (
        (one.parts, two.parts) == (1, 2)
        and two.flops == pytest.approx(2 * one.flops, rel=0.01)
        and one.weight_bytes == two.weight_bytes
    )
    tokens, layers = batch.input_ids.shape[1], training.model.backbone.layers
    matrices = sum(p.numel() for p in layers.parameters() if p.dim() == 2 and not p.requires_grad)
    assert one.flops > 2 * matrices * tokens and one.seconds > 0
    assert one_by_one(host.passes)["one after the other"][1] == (2, pytest.approx(2e3 * one.seconds))
    assert host.machine(len(layers)).flops_per_s == host.flops_per_s
    training.model.part_losses(batch)  # nothing stays bound


def test_the_roofline_explorer_follows_its_controls() -> None:
    explorer = RooflineExplorer(model="SmolLM2-135M")
    assert [(cost.execution, cost.passes, cost.parts) for cost in explorer.costs] == [
        ("sequential", 8, 1),
        ("outer", 2, 4),
        ("inner", 4, 2),
        ("both", 1, 8),
    ]
    gain = explorer.costs[0].step_s / explorer.costs[-1].step_s
    assert gain > 4 and f"{gain:.2f} times as fast" in explorer.headline.value
    explorer.tokens.value, explorer.batch_size.value, explorer.model.value = 256, 16, "Llama2-7B"
    explorer.wait()
    assert explorer.costs[0].step_s / explorer.costs[-1].step_s < 1.1 and "little to gain" in explorer.headline.value
    assert "Llama2-7B" in explorer.figure.heading.value and "sequential" in explorer.table.value
    jetson = execution_costs(
        "TinyLlama-1.1B", paper_machines()["Jetson Orin Nano, NF4 (Table 4)"], queries=1, batch_size=1, tokens=64
    )
    assert jetson[0].step_s / jetson[2].step_s == pytest.approx(1.62, rel=0.25)  # Table 4's speed-up


def test_training_is_watched_paused_and_gone_on_with_from_its_log(tmp_path: Path) -> None:
    reference = QueryTraining(SETTINGS)
    reference.score_untrained()
    curve = reference.run(4)
    assert [step for step, _ in curve.losses] == [1, 2, 3, 4] and [step for step, _ in curve.scores] == [0, 2, 4]
    assert set(curve.baselines) == {"zero-shot", "calibrated"} and curve.step_s > 0
    panel = TrainingPanel(SETTINGS, 4, folder=tmp_path)
    panel.steps.value = 3
    panel.start()
    panel.wait()
    assert "3 steps, accuracy" in panel.headline.value and panel.log_path.is_file()
    again = TrainingPanel(SETTINGS, 4, folder=tmp_path)
    finished = again.trained()
    assert (
        "4 steps (3 of them from the log)" in again.headline.value
        and "16 forward passes of 2 samples" in again.headline.value
    )
    assert finished.curve.losses == curve.losses and finished.curve.baselines == curve.baselines
    assert torch.equal(finished.model.trainables.flat, reference.model.trainables.flat)
    assert again.trained() is finished and list(figure_of(finished).data[0].y) == [loss for _, loss in curve.losses]
    kept = again.log_path
    again.controls["loss"].value = "label_words"
    among = again.trained()
    assert again.log_path != kept and "among the label words" in figure_of(among).layout.title.subtitle.text
    # Of two words, beside all tokens.
    assert max(loss for _, loss in among.curve.losses) < 2 < min(loss for _, loss in curve.losses)
    again.controls["learning_rate"].value = -1.0
    again.start()
    assert "at least 1e-09" in again.message.value == again.controls["learning_rate"].alert.value
    again.controls["learning_rate"].value, again.steps.value = 5e-3, 0
    again.start()
    assert "at least 1" in again.message.value


class _StandIn:
    """In place of the inference engine: a model of its own that makes the same steps, and is off by `wrong` in each
    loss."""

    wrong = 0.0

    def __init__(self, path: str, *, seed: int, noise_of: Callable[[int, int], Any], threads: int) -> None:
        self.inner, self.step_number = QueryTraining(SETTINGS), 0
        size = self.inner.model.trainables.num_values
        assert (
            torch.equal(torch.from_numpy(noise_of(7, size)), self.inner.model.trainables.noise(7))
            and Path(path).is_file()
        )

    def step(self, batch: PromptBatch, learning_rate: float) -> EngineStep:
        result = self.inner.step()
        self.step_number += 1
        losses = tuple(loss * (1 + self.wrong) for loss in result.losses.tolist())
        return EngineStep(step=self.step_number - 1, losses=losses, gradients=result.log.gradients, log=result.log)

    def theta(self) -> Any:
        return self.inner.model.trainables.flat.detach().numpy()


@pytest.mark.parametrize("wrong", [0.0, 0.01])
def test_the_engine_goes_on_beside_pytorch(
    wrong: float, training: QueryTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(model: CausalModel, path: Path, config: EngineConfig, *, name: str) -> SimpleNamespace:
        assert (
            config.sequence_length >= max(training.train.lengths) and config.num_targets == training.train.max_targets
        )
        path.write_bytes(bytes(1000))
        return SimpleNamespace(path=str(path), file_bytes=1000, export_s=0.1)

    monkeypatch.setattr(training_panel, "require_executorch", lambda: None)
    monkeypatch.setattr(training_panel, "export_program", export)
    monkeypatch.setattr(training_panel, "EngineTrainer", _StandIn)
    monkeypatch.setattr(_StandIn, "wrong", wrong)
    before = training.model.trainables.flat.clone()
    run = continue_in_engine(training, tmp_path, steps=2)
    assert run.difference == pytest.approx(wrong, abs=1e-6) and run.values == pytest.approx(0, abs=1e-6)
    assert [step for step, _ in run.losses] == [1, 2] and run.scores[0][0] == "before"
    assert (
        run.scores[1][1] == run.scores[2][1]
        and "after 2 steps in the engine" in str(run)
        and "<table" in run._repr_html_()
    )
    assert torch.equal(training.model.trainables.flat, before) and training.curve.steps == 0
    # Interrupted, it leaves the training as it was: what it had made is in no log.
    monkeypatch.setattr(_StandIn, "theta", lambda engine: pytest.fail("went on"))
    result = _StandIn.step

    def dies(engine: _StandIn, batch: PromptBatch, learning_rate: float) -> EngineStep:
        if engine.step_number == 1:
            raise KeyboardInterrupt
        return result(engine, batch, learning_rate)

    monkeypatch.setattr(_StandIn, "step", dies)
    with pytest.raises(KeyboardInterrupt):
        continue_in_engine(training, tmp_path, steps=2)
    assert torch.equal(training.model.trainables.flat, before)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("executorch") is None, reason="executorch is not installed")
def test_the_real_engine_goes_on_beside_pytorch(tmp_path: Path) -> None:
    training = QueryTraining(replace(SETTINGS, model="tiny-llama-1", loss="label_words"))
    training.run(2)
    before = training.model.trainables.flat.clone()
    run = continue_in_engine(training, tmp_path, steps=3)
    assert run.file_bytes == (tmp_path / "training.pte").stat().st_size > 10_000
    assert [step for step, _ in run.losses] == [3, 4, 5]
    assert run.difference < 1e-4 and run.values < 1e-3 and run.scores[1][1] == run.scores[2][1]
    assert torch.equal(training.model.trainables.flat, before)


def test_the_engine_says_so_where_it_is_not_installed(
    training: QueryTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise ConfigError("A program was asked for.", "ExecuTorch is not installed.", "Install it.")

    monkeypatch.setattr(training_panel, "require_executorch", missing)
    run = continue_in_engine(training, tmp_path, steps=2)
    assert "ExecuTorch is not installed. Install it." in run._repr_html_() and list(tmp_path.iterdir()) == []
    assert "no step" in str(continue_in_engine(training, tmp_path, steps=0))


def test_queries_are_divided_by_hand_beside_the_planner(problem: Problem) -> None:
    divider = QueryDivider(problem)
    assert divider.counts == (2, 2, 2, 2) and "against the planner" in divider.headline.value
    seconds = query_seconds(problem, (2, 2, 2, 2))
    assert seconds[3] == max(seconds) and seconds[3] > 3 * seconds[1] > 5 * seconds[0]
    divider.sliders[3].value = 3
    divider.wait()
    assert "Not a step yet" in divider.headline.value and "8 queries" in divider.message.value
    divider.take_plan.click()
    divider.wait()
    assert divider.counts == divider.planned == query_counts(problem, plan_queries(problem))
    assert "(+0.0% against the planner)" in divider.headline.value and divider.message.value == ""
    assert query_step_s(problem, divider.counts) == pytest.approx(plan_queries(problem).total_s)
    small = replace(problem, cluster=_only_first_holds(problem))
    crowded = QueryDivider(small, (2, 2, 2, 2))
    assert "Out of memory" in crowded.headline.value and "delta" in crowded.message.value
    with pytest.raises(ConfigError, match="4 devices"):
        query_seconds(problem, (8,))


def _only_first_holds(problem: Problem):
    poor = with_memory(problem.cluster, 1_000_000)
    return replace(poor, devices=(problem.cluster.devices[0], *poor.devices[1:]))


def test_a_students_division_is_planned_and_timed(problem: Problem) -> None:
    firsts, each = linear_costs(problem)
    assert each[3] > 3 * each[1] > 5 * each[0] and min(firsts) >= 0
    rule = usable(queries.EXERCISES, "spread", lambda *given: [0])  # a wrong one: the planner's stands in
    counts = divided(problem, rule)
    assert query_step_s(problem, counts) <= 1.02 * plan_queries(problem).total_s
    assert equal_division(problem) == (2, 2, 2, 2)
    assert query_counts(problem, division_plan(problem, (5, 3, 0, 0))) == (5, 3, 0, 0)
    assert "5-3-0-0" in str(division_table(problem, {"mine": (5, 3, 0, 0)}))


def test_trainings_with_the_same_passes_and_a_steps_memory() -> None:
    result = forward_only.same_passes(SETTINGS, (1, 4), steps=1)
    assert [row[:2] for row in result.rows] == [("untrained", ""), ("1", "4"), ("4", "1")]
    peaks = {side: step_memory.measure("tiny-llama", side, 2, 4) for side in get_args(step_memory.Side)}
    assert all(seconds > 0 for _, seconds in peaks.values())
    assert "unknown here" in str(step_memory.memory_table({"backpropagation": (0, 1.0)}, title="one"))


def test_checkpointing_gives_the_same_gradient(training: QueryTraining) -> None:
    batch, model = training.batch(0), QueryTraining(SETTINGS).model
    step_memory.with_checkpoints(model)
    torch.testing.assert_close(exact_gradient(model, batch), exact_gradient(training.model, batch))


def test_a_ratio_of_steps_is_one_of_medians_and_marked_where_the_host_was_too_busy() -> None:
    seconds = [[9.0, 0.3, 0.3], [0.2, 0.2, 0.2]]
    reference = make_report()
    step = reference.steps[0]
    slow, fast = (replace(reference, steps=tuple(replace(step, measured_s=one) for one in own)) for own in seconds)
    assert forward_only.step_ratio(slow, fast) == pytest.approx(1.5)
    assert str(forward_only.step_ratio(slow, replace(fast, valid=False))).startswith("1.50 (!)")
