"""The adviser: what it compares, how it ranks, what it says, and what it refuses."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import Any

import pytest
from in_process import answer, call

from tests.clusters import with_devices
from workbench import experiment
from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.heat import Level
from workbench.core.job import Job
from workbench.methods.common.acceptances import Acceptance, acceptance_of
from workbench.methods.common.scaling import is_measured_here
from workbench.methods.galaxy_plus.serving.drafts import tokens_of_pass
from workbench.plots.choices import choices as draw
from workbench.runs import curves
from workbench.runs.advice import Advice, advise, combinations, seconds_of
from workbench.runs.advice_text import draft_commands, draft_conclusion
from workbench.runs.curves import Curve

JOB = Job(model="tiny-bert", epochs=2, train_samples=64)


def on(cluster: Cluster, **settings: Any) -> Advice:
    return advise(JOB, cluster, computed=True, **settings)


def slow_links(latency_s: float) -> Cluster:
    return load_cluster("laptop-equal").with_links(lambda link: replace(link, latency_s=latency_s))


@pytest.fixture(scope="module")
def advice() -> Advice:
    return on(load_cluster("laptop"))


def test_every_method_that_trains_is_compared(advice: Advice) -> None:
    names = {choice.job.method for choice in advice.choices}
    assert names >= {"pac_plus", "fine_tuning", "ringada", "confidant"} and "galaxy_plus" not in names
    assert len({choice.name for choice in advice.choices}) == len(advice.choices) > 8
    assert advice.costs == "computed"


def test_the_best_is_first_and_what_is_grey_is_worse_in_everything(advice: Advice) -> None:
    figures = [(choice.seconds or 0.0, choice.joules or 0.0, choice.memory_bytes) for choice in advice.choices]
    assert [seconds for seconds, *_ in figures] == sorted(seconds for seconds, *_ in figures)
    for choice, figure in zip(advice.choices, figures, strict=True):
        better = [
            other for other in figures if all(a <= b for a, b in zip(other, figure, strict=True)) and other != figure
        ]
        if choice.is_dominated:  # within the tolerance
            assert any(
                all(a <= 1.03 * b for a, b in zip(other, figure, strict=True)) for other in figures if other != figure
            )
        else:
            assert all(max(b / a for a, b in zip(other, figure, strict=True)) <= 1.03 for other in better)
    assert any(choice.is_dominated for choice in advice.choices) and not advice.choices[0].is_dominated


def test_a_choices_figures_are_those_of_its_simulation(advice: Advice) -> None:
    choice = advice.choices[0]
    report = experiment.run(choice.job, replace_models(load_cluster("laptop")), "simulate")
    assert choice.seconds == pytest.approx(sum(epoch.seconds for epoch in report.epochs))
    assert choice.report.plan.stages == report.plan.stages


def test_what_the_combinations_share_changes_none_of_them(advice: Advice) -> None:
    for choice in advice.choices:
        alone = experiment.run(choice.job, replace_models(load_cluster("laptop")), "simulate")
        assert alone.plan == choice.report.plan and alone.step_parts == choice.simulated.parts


def replace_models(cluster: Cluster) -> Cluster:
    return with_devices(cluster, model="computed")


@pytest.mark.parametrize("goal", ["energy", "memory"])
def test_what_counts_decides_the_order(goal: Any) -> None:
    figures = [choice.figure(goal) for choice in on(load_cluster("pair"), goal=goal, keeps_data=True).choices]
    known = [figure for figure in figures if figure is not None]
    assert known == sorted(known) and figures[: len(known)] == known


def test_on_slow_links_one_device_is_enough_and_the_latency_is_named() -> None:
    advice = on(slow_links(3.0))
    assert len(advice.choices[0].devices) == 1
    assert "One device is enough" in advice.reason and "latency takes" in advice.reason


def test_the_reason_names_shared_air_and_heat() -> None:
    """On a switch, with devices that stay cold, it names neither."""
    cluster = with_devices(load_cluster("laptop-equal"), flops_per_s=1e8)  # so slow that several pay
    curve = (Level(heat_s=0.0, speed=1.0), Level(heat_s=0.01, speed=0.5))
    edge = replace(with_devices(cluster, sustained=curve), medium="wifi")
    plain, reason = (on(each).reason for each in (cluster, edge))
    assert "share the air" not in plain and "get hot" not in plain
    assert "All messages share the air of one Wi-Fi network. Devices get hot: the run's steps take " in reason


def test_data_that_stay_and_requests_have_their_own_methods() -> None:
    staying = {job.method for _, job in combinations(JOB, keeps_data=True)}
    serving = {job.method for _, job in combinations(JOB, serves=True)}
    assert staying == {"ringada"} and serving == {"galaxy_plus"}


def test_drafts_of_texts_pay_from_the_acceptance_at_which_they_are_as_fast_as_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compared with the fastest plan without one.  How many guesses are right, nobody says."""
    cluster = slow_links(1e-5)  # devices so slow that it pays to divide a tiny model
    cluster = with_devices(cluster, flops_per_s=1e8, memory_bytes_per_s=1e7)
    job = replace(JOB, model="tiny-llama-4")
    drafts = advise(job, cluster, computed=True, serves=True, draft="tiny-llama-2").drafts
    assert drafts is not None and len(drafts.devices) > 1 and drafts.best is drafts.offers[0]
    assert {offer.name for offer in drafts.offers} == {"tiny-llama-2", "layers:1", "layers:2", "int4"}
    assert drafts.offers[-1].break_even is None
    for one in drafts.offers:
        assert one.guesser in {device.name for device in cluster.devices}
        assert (one.break_even is None) == (one.at_most < 1) and one.at_most == 5 * drafts.token_s / one.round_s
        if one.break_even is not None:
            before, after = (tokens_of_pass(one.break_even - less) for less in (0.01, 0))
            assert before * drafts.token_s < one.round_s <= after * drafts.token_s
    count, serve = draft_commands(drafts, "mine.toml")
    assert count.startswith("workbench generate tiny-llama-4 ") and "--cluster mine.toml" in serve
    assert all(f"--draft {drafts.best.name}" in command for command in (count, serve))
    assert draft_conclusion(drafts).endswith("not on the devices.")
    int4 = next(offer for offer in drafts.offers if offer.name == "int4")
    counted = Acceptance(model="tiny-llama-4", draft="int4", right=3, wrong=1, texts=2, tokens=9, command="")
    for expected, best, words in (
        (1.5, "int4", "In 2 texts of ours 75% .* 1.5 times"),
        (0.5, drafts.best.name, "devices.$"),
    ):
        known = replace(int4, break_even=0.1, acceptance=counted, expected=expected)
        others = [offer for offer in drafts.offers if offer is not int4]
        changed = replace(drafts, offers=(*others, known))
        assert changed.best is not None and changed.best.name == best and re.search(words, draft_conclusion(changed))
    assert "No draft can pay" in draft_conclusion(replace(drafts, offers=drafts.offers[-1:]))
    assert "No device has memory" in draft_conclusion(replace(drafts, offers=()))
    assert on(cluster.part([0]), serves=True).drafts is None  # BERT writes no texts
    for asked, settings, words in (
        (job, {"serves": True}, "has an encoder"),
        (job, {}, "on a training. Ask for --serve"),
        (JOB, {"serves": True}, f"'{JOB.model}' writes none. Choose a model that does"),
    ):
        with pytest.raises(ConfigError, match=words):
            advise(asked, cluster, computed=True, draft="tiny-t5-4", **settings)
    words = ["advise", "--serve", "--computed", "--model", "tiny-llama-4", "--cluster", "pair"]
    on_pair = advise(job, load_cluster("pair"), computed=True, serves=True)
    monkeypatch.setattr("workbench.runs.advice.advise", lambda *_, **__: on_pair)
    shown = call(*words).output
    assert "Drafts, simulated; without one" in shown and "pays from" in shown
    content = answer(*words)
    assert {draft["draft"] for draft in content["drafts"]} == {"layers:1", "layers:2", "int4"}


