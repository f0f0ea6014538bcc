"""What a step's seconds go to, where it is known beforehand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.clusters import with_devices
from workbench import experiment
from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Cluster, Link
from workbench.core.job import Job
from workbench.core.step_parts import StepParts


def two(bytes_per_s: float, latency_s: float) -> Cluster:
    """Two equal devices whose costs come from their FLOP/s, so that nothing is measured."""
    link = Link(bytes_per_s=bytes_per_s, latency_s=latency_s)
    return with_devices(load_cluster("laptop-equal").part([0, 1]), link=link, model="computed")


def parts(cluster: Cluster, **settings: object) -> StepParts:
    job = Job(model="tiny-bert", train_samples=32, validation_samples=8, test_samples=8, epochs=1, **settings)  # type: ignore[arg-type]
    result = experiment.run(job, cluster, "simulate").step_parts
    assert result is not None and sum(result.shares.values()) == pytest.approx(1)
    assert all(share >= 0 for share in result.shares.values()) and result.sentence[:1].isupper()
    return result


PIPELINE = {"method": "pac_plus", "options": {"paradigm": "pipeline_parallel"}}


@pytest.mark.parametrize(
    ("bytes_per_s", "latency_s", "words"),
    [
        (1e12, 0.0, "Computing on"),
        (1e12, 10.0, "The links' latency takes 100% of a step"),
        (1e4, 0.0, "The bytes on the links take 100%"),
    ],
)
def test_the_links_decide_where_they_are_slow(bytes_per_s: float, latency_s: float, words: str) -> None:
    assert parts(two(bytes_per_s, latency_s), **PIPELINE).sentence.startswith(words)


def test_one_device_computes_all_the_time() -> None:
    result = parts(two(1e4, 10.0), method="pac_plus", options={"paradigm": "standalone"})
    assert result.shares["compute"] == pytest.approx(1, abs=1e-6)


def test_a_pipeline_of_few_micro_batches_waits() -> None:
    """Filling and draining: with one micro-batch two equal stages wait half of the time."""
    result = parts(two(1e12, 0.0), micro_batches=1, **PIPELINE)
    assert result.shares["bubble"] == pytest.approx(0.5, abs=0.2)


@pytest.mark.parametrize("method", ["fine_tuning", "ringada", "confidant"])
def test_every_method_that_trains_has_parts(method: str) -> None:
    assert parts(two(1e9, 1e-3), method=method).step_s > 0


def test_a_plan_says_what_decides() -> None:
    job = Job(model="tiny-bert", train_samples=32, validation_samples=8, test_samples=8)
    assert any("of a step" in note and "(simulated)" in note for note in experiment.plan(job, two(1e9, 1e-3)).notes)


def test_memory_decides_where_a_faster_plan_does_not_fit() -> None:
    """One fast device would do all, but has no room; where it has, nothing is said of memory."""
    both = two(1e12, 0.0)
    fast, slow = both.devices
    fast = replace(fast, flops_per_s=100 * slow.flops_per_s)

    def of(memory_bytes: int) -> StepParts:
        cluster = replace(both, devices=(replace(fast, memory_bytes=memory_bytes), slow))
        return parts(cluster, method="fine_tuning", options={"technique": "full"})

    tight, roomy = of(700_000), of(1 << 30)
    assert tight.sentence.startswith("Too little memory decides")
    assert tight.roomy_s is not None and tight.roomy_s < 0.95 * tight.step_s
    assert tight.roomy_s == pytest.approx(roomy.step_s, rel=0.05)
    assert roomy.roomy_s is None and roomy.sentence.startswith("Computing on") and "memory" not in roomy.sentence
