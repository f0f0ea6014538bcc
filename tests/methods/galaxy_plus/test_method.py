"""The method as a user meets it: what it refuses, simulates and executes, and what a report says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tiny_job import tiny_job, write_data

from tests.clusters import with_devices
from tests.methods.conftest import four_devices
from tests.methods.galaxy_plus.ranks import serve_with_little
from tests.plans import staged_plan
from tests.waiting import LIMIT_S
from workbench import experiment
from workbench.assets.fetch import asset_path
from workbench.cli.output import summary
from workbench.core import Cluster, Job, Report
from workbench.core.errors import ConfigError, MemoryBudgetError, PlanError, ScheduleError
from workbench.methods.base import Event, Planned, ignore
from workbench.methods.galaxy_plus import profiles
from workbench.methods.galaxy_plus.method import GalaxyPlus, list_job
from workbench.methods.galaxy_plus.planners.search import is_split
from workbench.methods.galaxy_plus.prices import Programs
from workbench.methods.galaxy_plus.profiles import inference_of, measure_host
from workbench.methods.galaxy_plus.serving.run_policy import RunPolicy
from workbench.methods.galaxy_plus.serving.worker import serve_worker
from workbench.methods.galaxy_plus.session import SessionSetup
from workbench.plots.export import figures
from workbench.runtime.engines import EngineCluster
from workbench.simulator import simulate

SYSTEMS = ("galaxy_plus", "galaxy", "megatron_lm", "sequence_parallel", "edgeshard", "local")
PARADIGMS = {"megatron_lm": "tensor", "sequence_parallel": "sequence", "edgeshard": "pipeline", "local": "pipeline"}
REQUESTS = 5
MEMORY_BYTES = 40_000_000
"""Less than half of all-MiniLM-L6-v2."""


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measure coarsely, and leave nothing behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(profiles, "measure_host", partial(measure_host, shares=(0.5, 1.0), budget_s=0.01))
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def job_for(data: Path, model: str = "tiny-bert-2", **options: object) -> Job:
    job = tiny_job(data, method="galaxy_plus", model=model, test_samples=REQUESTS, options=options)
    return replace(job, micro_batches=1)


def execute(job: Job, engines: EngineCluster, folder: Path, **settings: object) -> Report:
    return experiment.run(job, four_devices(), engines=engines, workdir=folder, **settings)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("tiny-bert-2", {"system": "pac_plus"}, ("system = 'pac_plus'", "one of galaxy_plus, galaxy, megatron_lm")),
        ("tiny-bert-2", {"tiles": 8}, ("The option 'tiles' of galaxy_plus", "tile_tokens")),
        ("tiny-bert-2", {"compare": -1}, ("compare = -1", "at least 0")),
        ("tiny-bert-2", {"scheme": 3}, ("scheme = 3", "one of 1, 2")),
        ("tiny-bert-2", {"system": "edgeshard", "scheme": 2}, ("system = edgeshard", "needs system = galaxy_plus")),
        ("tiny-bert-2", {"generate": 4}, ("generate = 4", "no language model head")),
        (
            "tiny-gpt2-2",
            {"system": "sequence_parallel", "generate": 4},
            ("generate = 4", "cannot divide a single token"),
        ),
        ("tiny-gpt2-2", {"generate": 128}, ("128 new tokens", "128 positions")),
        ("tiny-gpt2-2", {"generate": 125}, ("125 new tokens", "a prompt takes at least 4", "Ask for 124 at most")),
    ],
)
def test_wrong_options_are_named(data: Path, model: str, options: dict, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        experiment.run(job_for(data, model, **options), four_devices(), "simulate")
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_simulates(data: Path, system: str, tmp_path: Path) -> None:
    """A report says who holds what; the shown request takes as long as its timeline; JSON gives the report again."""
    report = experiment.run(job_for(data, system=system), four_devices(), "simulate")
    chosen = report.plan.inference
    assert chosen is not None and chosen.paradigm == PARADIGMS.get(system, "hybrid")
    assert len(report.steps) == REQUESTS and all((step.predicted_s or 0) > 0 for step in report.steps)
    timeline = report.timelines["request, predicted"]
    assert any(timeline.makespan_s == pytest.approx(step.predicted_s) for step in report.steps)
    assert report.phases_s["answering"] == pytest.approx(sum(step.predicted_s or 0 for step in report.steps))
    shares = [share for stage in report.plan.stages for share in stage.shares]
    if system in ("galaxy_plus", "galaxy", "megatron_lm"):
        assert sum(share.heads for share in shares) == sum(chosen.units)
        assert sum(share.columns for share in shares) == sum(chosen.columns)
    assert Report.read(report.write(tmp_path / "report.json")) == report


def test_a_run_answers_every_request(data: Path, engines: EngineCluster, tmp_path: Path) -> None:
    job = job_for(data, system="galaxy", overlap=True, compare=3)
    seen: list[Event] = []

    def watch(event: Event) -> None:
        seen.append(event)
        if event.watch is not None:
            event.watch()

    report = execute(job, engines, tmp_path, resume=True, progress=watch)
    assert all(step.predicted_s and step.measured_s and step.loss is None for step in report.steps)
    assert len(report.steps) == report.metrics["requests"] == REQUESTS
    latencies = sorted(step.measured_s or 0.0 for step in report.steps)
    assert report.metrics["latency p50 s"] == pytest.approx(latencies[REQUESTS // 2])
    assert latencies[0] <= report.metrics["latency mean s"] <= report.metrics["latency p99 s"] <= latencies[-1]
    assert report.metrics["largest error"] < 1e-5
    assert any("all requests are answered again" in note for note in report.notes)
    measured, predicted = (report.timelines[f"request, {name}"] for name in ("measured", "predicted"))
    done = [sorted((span.rank, str(span.op)) for span in timeline.spans) for timeline in (measured, predicted)]
    assert done[0] == done[1], "the very operations that were simulated were run"
    assert measured.title == predicted.title and "tokens" in measured.title
    shown = next(event for event in seen if event.kind == "spans")
    assert {(span.rank, span.op.kind) for span in shown.spans} == {(span.rank, span.op.kind) for span in measured.spans}
    assert min(span.start_s for span in shown.spans) == 0
    assert all(measured.peak_bytes(rank) > 0 for rank in (report.plan.inference or pytest.fail("no plan")).ranks)
    text, drawn = summary(report), [captioned.name for captioned in figures(report)]
    assert "Latency" in text and "differ from the local model's" in text and "hybrid model parallelism" in text
    assert not any(word in text.lower() for word in ("loss", "epoch", "micro-batch", "cache"))
    assert {"gantt-request_measured", "gantt-request_predicted", "predicted_against_measured"} <= set(drawn)
    assert not {"curves", "epoch_times"} & set(drawn)
    assert report.bytes["sent for a request"] == round(mean_bytes(job, report))


def mean_bytes(job: Job, report: Report) -> float:
    """Return the bytes that the simulated requests send, on average."""
    method, cluster = GalaxyPlus(), four_devices()
    prepared = method.prepare(job, ignore)
    assert report.plan.inference is not None
    inference = inference_of(method.profile(prepared, cluster, ignore))
    programs = Programs(cluster, inference.stacks, inference)
    timelines = [
        simulate(programs.sequence(report.plan.inference, prepared.lengths(number)).program)
        for number in range(REQUESTS)
    ]
    return sum(timeline.bytes_sent(rank) for timeline in timelines for rank in range(4)) / REQUESTS


@pytest.mark.parametrize("model", ["tiny-bert-2", "tiny-gpt2-2", "tiny-t5-4"])
@pytest.mark.parametrize("scheme", [1, 2])
def test_a_forced_scheme_splits_and_says_its_price(data: Path, model: str, scheme: int) -> None:
    """Tiny models are fastest on one device, which is not what was asked for."""
    for memory_bytes in (30_000_000, 2_000_000_000):
        report = experiment.run(job_for(data, model, scheme=scheme), four_devices(memory_bytes), "simulate")
        assert report.plan.inference is not None and is_split(report.plan.inference)
        assert set(report.plan.inference.schemes) == {scheme}
        [price] = [note for note in report.plan.notes if note.startswith(f"Scheme {scheme} was asked for: split over")]
        assert "ms" in price and "alone" in price
        timeline = report.timelines["request, predicted"]
        assert len({span.rank for span in timeline.spans if not span.op.is_communication}) > 1
        assert sum(timeline.bytes_sent(rank) for rank in range(4)) > 0
    alone = replace(four_devices(), devices=four_devices().devices[:1])
    with pytest.raises(ConfigError, match=f"Scheme {scheme} was asked for.* stays on one device"):
        experiment.run(job_for(data, model, scheme=scheme), alone, "simulate")


def test_texts_and_pictures(data: Path, engines: EngineCluster, tmp_path: Path) -> None:
    steps: list[Event] = []
    job = job_for(data, "tiny-gpt2-2", generate=3, scheme=2)
    written = execute(job, engines, tmp_path / "text", progress=steps.append)
    answered = [event for event in steps if event.kind == "step"]
    assert sum(event.tokens for event in answered) == 3 * sum(event.samples for event in answered) == 3 * REQUESTS
    assert not any(event.kind == "spans" for event in steps)  # nobody looked
    assert written.metrics["texts that differ"] == 0
    assert len({span.rank for span in written.timelines["request, measured"].spans if not span.op.is_communication}) > 1
    assert written.metrics["first token s"] > 0 and written.metrics["further token s"] > 0
    assert {"request, measured", "next token, measured", "next token, predicted"} <= set(written.timelines)
    values = [
        [written.timelines[f"next token, {kind}"].peak_bytes(rank) for rank in range(4)]
        for kind in ("measured", "predicted")
    ]
    assert values[0] == pytest.approx(values[1], rel=0.03)  # weights, keys and values, and what the token needs
    assert all(" | " in written.artifacts[f"text {number}"] for number in range(4))
    seen = execute(
        Job(method="galaxy_plus", model="tiny-vit-2", task="digits", test_samples=3, options={"system": "galaxy"}),
        engines,
        tmp_path / "seen",
    )
    assert seen.metrics["largest error"] < 1e-5


def test_too_little_memory(data: Path, engines: EngineCluster) -> None:
    """The planner says how much is missing; a device that runs out all the same says so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORKBENCH_CACHE")
        folder = asset_path("all-MiniLM-L6-v2")
    reference = job_for(data, str(folder), system="sequence_parallel")
    with pytest.raises(PlanError, match=r"Device 'device-\d'.*MB"):
        experiment.run(reference, of_another_make(four_devices(memory_bytes=MEMORY_BYTES)), "simulate")
    policy = run_of(reference, of_another_make(four_devices()))
    setup = SessionSetup(model=str(folder), cluster=policy.job.cluster, timeout_s=LIMIT_S, is_run=True)
    with (
        pytest.raises(MemoryBudgetError, match=r"Device 'device-\d' asked for"),
        engines.service(serve_with_little, [setup] * 4) as devices,
    ):
        policy.run(devices, policy.job.cluster, reference)