def test_the_expected_gain_of_a_draft_is_that_of_the_counted_guesses() -> None:
    job = replace(JOB, model="SmolLM2-135M")
    drafts = advise(job, slow_links(1e-3), computed=True, serves=True).drafts
    assert drafts is not None and {offer.name for offer in drafts.offers} == {"int4", "layers:8", "layers:15"}
    for offer in drafts.offers:
        counted = acceptance_of("SmolLM2-135M", offer.name)
        assert counted is not None and offer.acceptance == counted and offer.expected is not None
        assert offer.expected == pytest.approx(tokens_of_pass(counted.share) * drafts.token_s / offer.round_s)


def test_a_score_is_reached_when_a_measured_curve_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    curve = Curve(
        model="tiny-bert",
        task="sentiment",
        method="pac_plus",
        batch_size=32,
        train_samples=64,
        metric="accuracy",
        scores=(0.5, 0.6, 0.8),
        seeds=(0,),
        command="a test",
    )
    assert curve.steps_to(0.7) == pytest.approx(3) and curve.steps_to(0.9) is None and curve.steps_to(0.4) == 0
    monkeypatch.setattr(curves, "curves_in", lambda path: (curve,))
    advice = on(load_cluster("pair"), score=0.7)
    [*known] = [choice for choice in advice.choices if choice.seconds is not None]
    assert known and {choice.job.method for choice in known} == {"pac_plus"}
    assert all("backbone_dtype" not in choice.job.options for choice in known)
    unknown = [choice.run_s for choice in advice.choices if choice.seconds is None]
    assert unknown == sorted(unknown) and advice.choices[: len(known)] == tuple(known)
    best = known[0]
    assert best.seconds == pytest.approx(seconds_of(best.report, 1.5))
    first, second = (epoch.seconds for epoch in best.report.epochs)
    assert seconds_of(best.report, 1.5) == pytest.approx(first + second / 2)
    assert seconds_of(best.report, 4) == pytest.approx(first + 3 * second)


