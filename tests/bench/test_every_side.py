"""Every side of every benchmark runs once, at its smallest setting: what it compares is there, and no side fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tiny_job import profile_briefly

from workbench.bench import confidant, executor, galaxy_plus, inference_parts, p_rge, pac_plus, recovery, ringada, runtime
from workbench.bench.frame import jobs_of
from workbench.bench.inference_parts import BertSize, save_model
from workbench.cli.app import BENCHES, CHOOSING
from workbench.core.job import Job
from workbench.runtime.engines import default_pool
from workbench.runtime.network import probe
from workbench.tasks import load_task

NAMES = set(BENCHES)
needs_kernel_links = pytest.mark.skipif(probe().fidelity != "kernel", reason="links are not shaped by the kernel here")
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module", autouse=True)
def _briefly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        profile_briefly(patch)
        yield
        default_pool().stop()


def tiny(jobs: dict[str, Job]) -> dict[str, Job]:
    """Return the jobs with a tiny model and few samples, for as many epochs as their options need."""
    small = {"train_samples": 32, "validation_samples": 8, "test_samples": 8, "max_length": 16}
    return {name: replace(job, model="tiny-bert", **small) for name, job in jobs.items()}


@pytest.mark.parametrize("name", CHOOSING)
def test_the_words_that_help_names_are_those_that_choose(name: str) -> None:
    assert set(CHOOSING) <= NAMES
    assert CHOOSING[name].split(", ") == list(import_module(BENCHES[name]).WORDS)


@needs_kernel_links
def test_executor() -> None:
    made = executor.bench(lambda line: None, sizes=(2,), rounds=1)
    assert {point["program"] for point in made["points"]} == set(executor.cases(2))
    assert all(point["ratio"] > 0 for point in made["points"]) and made["own_cost_us"] > 0


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
    made = pac_plus.bench(lambda line: None)
    sides = {"cached", "cached, by autograd", "LoRA, float32", "LoRA, bfloat16 autocast", "full, float32", "first epoch"}
    assert {point["side"] for point in made["points"]} == sides
    assert all(point["ratio_to_cached"] > 0 for point in made["points"])


def test_galaxy_plus(monkeypatch: Patch) -> None:
    for name in ("MiniLM", galaxy_plus.SCALED):
        monkeypatch.setitem(inference_parts.SIZES, name, BertSize(32, 4, 3))
    for name, value in {"PLANNED_MODELS": ("BERT-Large",), "PLANNED_LAYERS": 4, "PLANNER_ROUNDS": 1}.items():
        monkeypatch.setattr(inference_parts, name, value)
    monkeypatch.setattr(galaxy_plus, "ROUNDS", 1)
    made = galaxy_plus.bench(lambda line: None, ["minilm", "homogeneous", "1000"])
    [point] = made["points"]
    baselines = galaxy_plus.BASELINES if "kernel" in made["label"] else galaxy_plus.BASELINES[:-1]
    assert [name for name in baselines if not point[name] > 0] == []
    assert point["overlap"] > 0 and made["weak scaling"].keys() == {1, 2, 3, 4} and made["planner"].keys() == {"BERT-Large"}
    assert point["plan"]["gap"] < galaxy_plus.LARGEST_GAP


@pytest.mark.parametrize("section", ["full", "memory"])
def test_p_rge(section: str, monkeypatch: Patch) -> None:
    asked = []
    monkeypatch.setattr(p_rge, "child_peak_bytes", lambda module, side, *words: asked.append(side) or p_rge._child(side, *words))
    made = p_rge.bench(lambda line: None, only=(section,), model="tiny-llama-2", length=24, grid=((1, 1),), rounds=1)
    rows = made["points"] or made["memory"]
    assert rows and all(value >= 0 for row in rows for value in row.values() if isinstance(value, float))
    assert bool(asked) == (section == "memory")


def test_ringada(monkeypatch: Patch) -> None:
    monkeypatch.setattr(ringada, "SIDES", {name: replace(job, epochs=2) for name, job in tiny(ringada.SIDES).items()})
    made = ringada.bench(lambda line: None)
    assert [row["side"] for row in made["points"]] == list(ringada.SIDES) and all(row["s"] > 0 for row in made["points"])
    assert made["trained layers"]


@pytest.mark.parametrize("point", ["processors", "schedule", "partition", "phones"])
def test_confidant(point: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(confidant, "JOBS", tiny(confidant.JOBS))
    rows = confidant.bench(lambda line: None, only=[point], rounds=1)["points"]
    sides = [side.partition(": ")[2] for side in confidant.JOBS if side.startswith(f"{point}: ")]
    assert [row["side"] for row in rows] == sides * (2 if point == "processors" else 1)
    assert all(row["s"] > 0 for row in rows)


FAULTS = [(name, "kill") for name in jobs_of("recovery")] + [("fine_tuning, lora", kind) for kind in recovery.FAULTS if kind != "kill"]


@pytest.mark.parametrize(("method", "kind"), FAULTS, ids=lambda word: word.replace(", ", "-"))
def test_recovery(method: str, kind: str, monkeypatch: Patch) -> None:
    jobs = {name: replace(job, epochs=1 if name == "p_rge" else 4) for name, job in tiny(jobs_of("recovery")).items()}
    jobs["p_rge"] = replace(jobs["p_rge"], model="tiny-llama-2", options={"steps": 14})
    monkeypatch.setattr(recovery, "jobs_of", lambda name: {method: jobs[method]})
    [point] = recovery.bench(lambda line: None, only=[kind], rounds=1)["points"]
    assert point["recovered"] == "1 of 1" and point["whole_s"] > 0


def test_soak(monkeypatch: Patch) -> None:
    made = recovery.bench(lambda line: None, only=["ringada"], soak=1)
    assert (made["runs"], made["wrong"], made["left_behind"]) == (1, 0, 0)


def test_every_benchmark_is_here() -> None:
    """The engine's and the kit's stand beside the fixtures that they need."""
    elsewhere = {"p_rge_engine", "kit"}
    names: dict[str, Callable[..., Any]] = {
        name.removeprefix("test_"): value for name, value in globals().items() if name.startswith("test_")
    }
    assert NAMES - elsewhere <= names.keys()