def of_another_make(cluster: Cluster) -> Cluster:
    """Return devices whose speed is computed from the catalogue, not measured."""
    return with_devices(cluster, model="another")


def run_of(job: Job, cluster: Cluster, notify: Callable[[Event], None] = ignore) -> RunPolicy:
    """Return the policy that answers a job's requests, not paced."""
    method = GalaxyPlus()
    prepared = method.prepare(job, ignore)
    plan = method.plan(prepared, method.profile(prepared, cluster, ignore, emulated=False), cluster)
    return RunPolicy(list_job(prepared, cluster, plan, timeout_s=LIMIT_S), plan, notify)


def test_a_run_that_is_to_stop(data: Path, engines: EngineCluster) -> None:
    """The user ends it while requests are answered; the devices live on, and answer all requests after that."""
    job, seen = job_for(data, system="galaxy"), list[Event]()

    def interrupt(event: Event) -> None:
        seen.append(event)
        if event.kind == "step":
            raise KeyboardInterrupt

    for notify in (interrupt, seen.append):
        policy = run_of(job, four_devices(), notify)
        setup = SessionSetup(model=job.model, cluster=policy.job.cluster, timeout_s=LIMIT_S, is_run=True)
        with suppress(KeyboardInterrupt), engines.service(serve_worker, [setup] * 4) as devices:
            policy.run(devices, policy.job.cluster, job)
    assert [len(served) for served in policy.served.values()] == [REQUESTS] * 4 and policy.step == REQUESTS
    first = policy.job.plan.ranks[0]
    assert [event.step for event in seen if event.kind == "step"][-1] == REQUESTS - 1
    assert {event.rank for event in seen if event.device and event.device.phase == "answering"} == {0, 1, 2, 3}
    assert all((served.output is None) == (rank != first) for rank, own in policy.served.items() for served in own[:4])