def test_a_curve_holds_wherever_activations_are(monkeypatch: pytest.MonkeyPatch) -> None:
    lora = Curve(
        model="tiny-bert",
        task="sentiment",
        method="fine_tuning",
        options={"technique": "lora"},
        batch_size=32,
        train_samples=64,
        metric="accuracy",
        scores=(0.5, 0.6),
        seeds=(0,),
        command="a test",
    )
    monkeypatch.setattr(curves, "curves_in", lambda path: (lora,))
    job = Job(model="tiny-bert", method="fine_tuning", train_samples=64)
    options = {"technique": "lora", "paradigm": "data_parallel", "activations": "disk"}
    assert list(curves.curves_of(replace(job, options=options))) == [lora]
    assert list(curves.curves_of(replace(job, options=options | {"backbone_dtype": "int8"}))) == []


def test_nothing_possible_is_an_error_with_the_reasons() -> None:
    with pytest.raises(ConfigError, match=r"Nothing can run\. .*kB.* \d+ other combinations are refused"):
        on(with_devices(load_cluster("pair"), memory_bytes=10_000))


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"score": 2.0}, "A metric ends at 1"), ({"score": -1.0}, "A metric"), ({"model": "nonsense-7b"}, "nonsense-7b")],
)
def test_nonsense_is_one_sentence_before_anything_is_simulated(settings: dict[str, Any], words: str) -> None:
    job = replace(JOB, model=settings.pop("model", JOB.model))
    with pytest.raises(ConfigError, match=words) as error:
        advise(job, load_cluster("pair"), computed=True, **settings)
    assert str(error.value).count("nonsense-7b") <= 1


def test_computed_costs_measure_nothing_and_one_device_has_nothing_to_divide() -> None:
    stages: list[str] = []
    cluster = load_cluster("pair").part([0])
    advice = advise(JOB, cluster, computed=True, keeps_data=True, progress=lambda event: stages.append(event.stage))
    assert "profile" not in stages
    assert not any("paradigm" in choice.job.options for choice in advice.choices)


@pytest.mark.parametrize(
    ("model", "cluster", "is_measured"),
    [("tiny-bert", "laptop", True), ("tiny-bert", "pac-env-b", False), ("shape:opt-1.3b", "laptop", False)],
)
def test_only_shares_of_this_host_are_said_to_be_measured(model: str, cluster: str, is_measured: bool) -> None:
    assert is_measured_here(model, load_cluster(cluster)) is is_measured


def test_the_command_line_says_what_to_do_next(tmp_path: Any) -> None:
    words = ["advise", "--model", "tiny-bert", "--epochs", "1", "--train-samples", "32", "--computed", "--keep-data"]
    words += ["--cluster", "pair"]
    shown = call(*words, "--figure", tmp_path / "all.html")
    assert shown.exit_code == 0 and "Best for time" in shown.output and (tmp_path / "all.html").is_file()
    content = answer(*words)
    command = shlex.split(content["choices"][0]["command"])
    assert "drafts" not in content
    assert command[:2] == ["workbench", "run"] and command[-2:] == ["--cluster", "pair"]


def test_combinations_without_power_figures_have_no_place_in_the_picture() -> None:
    figure = draw([("a", 1.0, None, 5, False), ("b", 2.0, 3.0, 5, False), ("c", 3.0, 4.0, 9, True)], label="simulated")
    assert [trace.name for trace in figure.data] == ["2: b", "3: c"]
    assert [trace.showlegend for trace in figure.data] == [True, False]
    assert draw([("a", 1.0, None, 5, False)], label="simulated").layout.annotations


def test_whoever_ranks_by_memory_gets_activations_computed_again_or_on_the_disk(advice: Advice) -> None:
    """The disk only where a step is then shorter: with slow processors, not with the laptop's."""
    again, disk = (f"Fine-tuning: LoRA, activations {where}" for where in ("computed again", "on the disk"))
    assert "does not pay" in advice.refused[disk] and again in {choice.name for choice in advice.choices}
    laptop = load_cluster("laptop")
    slow = with_devices(laptop, flops_per_s=1e8)
    ranked = on(slow, goal="memory")
    places = {choice.name: place for place, choice in enumerate(ranked.choices)}
    others = [
        place for name, place in places.items() if name.startswith("Fine-tuning: LoRA") and name not in (again, disk)
    ]
    assert places[disk] < places[again] < min(others)
    for name, words in (
        (again, "The backward pass computes the activations of layers 0-"),
        (disk, "are on the disk, to"),
    ):
        assert words in replace(ranked, choices=ranked.choices[places[name] :]).reason
