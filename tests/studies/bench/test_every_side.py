"""Benchmarks run once at their smallest setting: every side that they compare is there, and none fails.

The kit's needs real devices: see test_kit_bench.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import AutoModelForCausalLM

from workbench.assets.fetch import ASSETS, cache_folder
from workbench.core.errors import RuntimeSetupError
from workbench.core.job import Job
from workbench.methods.galaxy_plus.serving.records import ServedRequest, ServingReport, StreamSettings
from workbench.models.configuration import model_config
from workbench.models.saving import save_tokenizer
from workbench.runtime.engines import default_pool
from workbench.runtime.network import probe
from workbench.tasks import load_task
from workbench_studies.bench import (
    classroom,
    confidant,
    executor,
    galaxy_plus,
    heat,
    inference_parts,
    live,
    memory,
    p_rge,
    pac_plus,
    planning,
    recovery,
    ringada,
    runtime,
    serve,
    serving,
    text,
)
from workbench_studies.bench.command import BENCHES, CHOOSING
from workbench_studies.bench.inference_parts import BertSize, save_model

NAMES = set(BENCHES)
needs_kernel_links = pytest.mark.skipif(probe().fidelity != "kernel", reason="links are not shaped by the kernel here")
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what is measured apart; models and data are those that were fetched."""
    cache = tmp_path_factory.mktemp("cache")
    for name in ASSETS:
        for fetched in cache_folder().glob(f"{name}-*"):
            (cache / fetched.name).symlink_to(fetched)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_CACHE", str(cache))
        yield
        default_pool().stop()


@pytest.mark.parametrize("name", CHOOSING)
def test_the_words_that_help_names_are_those_that_choose(name: str) -> None:
    assert set(CHOOSING) <= NAMES
    assert CHOOSING[name].split(", ") == list(import_module(BENCHES[name]).WORDS)


@needs_kernel_links
def test_executor() -> None:
    report = executor.bench(lambda line: None, sizes=(2,), rounds=1)
    for network in executor.WORDS:
        programs = {point["program"] for point in report["points"] if point["network"] == network}
        assert programs == set(executor.cases(2, network)) and report["median_ratio"][network] > 0
    assert all(point["ratio"] > 0 for point in report["points"]) and report["own_cost_us"] > 0


@needs_kernel_links
def test_runtime(monkeypatch: Patch) -> None:
    for name, value in {"MODEL": "tiny-bert", "MBIT_PER_S": (1000,), "WORD_IDS": (5, 20)}.items():
        monkeypatch.setattr(runtime, name, value)
    [point] = runtime.bench(lambda line: None)["points"]
    assert point["ours_s"] > 0 and point["torch_s"] > 0 and point["loss_gap"] < 1e-4


def test_pac_plus(monkeypatch: Patch, tmp_path: Path) -> None:
    save_model(BertSize(32, 2, 2), tmp_path)
    task = load_task("sentiment").limited(320, 8, 8)
    given = {"MODEL": str(tmp_path), "asset_path": Path, "load_task": lambda name: task, "ROUNDS": 1, "STEPS": 1}
    for name, value in given.items():
        monkeypatch.setattr(pac_plus, name, value)
    report = pac_plus.bench(lambda line: None)
    sides = {
        "cached",
        "cached, by autograd",
        "LoRA, float32",
        "LoRA, bfloat16 autocast",
        "full, float32",
        "first epoch",
    }
    assert {point["side"] for point in report["points"]} == sides
    assert all(point["ratio_to_cached"] > 0 for point in report["points"])


def test_galaxy_plus(monkeypatch: Patch) -> None:
    for name in ("MiniLM", galaxy_plus.SCALED):
        monkeypatch.setitem(inference_parts.SIZES, name, BertSize(32, 4, 3))
    for name, value in {"PLANNED_MODELS": ("BERT-Large",), "PLANNED_LAYERS": 4, "PLANNER_ROUNDS": 1}.items():
        monkeypatch.setattr(inference_parts, name, value)
    monkeypatch.setattr(galaxy_plus, "ROUNDS", 1)
    report = galaxy_plus.bench(lambda line: None, ["minilm", "homogeneous", "1000"])
    [point] = report["points"]
    baselines = galaxy_plus.BASELINES if "kernel" in report["label"] else galaxy_plus.BASELINES[:-1]
    assert [name for name in baselines if not point[name] > 0] == []
    assert (
        point["overlap"] > 0
        and report["weak scaling"].keys() == {1, 2, 3, 4}
        and report["planner"].keys() == {"BERT-Large"}
    )
    assert point["plan"]["gap"] < galaxy_plus.LARGEST_GAP


