"""A ring gives what one process gives that does one mini-batch after the other; and what crosses its links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stopped_run import train_rank

from tests.methods.builders import losses_of
from tests.methods.conftest import four_devices
from tests.methods.ring_builders import (
    ring_job,
    ring_plan,
    train_federated,
    train_on_ring,
    train_plainly,
    unequal_links,
    whole_plan,
)
from tests.plans import stages
from tests.weights import same_weights
from workbench.core.names import TrainedKind
from workbench.core.plan import Activations
from workbench.core.schedule import SEND
from workbench.methods.ringada.options import Unfreezing
from workbench.methods.ringada.rank_job import RingRankJob
from workbench.models.side_layers import TOKEN_KINDS
from workbench.runtime.engines import EngineCluster
from workbench.runtime.messages import decode, encode

EVEN, BACK = ((0, 2), (1, 2), (2, 1), (3, 1)), ((1, 2), (0, 1), (3, 2), (2, 1))


def test_devices_do_the_rounds_of_a_sweep_that_the_driver_predicts(tmp_path: Path) -> None:
    """A calibration sends their numbers, and a device has no tokens of the others' samples."""
    job = replace(ring_job("tiny-bert", ring_plan(*EVEN), four_devices(), tmp_path), sweep=(0,))
    received = decode(encode(job.on_rank(2)), RingRankJob, "a job")
    predicted, done = (one.phases()[0].steps(0) for one in (job, received))
    for number in received.sweep:
        assert done[number] == predicted[number]
        assert received.program(done[number].shape).schedule == job.program(predicted[number].shape).schedule
    assert received.sweep == job.sweep


def check_equals_one_process(job: RingRankJob, plainly: Callable[..., Any] = train_plainly) -> None:
    """Compare every loss and every weight."""
    expected, weights = plainly(job)
    losses, trained, _ = train_on_ring(job)
    assert losses == pytest.approx(expected, rel=1e-5)
    same_weights(trained, weights, noise="key_value.bias")


@pytest.mark.parametrize(
    ("technique", "model", "blocks", "unfreezing", "every", "micro_batches", "local_iterations", "unequal", "cache"),
    [
        ("serial", "tiny-bert", EVEN, "steps", 3, 2, 2, False, False),
        ("serial", "tiny-gpt2", ((3, 1), (1, 1), (0, 3), (2, 1)), "steps", 2, 4, 1, True, False),
        ("serial", "tiny-t5", BACK, "rounds", 2, 1, 2, True, False),
        ("serial", "tiny-llama", ((2, 1), (0, 1), (1, 3), (3, 1)), "all", 1, 2, 1, False, False),
        ("serial", "tiny-bart", ((0, 1), (1, 1), (2, 2), (3, 2)), "steps", 5, 2, 3, False, False),
        ("serial", "tiny-bert", ((1, 1), (0, 2), (2, 1), (3, 2)), "plateau", 40, 2, 1, True, False),
        ("serial", "tiny-distilbert", ((0, 3), (2, 1), (1, 1), (3, 1)), "rounds", 1, 2, 1, True, False),
        ("serial", "tiny-vit", BACK, "steps", 5, 2, 1, True, False),
        ("serial", "tiny-opt", ((2, 2), (1, 2), (0, 1), (3, 1)), "steps", 6, 1, 1, False, False),
        ("serial", "tiny-gpt2", EVEN, "gradient_norm", 40, 1, 1, False, False),
        ("serial", "tiny-bert", EVEN, "steps", 9, 2, 2, False, True),
        ("serial", "tiny-gpt2", ((1, 1), (0, 2), (2, 1), (3, 2)), "rounds", 2, 2, 1, True, True),
        ("serial", "tiny-gpt2", ((0, 3), (1, 1), (2, 1), (3, 1)), "plateau", 40, 1, 2, False, True),
        ("serial", "tiny-t5", BACK, "steps", 11, 1, 2, False, True),
        ("serial", "tiny-bart", ((0, 1), (1, 1), (2, 2), (3, 2)), "gradient_norm", 40, 2, 1, False, True),
        ("serial", "tiny-llama", ((2, 1), (0, 1), (1, 3), (3, 1)), "all", 1, 2, 1, False, True),
        ("parallel", "tiny-bert", EVEN, "steps", 3, 2, 2, False, False),
        ("parallel", "tiny-t5", BACK, "rounds", 1, 2, 1, False, False),
        ("parallel", "tiny-llama", ((1, 1), (0, 2), (2, 1), (3, 2)), "gradient_norm", 40, 1, 1, False, False),
        ("parallel", "tiny-bert", EVEN, "steps", 9, 2, 2, False, True),
        ("parallel", "tiny-gpt2", ((3, 1), (1, 1), (0, 3), (2, 1)), "all", 1, 4, 1, False, True),
        ("parallel", "tiny-llama", ((1, 1), (0, 2), (2, 1), (3, 2)), "plateau", 40, 1, 2, False, True),
    ],
)
def test_a_ring_trains_as_one_process(
    technique: str,
    model: str,
    blocks: tuple[tuple[int, int], ...],
    unfreezing: Unfreezing,
    every: int,
    micro_batches: int,
    local_iterations: int,
    unequal: bool,
    cache: bool,
    tmp_path: Path,
) -> None:
    """Each model, technique and policy, with and without a cache: in pairs, not in every combination."""
    job = ring_job(
        model,
        ring_plan(*blocks, micro_batches=micro_batches),
        unequal_links(four_devices()) if unequal else four_devices(),
        tmp_path,
        every=every,
        unfreezing=unfreezing,
        local_iterations=local_iterations,
        epochs=4,
        cache=cache,
        parallel=technique == "parallel",
    )
    assert any(planned.shape.cached for epoch in range(4) for planned in job.planned_epoch(epoch)) == cache  # type: ignore[attr-defined]
    check_equals_one_process(job)


