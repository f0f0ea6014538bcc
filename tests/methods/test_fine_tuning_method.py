"""The method as a user meets it: what it refuses, simulates and executes, and what is left of a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_job import tiny_job, two_devices, write_data

from tests.caches import own_cache
from tests.plans import staged_plan, stages
from tests.profiles import grid
from workbench import experiment
from workbench.core import Job, Report
from workbench.core.catalogue import load_cluster
from workbench.core.errors import ConfigError, PlanError
from workbench.core.profile import LayerProfile
from workbench.core.report import ALL_WEIGHTS, TRAINED_WEIGHTS
from workbench.methods.base import ignore
from workbench.methods.common.rank_results import RankResult
from workbench.methods.fine_tuning import method as fine_tuning
from workbench.methods.fine_tuning.handlers import Programs, SharedParameter, shared_parameters
from workbench.methods.fine_tuning.measure import measure_layers
from workbench.methods.fine_tuning.phases import FineTuningRankJob, TechniquePhase
from workbench.methods.ringada.measure import measure_layers as measure_ring_layers
from workbench.methods.training.handlers import planned_epoch
from workbench.methods.training.state_costs import with_room
from workbench.models.configuration import model_facts
from workbench.models.loading import load_stack
from workbench.models.saving import load_trained
from workbench.models.stack import LayerStack
from workbench.models.techniques import TechniqueConfig, TechniqueStage
from workbench.models.techniques import predict as predict_split
from workbench.planners import PARADIGMS, Problem, asteroid
from workbench.planners.memory import plan_needs
from workbench.profiler.analytic import analytic_profile
from workbench.runtime.engines import default_pool
from workbench.runtime.flat_optimizer import FlatAdamW
from workbench.simulator import simulate
from workbench.tasks.tokenize import evaluation_batches

PAIR = ("data_parallel", "pipeline_parallel")


def steady_layers(stack: LayerStack, config: TechniqueConfig, *, max_length: int) -> tuple[LayerProfile, ...]:
    """Return measured bytes and made-up seconds."""
    layers = measure_layers(stack, config, max_length=max_length, batch_sizes=(1,), lengths=(), budget_s=0.01)
    assert all(sum(layer.seconds(kind, 1, max_length) for layer in layers) > 0 for kind in ("F", "B", "STEP"))
    times = {"F": grid(4e-3), "B": grid(8e-3), "STEP": grid(1e-3)}
    return tuple(replace(layer, times=times) for layer in layers)


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measure coarsely, take times that no load on this machine changes, and leave nothing behind."""
    with own_cache(tmp_path_factory) as patch:
        patch.setattr(fine_tuning, "measure_layers", steady_layers)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def test_the_report_counts_a_tied_word_embedding_once(tmp_path: Path) -> None:
    rows = [{"prompt": f"Say {number}.", "completion": str(number)} for number in range(40)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    job = tiny_job(tmp_path / "rows.json", method="fine_tuning", options={"technique": "lora"})
    job = replace(job, model="tiny-gpt2", task="instruction_tuning", max_length=96)
    report = experiment.run(job, two_devices(), "simulate")
    weights = sum(parameter.numel() for parameter in load_stack(job.model).parameters())  # without a head
    assert report.bytes[ALL_WEIGHTS] - report.bytes[TRAINED_WEIGHTS] == pytest.approx(4 * weights, rel=0.01)


@pytest.mark.parametrize("technique", ["lora", "parallel"])
def test_the_last_layer_holds_the_words_head(technique: str) -> None:
    """Final norm and head: 4 bytes for each of d and V d values."""
    stack = load_stack("tiny-llama", with_head=True)
    assert stack.language_model_head is not None
    config = TechniqueConfig(technique=technique, hidden_size=32, num_layers=6, kind="text_generation")  # type: ignore[arg-type]
    layers = measure_layers(stack, config, max_length=16, batch_sizes=(1,), lengths=(), budget_s=0.01)
    assert layers[-1].frozen_bytes - layers[1].frozen_bytes == 4 * 32 + 4 * stack.language_model_head.weight.numel()


@pytest.mark.parametrize("measure", [measure_layers, measure_ring_layers])
def test_a_model_of_pictures_is_measured_at_its_only_length(measure: Callable[..., tuple[LayerProfile, ...]]) -> None:
    stack = load_stack("tiny-vit-2")
    config = TechniqueConfig(technique="serial", hidden_size=stack.hidden_size, num_layers=2, bottleneck=4)
    layers = measure(stack, config, max_length=17, batch_sizes=(1,), budget_s=0.01)
    assert [layer.times["F"].sequence_lengths for layer in layers] == [(17,), (17,)]


def job_for(data: Path, *, epochs: int = 2, **options: object) -> Job:
    return tiny_job(data, method="fine_tuning", epochs=epochs, options=options)


@pytest.mark.parametrize(
    ("method", "model", "options", "words"),
    [
        ("fine_tuning", "tiny-gpt2", {}, "the family gpt2.*built for bert, roberta, distilbert"),
        ("confidant", "tiny-bert", {"technique": "serial"}, "technique = 'serial'.*built for full and lora"),
        ("fine_tuning", "tiny-bert", {"lora_dropout": 0.1}, "lora_dropout = 0.1.*lora_dropout = 0"),
        ("fine_tuning", "tiny-bert", {"activations": "recompute"}, "activations = 'recompute'.*activations = memory"),
        ("fine_tuning", "tiny-bert", {"backbone_dtype": "int8"}, "backbone_dtype = 'int8'.*float32"),
        ("pac_plus", "tiny-bert", {}, "pac_plus on 'beta'.*Only confidant and fine_tuning"),
    ],
)
def test_what_jax_does_not_compute_is_refused(data: Path, method: str, model: str, options: dict, words: str) -> None:
    alpha, beta = (cluster := two_devices()).devices
    cluster = replace(cluster, devices=(alpha, replace(beta, framework="jax")))
    with pytest.raises(ConfigError, match=words):
        experiment.run(tiny_job(data, method=method, model=model, options=options), cluster, "simulate")


def test_lora_without_peft(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match="'peft' is not installed"):
        experiment.run(job_for(data, technique="lora"), two_devices(), "simulate")


@pytest.mark.parametrize("technique", ["lora", "adapters"])
def test_a_family_without_named_projections(technique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = load_stack("tiny-bert")
    monkeypatch.setattr("workbench.models.lora.layer_paths", lambda part, layer: {"up": "intermediate.dense"})
    with pytest.raises(ConfigError, match=r"BertLayer.*names no projection in the role of.*families.py"):
        TechniqueStage(stack.stage(0, 2), TechniqueConfig(technique=technique, hidden_size=32, num_layers=6))


def test_other_targets_are_refused() -> None:
    with pytest.raises(ConfigError, match="sequence_to_sequence"):
        TechniqueConfig(technique="full", hidden_size=32, num_layers=6, kind="sequence_to_sequence")


@pytest.mark.parametrize("technique", ["full", "lora", "adapters"])
@pytest.mark.parametrize("paradigm", ["standalone", "data_parallel", "pipeline_parallel", "hybrid"])
def test_every_pair_simulates(data: Path, technique: str, paradigm: str) -> None:
    """Every epoch costs the same kind of step, and a step's seconds are those of its timeline."""
    report = experiment.run(job_for(data, technique=technique, paradigm=paradigm), two_devices(), "simulate")
    assert not any(step.cached for step in report.steps) and len(report.epochs) == 2
    timeline = report.timelines["first epoch, predicted"]
    middle = [step for step in report.steps if step.epoch == 0][len(report.steps) // 4]
    assert timeline.makespan_s == pytest.approx(middle.predicted_s)
    kinds = {span.op.kind for span in timeline.spans}
    assert {"F", "B", "STEP"} <= kinds
    stages = [len(stage.shares) for stage in report.plan.stages]
    if paradigm in ("standalone", "data_parallel"):
        assert stages == [1 if paradigm == "standalone" else 2] and report.plan.num_micro_batches == 1
        assert ("ALLREDUCE" in kinds) == (paradigm == "data_parallel")
    elif paradigm == "pipeline_parallel":
        assert set(stages) == {1}


def test_what_does_not_fit_is_named_with_device_and_bytes(data: Path) -> None:
    """Full fine-tuning holds weights, gradients and two moments, and a copy of weights and moments that is written to
    the disk: 28 bytes for each parameter, where LoRA's backbone takes 4."""
    options = {"paradigm": "standalone", "activations": "memory"}
    jobs = {name: job_for(data, technique=name, **options) for name in ("full", "lora")}
    need = {}
    for name, job in jobs.items():
        profile = with_room(experiment.profile(job, two_devices(), "execute"), job)
        plan = experiment.plan(job, two_devices(), "execute")
        lengths = fine_tuning.FineTuning().prepare(job, lambda event: None).train.lengths
        (need[name],) = plan_needs(profile, plan, sequence_length=max(lengths)).values()
    parameters = sum(parameter.numel() for parameter in load_stack("tiny-bert").parameters())
    full = need["full"]
    assert full.weights_bytes + full.gradient_bytes + full.optimizer_bytes >= 28 * parameters
    assert need["lora"].weights_bytes + need["lora"].gradient_bytes + need["lora"].optimizer_bytes < 6 * parameters
    assert full.total_bytes > need["lora"].total_bytes
    between = two_devices(need["lora"].total_bytes)
    with pytest.raises(PlanError, match=r"Device '(alpha|beta)' has [\d.]+ MB; stage 0 \(layers 0-5\) needs [\d.]+ MB"):
        experiment.run(jobs["full"], between, "simulate")
    assert experiment.run(jobs["lora"], between, "simulate").steps
    just_enough = two_devices(full.total_bytes)
    assert experiment.plan(jobs["full"], just_enough).stages
    chosen = job_for(data, technique="full", paradigm="standalone")
    [stage] = experiment.plan(chosen, just_enough).stages
    assert stage.activations == "memory"
    [stage] = experiment.plan(chosen, two_devices(full.total_bytes - full.context_bytes // 2)).stages
    assert stage.activations == "recompute"
    with pytest.raises(PlanError, match="gradients and optimizer"):  # backups are kept in memory too
        experiment.plan(replace(jobs["full"], snapshot_every=5, snapshot_to="neighbour"), just_enough)


@pytest.mark.parametrize("technique", ["full", "lora", "adapters"])
def test_paper_scale_from_the_catalogue(technique: str) -> None:
    """T5-Base on Jetson Nanos from analytic costs, in each paradigm that fits."""
    cluster = load_cluster("pac-env-a")
    profile = analytic_profile("T5-Base", cluster, technique=technique, sequence_lengths=(128,))
    lengths = (128,) * 16
    if technique == "full":
        with pytest.raises(PlanError, match=r"Device 'nano.*needs [\d.]+ GB"):
            PARADIGMS["data_parallel"](Problem(profile, cluster, batch_size=16, micro_batches=4, sequence_length=128))
    for planner in (PARADIGMS["pipeline_parallel"], asteroid):
        plan = planner(Problem(profile, cluster, batch_size=16, micro_batches=4, sequence_length=128))
        shared = (SharedParameter("words", (0, len(plan.stages) - 1), 32128 * 768),) if technique == "full" else ()
        (step,) = planned_epoch(lengths, plan.mini_batch_size, plan.num_micro_batches, seed=0, epoch=0)
        assert 1 < simulate(Programs(profile, cluster, plan, None, shared).step(step.shape)).makespan_s < 200


def test_which_stages_share_parameters() -> None:
    """T5's encoder tables, its decoder's, and the word embedding where encoder and decoder begin."""
    facts = model_facts("tiny-t5")
    plan = staged_plan(*((1, {rank: 1}) for rank in range(6)))
    results = {
        shared_parameter.name: shared_parameter.stages for shared_parameter in shared_parameters(facts, "full", plan)
    }
    assert results == {"words": (0, 3), "position bias": (0, 1, 2), "decoder position bias": (3, 4, 5)}
    stack = load_stack("tiny-t5")
    for shared_parameter in shared_parameters(facts, "full", plan):
        for number in shared_parameter.stages:
            assert (
                stack.stage(number, number + 1).shared_parameters()[shared_parameter.name].numel()
                == shared_parameter.numel
            )
    assert shared_parameters(facts, "lora", plan) == ()
    assert shared_parameters(model_facts("tiny-bert"), "full", plan) == ()


def test_what_a_run_trained_predicts_the_same(data: Path, tmp_path: Path) -> None:
    """LoRA over a pipeline: the artifact gives the test metrics again; resumed when it is done, it trains nothing
    more."""
    job = job_for(data, technique="lora", paradigm="pipeline_parallel")

    def run(folder: str, *, resume: bool = False, **options: object) -> Report:
        return experiment.run(job, two_devices(), workdir=tmp_path / folder, fidelity="paced", resume=resume, **options)

    reference = run("whole")
    assert set(reference.timelines) == {"first epoch, predicted", "first epoch, measured"}
    assert all(step.predicted_s and step.measured_s and step.loss for step in reference.steps)
    assert all("accuracy" in epoch.metrics for epoch in reference.epochs)

    resumed = run("whole", resume=True)
    assert any("all 2 epochs were finished" in note for note in resumed.notes)
    assert [step.loss for step in resumed.steps] == [step.loss for step in reference.steps]
    assert resumed.metrics == reference.metrics

    model, _ = load_trained(reference.artifacts["adapter"])
    prepared = fine_tuning.FineTuning().prepare(job, lambda event: None)
    predictions = predict_split(model, evaluation_batches(prepared.test))
    right = sum(a == b for a, b in zip(predictions.answers("classification"), predictions.references(), strict=True))
    assert right / len(prepared.test) == pytest.approx(reference.metrics["accuracy"])
    assert sorted(path.name for path in (tmp_path / "whole" / "snapshots").iterdir()) == [
        f"weights-epoch-{epoch}-step-0-layers-{layers}.safetensors" for epoch in (1, 2) for layers in ("0-3", "3-6")
    ]


def test_full_fine_tuning_in_groups_executes(data: Path, tmp_path: Path) -> None:
    """Data parallel and full, on running devices, through the same door as every user."""
    job = job_for(data, epochs=1, technique="full", paradigm="data_parallel")
    report = experiment.run(job, two_devices(), workdir=tmp_path / "run", fidelity="paced")
    assert {span.op.kind for span in report.timelines["first epoch, measured"].spans} == {"F", "B", "ALLREDUCE", "STEP"}
    model, _ = load_trained(report.artifacts["adapter"])
    before = load_stack("tiny-bert").stage(0, 6).state_dict()
    moved = [name for name, tensor in model.backbone.state_dict().items() if not torch.equal(tensor, before[name])]
    assert any(name.startswith("embedding.") for name in moved) and any(name.startswith("layers.5.") for name in moved)


@pytest.mark.parametrize("schedule", ["1f1b", "asynchronous_1f1b"])
def test_a_device_whose_step_was_given_up_goes_on_with_its_layers(data: Path, schedule: str) -> None:
    """Only with the same layers; its gradients, and older versions of its weights, are dropped."""
    job, cluster = (
        tiny_job(data, method="fine_tuning", options={"technique": "lora", "schedule": schedule}),
        two_devices(),
    )
    method = fine_tuning.FineTuning()
    prepared = method.prepare(job, ignore)
    profile = method.catalogue(prepared, cluster)
    plan = replace(method.plan(prepared, profile, cluster), stages=stages((2, {0: job.batch_size})))
    rank_job = method.rank_job(prepared, profile, cluster, plan)

    def phase(of: FineTuningRankJob) -> TechniquePhase:
        session: Any = SimpleNamespace(rank=0, rank_job=of, progress=SimpleNamespace(phase=lambda name: None))
        return TechniquePhase(session, of.phases()[0], RankResult(rank=0))

    given_up, next_one = phase(rank_job), phase(rank_job)
    given_up.load(0)
    saved = given_up.hand_on()
    assert saved is not None
    optimizer = saved.optimizer if schedule == "1f1b" else getattr(saved.optimizer, "inner", None)
    assert isinstance(optimizer, FlatAdamW)
    optimizer.gradients.fill_(1.0)
    optimizer.compute_with(optimizer.keep_version())
    optimizer.parameters.fill_(2.0)
    half = replace(plan, stages=stages((1, {0: job.batch_size})))
    assert not phase(replace(rank_job, plan=half)).take(saved)
    assert next_one.take(saved) and next_one.compute is given_up.compute
    assert not optimizer.gradients.any()
    assert all(bool((parameter == 2.0).all()) for parameter in next_one.compute.model.trained().values())


def test_a_sweep_measures_what_it_simulates(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = {paradigm: job_for(data, technique="adapters", paradigm=paradigm) for paradigm in PAIR}
    plans = {paradigm: experiment.plan(job, two_devices(), "execute") for paradigm, job in jobs.items()}
    messages: list[str] = []
    points = experiment.sweep(
        jobs[PAIR[0]],
        two_devices(),
        plans,
        num_steps=3,
        fidelity="paced",
        progress=lambda event: messages.append(event.message),
    )
    assert [f"plans; now '{name}'" for name in PAIR] == [one for one in messages if one.startswith("plans; ")][:2]
    assert "Simulating 2 plans" in messages and "Measuring 2 plans" in messages
    assert [point.name for point in points] == list(PAIR)
    assert all(point.num_steps == 3 and point.predicted_s > 0 and point.measured_s for point in points)
    pipeline = next(plan for plan in plans.values() if len(plan.stages) > 1)
    wrong = replace(pipeline, stages=pipeline.stages[:1])
    monkeypatch.setattr(
        default_pool(), "acquire", lambda *_: pytest.fail("a plan is executed before all are known to be possible")
    )
    with pytest.raises(ConfigError, match="layers"):
        experiment.sweep(
            jobs[PAIR[0]], two_devices(), {"good": plans[PAIR[0]], "wrong": wrong}, num_steps=3, fidelity="paced"
        )