def test_p_rge_over_all_parameters() -> None:
    """The other sections stand in test_p_rge_bench.py."""
    report = p_rge.bench(lambda line: None, only=("full",), model="tiny-llama-2", length=24, grid=((1, 1),), rounds=1)
    assert [(point["q"], point["E"]) for point in report["points"]] == [(1, 1), (1, 4), (4, 1), (4, 4)]
    assert all(point["ratio"] > 0 and point["first_order_ms"] > 0 for point in report["points"])


def briefly(jobs: Mapping[str, Job], *, epochs: int, train_samples: int) -> dict[str, Job]:
    """Return the same jobs of a tiny model and a few samples."""
    few = {"model": "tiny-bert", "validation_samples": 8, "test_samples": 8}
    return {name: replace(job, epochs=epochs, train_samples=train_samples, **few) for name, job in jobs.items()}


@needs_kernel_links
def test_memory(monkeypatch: Patch) -> None:
    """A step that recomputes, one with its activations on the disk, and torch.utils.checkpoint give the loss of a plain
    one."""
    monkeypatch.setattr(memory, "measured_in_child", lambda measure, *words: 1 + measure(*words))
    report = memory.bench(lambda line: None, model="tiny-llama-2", length=16, samples=4, rounds=1)
    assert [point["side"] for point in report["points"]] == list(get_args(memory.Side))
    assert all(point["step_ms"] > 0 and point["time_over_torch"] > 0 for point in report["points"])
    losses = [memory.step_of(side, "tiny-llama-2", 16, 4)(0) for side in get_args(memory.Side)[:4]]
    torch.testing.assert_close(losses[1:], [losses[0]] * 3, rtol=1e-6, atol=0.0)


def test_ringada(monkeypatch: Patch) -> None:
    """Of six mini-batches, so that two more layers are trained after each two."""
    jobs = briefly(ringada.SIDES, epochs=3, train_samples=64)
    jobs = {
        name: replace(
            job,
            micro_batches=min(2, job.micro_batches),
            options=job.options | ({"unfreeze_every": 2} if "unfreeze_every" in job.options else {}),
        )
        for name, job in jobs.items()
    }
    monkeypatch.setattr(ringada, "SIDES", jobs)
    report = ringada.bench(lambda line: None)
    assert {row["side"] for row in report["points"]} == set(jobs)
    assert all(row["s"] > 0 and row["over_bound"] > 0 for row in report["points"])
    # A tiny job may find room in what an earlier one has left to the process, but not every one.
    assert any(row["MB_measured"] > 0 for row in report["points"])
    assert [row["trained"] for row in report["trained layers"]] == [2, 4, 6]


@needs_kernel_links
@pytest.mark.parametrize("name", ["processors", "schedule", "partition", "phones"])
def test_confidant(name: str, monkeypatch: Patch) -> None:
    jobs = {
        side: job for side, job in briefly(confidant.JOBS, epochs=1, train_samples=16).items() if side.startswith(name)
    }
    monkeypatch.setattr(confidant, "JOBS", jobs)
    report = confidant.bench(lambda line: None, only=[name], rounds=1)
    assert {f"{row['point'].split()[0]}: {row['side']}" for row in report["points"]} == set(jobs)
    assert all(row["s"] > 0 and row["speedup"] > 0 and row["bound"] > 0 for row in report["points"])


@needs_kernel_links
@pytest.mark.parametrize("left", [(), ("process 7",)])
def test_serving(left: tuple[str, ...], monkeypatch: Patch) -> None:
    """Its figures are of the stream; what is left behind fails."""
    shown = ServingReport(
        source="emulated",
        fidelity="paced",
        model="tiny",
        cluster=serving.soak_cluster(),
        stream=StreamSettings(num_requests=2),
        rescheduling=serving.SETTINGS,
        plans=(),
        requests=tuple(
            ServedRequest(number=i, arrival_s=i, start_s=i, end_s=i + 0.5, tokens=1, plan=0, attempts=1 + i)
            for i in range(2)
        ),
    )
    monkeypatch.setattr(
        serving, "serve_randomly", lambda count, on_request: serving.SoakResult(report=shown, left_behind=left)
    )
    if left:
        with pytest.raises(AssertionError, match="process 7"):
            serving.bench(lambda line: None, soak=2)
    else:
        report = serving.bench(lambda line: None, soak=2)
        assert (report["requests"], report["repeated"], report["latency_p95_s"]) == (2, 1, 0.5)