@pytest.mark.parametrize(
    ("model", "cache", "unfreezing", "parallel"),
    [
        ("tiny-bert", True, "steps", False),
        ("tiny-t5", False, "rounds", False),
        ("tiny-gpt2", False, "plateau", False),
        ("tiny-bert", True, "steps", True),
    ],
)
def test_a_ring_whose_layers_are_moved_between_rounds_trains_as_one_process(
    model: str, cache: bool, unfreezing: Unfreezing, parallel: bool, tmp_path: Path
) -> None:
    """Twice, to other devices too: in the middle of an epoch, and at its end."""
    plans = [
        ring_plan(*blocks)
        for blocks in (
            ((0, 1), (1, 1), (2, 2), (3, 2)),
            ((3, 2), (1, 1), (0, 2), (2, 1)),
            ((1, 3), (0, 1), (3, 1), (2, 1)),
        )
    ]
    job = ring_job(
        model,
        plans[0],
        four_devices(),
        tmp_path,
        every=5,
        unfreezing=unfreezing,
        epochs=4,
        samples=90,
        cache=cache,
        local_iterations=1,
        parallel=parallel,
    )
    assert (job.rounds_per_epoch, job.num_rounds) == (3, 12)
    job = replace(job, plan=replace(plans[0], later=((4, plans[1].stages), (9, plans[2].stages))))
    check_equals_one_process(job)


@pytest.mark.parametrize(
    ("model", "unfreezing", "cache", "federated", "activations"),
    [
        ("tiny-bert", "steps", False, False, ("recompute",)),
        ("tiny-t5", "rounds", False, False, ("memory", "disk")),
        ("tiny-gpt2", "plateau", True, False, ("disk", "recompute")),
        ("tiny-llama", "all", False, True, ("recompute",)),
    ],
)
def test_a_ring_trains_the_same_whatever_happens_to_activations(
    model: str,
    unfreezing: Unfreezing,
    cache: bool,
    federated: bool,
    activations: tuple[Activations, ...],
    tmp_path: Path,
) -> None:
    """Every loss and weight to 1e-6, whichever stages recompute or read.  Only unfrozen layers do."""
    plan = ring_plan(*EVEN)
    if federated:
        plan = replace(plan, stages=stages((plan.num_layers, dict.fromkeys(range(4), 4))))
    changed = tuple(
        replace(stage, activations=activations[number % len(activations)]) for number, stage in enumerate(plan.stages)
    )
    results = []
    for name, chosen in (("kept", plan), ("again", replace(plan, stages=changed))):
        job = ring_job(
            model,
            chosen,
            four_devices(),
            tmp_path / name,
            epochs=1,
            unfreezing=unfreezing,
            cache=cache,
            federated=federated,
        )
        results.append(train_on_ring(job)[:2])
        planned = job.round(0)
        ops = [op for ops in job.program(planned.shape).schedule.ops for op in ops]
        again = [op for op in ops if op.kind in ("R", "READ")]
        assert bool(again) == (name == "again")
        assert all(op.part >= planned.shape.iterations[-1].first_unfrozen for op in again)
    (losses, weights), (losses_again, weights_again) = results
    assert losses_again == pytest.approx(losses, rel=1e-6)
    same_weights(weights_again, weights, 1e-6, 1e-6)