def test_a_plan_of_another_kind_is_refused(data: Path) -> None:
    with pytest.raises(ConfigError, match="does not say how"):
        experiment.run(job_for(data), four_devices(), "simulate", chosen_plan=staged_plan((2, {0: 1}), method="x"))
    plan = experiment.plan(job_for(data, system="galaxy"), four_devices())
    assert plan.inference is not None
    ones = (1,) * len(plan.inference.ranks)
    wrong_parts = {"columns": ones, "units": (99, *ones[1:]), "schemes": ()}
    for name, given in wrong_parts.items():
        wrong = replace(plan, inference=replace(plan.inference, **{name: given}))
        with pytest.raises((ConfigError, ScheduleError), match=name):
            experiment.run(job_for(data), four_devices(), "simulate", chosen_plan=wrong)


def test_a_sweep_lays_measured_beside_simulated(data: Path, engines: EngineCluster, tmp_path: Path) -> None:
    method, cluster = GalaxyPlus(), four_devices()
    plans = {name: experiment.plan(job_for(data, system=name), cluster) for name in ("galaxy", "edgeshard")}
    prepared = method.prepare(job_for(data), ignore)
    profile = method.profile(prepared, cluster, ignore)
    points = [
        method.sweep_point(Planned(prepared, profile, cluster, plan), name, engines, num_steps=2, folder=tmp_path)
        for name, plan in plans.items()
    ]
    assert [point.name for point in points] == ["galaxy", "edgeshard"]
    assert all(point.predicted_s > 0 and (point.measured_s or 0) > 0 for point in points)