def test_live(monkeypatch: Patch) -> None:
    [job] = live.jobs_of("live").values()
    short = replace(job, batch_size=4, train_samples=60)
    monkeypatch.setattr(live, "jobs_of", lambda name: {"pac_plus": short})
    monkeypatch.setattr(live, "BLOCK", 5)
    report = live.bench(lambda line: None)
    assert report["ratio_min"] <= report["with_view_over_without"] <= report["ratio_max"] and report["drawing_ms"] > 0


def test_planning() -> None:
    jobs = {name: replace(job, model="tiny-bert", train_samples=64) for name, job in planning.JOBS.items()}
    report = planning.bench(lambda line: None, jobs=jobs, num_devices=5, rounds=1)
    assert [point["job"] for point in report["points"]] == list(planning.JOBS)
    for point in report["points"]:
        assert point["profile_s"] > 0 and 0 < point["plan_bound_s"] < point["plan_s"]


def test_classroom(monkeypatch: Patch) -> None:
    small = Job(model="tiny-bert-2", epochs=1, train_samples=32, validation_samples=8, test_samples=8)
    monkeypatch.setattr(classroom, "jobs_of", lambda name: {"pac_plus": small})
    [point] = classroom.bench(lambda line: None, only=["1"])["points"]
    assert point["students"] == 1 and 0 <= point["valid"] <= 1 and point["dilation"] == 1
    with pytest.raises(RuntimeSetupError, match=r"2 at the same time.*No such option"):
        monkeypatch.setattr(classroom, "as_command", lambda job, cluster: "workbench run --never")  # ends at once
        classroom.bench(lambda line: None, only=["2"])


@pytest.mark.parametrize("method", ["pac_plus, cached", "confidant, idle", "p_rge"])
def test_recovery(method: str, monkeypatch: Patch) -> None:
    """A device is killed; what follows from other faults, and in other methods, is the same code."""
    [job] = briefly({method: recovery.jobs_of("recovery")[method]}, epochs=1, train_samples=256).values()
    job = replace(job, batch_size=8)
    if method == "pac_plus, cached":
        job = replace(job, epochs=6, train_samples=64)  # cached steps are short: many are left when one is killed
    elif job.method == "p_rge":
        # A step takes milliseconds, and what the killed device had to send arrives steps later.
        job = replace(job, model="tiny-llama-2", max_length=64, options=job.options | {"steps": 240})
    monkeypatch.setattr(recovery, "jobs_of", lambda name: {method: job})
    [point] = recovery.bench(lambda line: None, only=["kill"], rounds=1)["points"]
    assert (point["method"], point["fault"], point["recovered"]) == (method, "kill", "1 of 1")
    assert point["whole_s"] > 0


def test_text(monkeypatch: Patch, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(model_config("tiny-llama-2")).save_pretrained(tmp_path)
    save_tokenizer("tiny-llama-2", tmp_path)
    for name, value in {"MODEL": str(tmp_path), "SYSTEMS": ("galaxy_plus", "galaxy"), "NEW_TOKENS": 4}.items():
        monkeypatch.setattr(text, name, value)
    report = text.bench(lambda line: None, rounds=1)
    assert report["generate_over_ours"] > 0 and report["tokens per s"] > 0
    assert [point["devices"] > 0 and point["first token s"] > 0 for point in report["on devices"]] == [True, True]
    assert report["on devices"][0]["Galaxy+ over it"] == 1 and report["on devices"][1]["devices"] == 4


def test_serve(monkeypatch: Patch) -> None:
    """Of forty texts; a device is killed within every tenth, unless another is away."""
    monkeypatch.setattr(serve, "RATES", (10,))
    [point] = serve.bench(lambda line: None, soak=40)["rates of faults"]
    assert point["texts"] == 40 and 1 <= point["killed"] <= 4 and point["continued"]
    assert point["right texts per s"] > 0 and point["p95 s"] >= point["p50 s"] > 0


def test_heat(monkeypatch: Patch) -> None:
    """A device falls to half of its speed in two epochs; it stays, and it leaves."""
    jobs = briefly(heat.jobs_of("heat"), epochs=2, train_samples=64)
    monkeypatch.setattr(heat, "jobs_of", lambda name: {side: replace(job, batch_size=16) for side, job in jobs.items()})
    monkeypatch.setattr(heat, "SHARE", 0.2)
    [point] = heat.bench(lambda line: None, only=["2", "0.5"])["points"]
    # Of the emulated seconds a busy host adds some to either run.
    assert all(
        0.9 < point[f"{side}, simulated"] < 10 and point[f"{side}, emulated"] > 0 for side in ("stays", "leaves")
    ), point