@pytest.mark.parametrize(("model", "micro_batches", "local_iterations"), [("tiny-bert", 2, 2), ("tiny-t5", 1, 3)])
def test_federated_averaging_is_that_of_one_process(
    model: str, micro_batches: int, local_iterations: int, tmp_path: Path
) -> None:
    size = 8 // micro_batches
    job = ring_job(
        model,
        whole_plan(model, size, micro_batches),
        four_devices(),
        tmp_path,
        unfreezing="all",
        local_iterations=local_iterations,
        epochs=4,
        samples=90,
        federated=True,
    )
    assert job.num_rounds > 2
    check_equals_one_process(job, train_federated)


@pytest.mark.parametrize("kind", TOKEN_KINDS)
def test_a_ring_learns_answers_and_tags_as_one_process_and_shows_no_device_those_of_others(
    kind: TrainedKind, tmp_path: Path
) -> None:
    job = ring_job("tiny-bert", ring_plan(*EVEN), four_devices(), tmp_path, kind=kind)
    expected, _ = train_plainly(job)
    assert train_on_ring(job)[0] == pytest.approx(expected, rel=1e-5)
    for rank, device in enumerate(job.cluster.devices):
        own, seen = set(job.owned[device.name]), job.on_rank(rank).split
        assert all(seen.windows[row] == job.split.windows[row] for row in own)
        assert all(
            set(window.targets) == {0} and not window.offsets
            for row, window in enumerate(seen.windows)
            if row not in own
        )


def test_devices_train_as_one_process_and_only_the_ring_s_values_cross_their_links(
    engines: EngineCluster, tmp_path: Path
) -> None:
    """Executed on four devices: losses, weights, and every message."""
    plan = ring_plan((0, 2), (2, 1), (1, 2), (3, 1))
    job = replace(ring_job("tiny-bert", plan, unequal_links(four_devices()), tmp_path), trace_steps=100)
    expected, weights = train_plainly(job)
    results = engines.run(train_rank, [job.on_rank(rank) for rank in range(job.cluster.world_size)])
    losses, size = losses_of(results), job.steps_per_round
    assert [loss for _, loss in sorted(losses.items())] == pytest.approx(
        [sum(expected[first : first + size]) / size for first in range(0, len(expected), size)], rel=1e-5
    )
    same_weights(job.trained(1), weights)
    sent = [
        (trace, span) for result in results for trace in result.steps for span in trace.spans if span.op.kind == SEND
    ]
    assert {span.op.reads[0].name for _, span in sent} == {"emb", "act", "grad", "head", "free"}
    for trace, span in sent:
        planned = job.planned_epoch(trace.epoch)[trace.step]
        value = span.op.reads[0]
        if value.name in ("head", "free"):
            assert span.nbytes == {"head": 4 * 3 * (32 + 1) * 2, "free": 1}[value.name]
        else:
            shape = planned.shape
            assert span.nbytes == 4 * 32 * shape.sizes[value.microbatch] * shape.lengths[value.microbatch], value


def test_a_device_is_sent_its_own_tokens_and_labels_alone(tmp_path: Path) -> None:
    job = ring_job("tiny-bert", ring_plan(*EVEN), four_devices(), tmp_path)
    assert sorted(sample for own in job.owned.values() for sample in own) == list(range(45))
    for rank, device in enumerate(job.cluster.devices):
        own, seen = set(job.owned[device.name]), job.on_rank(rank).split
        assert seen.lengths == job.split.lengths
        for sample in range(45):
            if sample in own:
                assert (seen.ids[sample], seen.labels[sample]) == (job.split.ids[sample], job.split.labels[sample])
            else:
                assert set(seen.ids[sample]) == {0} and seen.labels[sample] == 0
