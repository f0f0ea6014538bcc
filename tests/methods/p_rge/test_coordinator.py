"""What becomes of a run when devices die, fall silent or slow down: P-RGE's policy on devices in virtual time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from methods.conftest import four_devices
from methods.p_rge.worlds import Q, chain, prepared_job, profile_for, shared, theta, with_options
from workbench.core.errors import ConfigError, DeviceLostError
from workbench.core.report import Recovery
from workbench.core.schedule import STEP
from workbench.methods.base import Planned, ignore
from workbench.methods.p_rge import method, policy
from workbench.methods.p_rge.method import PRGE, TrainedByLog
from workbench.methods.p_rge.policy import History, QueryPolicy, notes_of
from workbench.methods.p_rge.rank_job import PRGERankJob, QueryResult, change_at
from workbench.methods.p_rge.seeds import query_seed
from workbench.methods.p_rge.worker import load_model, record_of
from workbench.methods.p_rge.zeroth_order import StepLog
from workbench.methods.p_rge.zeroth_order.loading import load_trained
from workbench.runtime.commands import Probe, StepDone, Train
from workbench.runtime.virtual_devices import VirtualDevices
from workbench.runtime.virtual_work import VirtualWork

ROW_S = 1e-3


def loss_of(seed: int, step: int, part: int) -> float:
    """Return what any device finds for a part of a step."""
    return (query_seed(seed, step, part // 2) % 1000) / 500 * (1 if part % 2 else -1)


class Work(VirtualWork):
    """A runtime.virtual_devices.VirtualWork: every member finds the same losses, in the seconds of the made-up
    layers."""

    def busy_s(self, job: PRGERankJob, place: int) -> float:
        step = job.query_step()
        total = job.profile.seconds(place, STEP, job.estimator.num_queries, 1)
        for op in step.schedule.ops[place]:
            if op.kind == "F":
                queries = len(step.queries(op.part))
                count, parts = job.passings[place].passes(queries)
                total += count * job.profile.seconds(place, "F", parts * job.change.setting.batch_size, 1)
                total += job.profile.seconds(place, STEP, queries, 1)
        return total

    def seconds(self, job: PRGERankJob, step: int, factors: Mapping[int, float]) -> float:
        return max(factor * self.busy_s(job, place) for place, factor in factors.items())

    def done(self, job: PRGERankJob, place: int, step: int, factor: float) -> StepDone:
        return StepDone(step, factor * self.busy_s(job, place), self._record(job, step))

    def part(self, job: PRGERankJob, place: int, end: Any, stop: int) -> QueryResult:
        part = QueryResult(rank=place, records=[self._record(job, step) for step in range(job.first_step, stop)])
        if end == "lost":
            part.losses = self._own_losses(job, place, stop)
        return part

    def _record(self, job: PRGERankJob, step: int) -> StepLog:
        parts = range(job.estimator.rule.query_parts * job.estimator.num_queries)
        return record_of(job, step, {part: loss_of(job.job.seed, step, part) for part in parts})

    def _own_losses(self, job: PRGERankJob, place: int, step: int) -> dict[int, float]:
        first, each = 0, job.estimator.rule.query_parts
        for share in job.plan.stages[-1].shares:
            if share.rank == place:
                parts = range(each * first, each * (first + share.queries))
                return {part: loss_of(job.job.seed, step, part) for part in parts}
            first += share.queries
        return {}


class Story(NamedTuple):
    """What came of a run on virtual devices."""

    policy: QueryPolicy
    recoveries: tuple[Recovery, ...]
    devices: VirtualDevices

    @property
    def history(self) -> History:
        """Of the run."""
        return self.policy.history

    @property
    def jobs(self) -> list[Train]:
        """Each generation's command."""
        results = {message.generation: message for _, _, message in self.devices.commands if isinstance(message, Train)}
        return [results[number] for number in sorted(results)]

    @property
    def steps_per_epoch(self) -> int:
        """Of the job."""
        steps: int = self.jobs[0].job.prepared.steps_per_epoch
        return steps

    @property
    def queries(self) -> list[int]:
        """Of each step."""
        return [len(record.seeds) for record in self.history.records]


Coordinate = Callable[..., Story]


@pytest.fixture
def coordinate(tmp_path: Path) -> Iterator[Coordinate]:
    """Yield what runs a job on virtual devices.  memory_bytes: of each."""

    def run(plan: Any, faults: str, *, memory_bytes: int = 100_000_000, resume: bool = False, **options: Any) -> Story:
        prepared = with_options(prepared_job(), **{"steps": 16, "faults": faults} | options)
        cluster = four_devices(memory_bytes)
        profile = profile_for(prepared, cluster, ROW_S)
        devices = VirtualDevices(cluster.world_size, Work())
        history = History(tmp_path, prepared, "", resume=resume)
        policy = QueryPolicy(PRGE(), Planned(prepared, profile, cluster, plan), history, ignore)
        return Story(policy, policy.run(devices, cluster, prepared.job), devices)

    yield run


def reported(story: Story) -> list[tuple[int, int, float | None]]:
    """Each step of a story's report, with its loss."""
    prepared, cluster = with_options(prepared_job(), steps=16), four_devices()
    planned = Planned(prepared, profile_for(prepared, cluster, ROW_S), cluster, shared(2, 2))
    steps = story.policy.measured_steps(PRGE().predict(planned))
    return [(step.epoch, step.step, step.loss) for step in steps]


def _edited(line: bytes) -> bytes:
    """Return a log's line with another learning rate."""
    changed = re.sub(rb",0\.0", b",9.0", line, count=1)
    assert changed != line
    return changed


@pytest.mark.parametrize(
    ("damage", "kept", "said"),
    [
        (lambda lines: lines[:8], 7, ""),  # interrupted
        (lambda lines: [*lines[:7], lines[7][:20]], 6, ""),  # by a crash
        (lambda lines: lines, 16, ""),
        (lambda lines: [*lines[:3], _edited(lines[3]), *lines[4:]], 2, "line 4 was changed after it was written"),
        (lambda lines: [*lines[:2], *lines[3:]], 1, "line 3 was changed after it was written, or lines before it were"),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], 0, "line 2 was changed"),
        (lambda lines: [b"{}\n", *lines[1:]], 0, "line 1 was changed"),
        (lambda lines: lines[1:], 0, "line 1 was changed"),
    ],
    ids=[
        "interrupted",
        "cut off",
        "finished",
        "edited",
        "a line left out",
        "exchanged",
        "another first line",
        "no first line",
    ],
)
def test_a_resumed_run_has_all_steps_and_a_damaged_log_is_told(
    damage: Callable[[list[bytes]], list[bytes]], kept: int, said: str, coordinate: Coordinate
) -> None:
    """What is behind the damage is done again: the log and the report's losses are those of the unbroken run."""
    reference = coordinate(shared(2, 2), "")
    log = reference.history.path
    expected = log.read_bytes()
    assert [at[:2] for at in reported(reference)] == [divmod(step, reference.steps_per_epoch) for step in range(16)]
    log.write_bytes(b"".join(damage(expected.splitlines(keepends=True))))
    again = coordinate(shared(2, 2), "", resume=True)
    assert again.history.continues and again.history.resumed == kept
    notes = notes_of(again.history, prepared_job(), resume=True)
    assert (said in notes[1] and "are done again" in notes[1]) if said else len(notes) == 1
    assert log.read_bytes() == expected
    assert again.history.records == reference.history.records
    assert reported(again) == reported(reference)


def test_another_runs_log_is_refused(coordinate: Coordinate) -> None:
    log = coordinate(shared(2, 2), "").history.path
    content = log.read_bytes()
    coordinate(shared(2, 2), "", epsilon=2e-2)
    log.write_bytes(content)
    with pytest.raises(ConfigError, match=r"That is another run's: it differs in "):
        coordinate(shared(2, 2), "", epsilon=2e-2, resume=True)
    assert log.read_bytes() == content


@pytest.mark.parametrize("after_loss", ["drop", "repeat"])
def test_the_step_of_a_death(coordinate: Coordinate, after_loss: str) -> None:
    """It is made from the survivors' queries, or repeated by them; all other steps have all queries."""
    story = coordinate(shared(1, 2, 1), "kill:device-1@step3", after_loss=after_loss)
    seeds = [query_seed(0, 3, query) for query in ((0, 3) if after_loss == "drop" else range(Q))]
    assert story.queries == [Q] * 3 + [len(seeds)] + [Q] * 12
    assert list(story.history.records[3].seeds) == seeds
    # The losses of a part are the same whoever computes it.
    assert story.history.records[3].gradients[0] == pytest.approx(
        (loss_of(0, 3, 0) - loss_of(0, 3, 1)) / 0.02, rel=1e-5
    )
    first, second = story.jobs
    assert second.job.first_step == (4 if after_loss == "drop" else 3)
    assert second.job.records == tuple(story.history.records[: second.job.first_step])
    assert first.members == (0, 1, 2, 3)
    assert 1 not in second.members and sum(share.queries for share in second.job.plan.stages[0].shares) == Q
    assert "device-1 is lost, in step 4." in story.policy.notes
    outcome = reported(story)
    losses = [
        loss_of(0, 3, 2 * query + sign) for query in ((0, 3) if after_loss == "drop" else range(Q)) for sign in (0, 1)
    ]
    assert len(outcome) == 16 and outcome[3][2] == pytest.approx(fmean(losses))


def test_a_second_loss_costs_its_own_queries_alone(coordinate: Coordinate) -> None:
    """Each step of a death is made from the queries of those that live; the steps between have all queries again."""
    story = coordinate(shared(1, 1, 1, 1), "kill:device-1@step3; kill:device-2@step9")
    first, second, third = story.jobs
    assert first.members == (0, 1, 2, 3) and 2 in second.members and not {1, 2} & {*third.members}
    share = next(share for share in second.job.plan.stages[0].shares if second.members[share.rank] == 2)
    assert [number for number, queries in enumerate(story.queries) if queries < Q] == [3, 9]
    assert (story.queries[3], story.queries[9]) == (Q - 1, Q - share.queries)
    assert third.job.first_step == 10 and third.job.records == tuple(story.history.records[:10])
    losses = [f"device-{rank} is lost, in step {step}." for rank, step in ((1, 4), (2, 10))]
    assert [note for note in story.policy.notes if " is lost, " in note] == losses
    assert len(reported(story)) == 16


def test_a_step_without_the_loss_in_the_middle_is_repeated(coordinate: Coordinate) -> None:
    """One-sided losses are compared with the one of theta; the device that has it may be lost."""
    settings = {"estimator": "one_sided", "after_loss": "drop"}
    lost = coordinate(shared(2, 2, 1), "kill:device-0@step3", **settings)
    assert lost.queries == [Q] * 16 and lost.jobs[1].job.first_step == 3
    kept = coordinate(shared(2, 2, 1), "kill:device-2@step3", **settings)
    assert kept.queries == [Q] * 3 + [Q - 1] + [Q] * 12 and kept.jobs[1].job.first_step == 4
    record = kept.history.records[3]
    losses = [loss_of(0, 3, query) for query in range(Q)]
    slopes = [(loss - losses[0]) / pstdev(losses[1:]) for loss in losses[1:]]
    assert record.seeds == tuple(query_seed(0, 3, query) for query in range(1, Q))
    assert record.gradients == pytest.approx(slopes, rel=1e-5) and record.loss == pytest.approx(fmean(losses))


def test_one_that_comes_back_has_made_the_log_when_the_others_pause(coordinate: Coordinate) -> None:
    """They do not wait for its process to start."""
    story = coordinate(shared(2, 2), "kill:device-0@step5; return:device-0@step8", after_loss="repeat", steps=80)
    assert story.queries == [Q] * 80
    assert [0 in job.members for job in story.jobs] == [True, False, True]
    assert any("device-0 has come back" in note for note in story.policy.notes)
    back = story.recoveries[-1]
    assert back.what == "return device-0" and back.stood_still_s < 0.2


def test_one_that_leaves_costs_no_query(coordinate: Coordinate) -> None:
    story = coordinate(shared(2, 2), "leave:device-0@step5")
    assert story.queries == [Q] * 16
    assert [0 in job.members for job in story.jobs] == [True, False]
    assert "device-0 leaves, in step 6." in story.policy.notes
    state = story.policy.state
    assert (state.step, state.num_steps, state.generations, state.after_loss) == (16, 16, 2, False)
    assert state.devices == ("device-1", "device-2") and repr(story.policy) == f"QueryPolicy({state})"


def test_survivors_that_cannot_go_on(coordinate: Coordinate) -> None:
    """The log stays to be gone on with, and the error says what is missing."""
    # A device holds a half of the layers; three of four die, one after the other.
    kills = "kill:0@step3; kill:1@step5; kill:2@step7; kill:3@step9"
    with pytest.raises(
        DeviceLostError, match=r"without device-.*Device 'device-\d' has 1\.2 MB; .* needs .* Bring the device back"
    ):
        coordinate(chain(3, 6, ranks=(1, 0)), kills, memory_bytes=1_200_000)
    with pytest.raises(DeviceLostError, match="No device is left"):
        coordinate(shared(1, 1, 1, 1), "; ".join(f"kill:{rank}@step2" for rank in range(4)))


def test_pace_changes_shares_and_is_probed_when_idle(coordinate: Coordinate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is 20 times slower gets nothing more, is probed, and gets its share back when it is as fast as
    before."""
    monkeypatch.setattr(policy, "TOLERATED", 1e3)
    story = coordinate(shared(1, 1, 1, 1), "slow:device-3:20@step2-20", adapt=True, steps=60)
    assert [3 in job.members for job in story.jobs] == [True, False, True]
    assert sum(isinstance(message, Probe) for _, _, message in story.devices.commands) > 5
    assert [note for note in story.policy.notes if "device-3 20.0 times" in note]
    assert [note for note in story.policy.notes if "device-3 1.0 times" in note]
    assert story.queries == [Q] * 60


def test_a_device_whose_memory_is_taken_gets_nothing_until_it_is_back(
    coordinate: Coordinate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "TOLERATED", 1e3)
    story = coordinate(shared(1, 1, 1, 1), "memory:device-3:1e6@step2-20", adapt=True, steps=30)
    assert [3 in job.members for job in story.jobs] == [True, False, True] and story.queries == [Q] * 30
    assert [note for note in story.policy.notes if "device-3 has" in note] == [
        f"device-3 has {share} of its memory for the run." for share in ("0%", "100%")
    ]


def test_steps_are_kept_short(coordinate: Coordinate) -> None:
    """When all devices become slower, q x E is halved until a step fits the time that it may take; the log tells
    where."""
    slow = "; ".join(f"slow:device-{rank}:3@step4" for rank in range(4))
    story = coordinate(shared(1, 1, 1, 1), slow, adapt=True)
    settings = [change.setting for change in story.history.changes]
    assert settings[0] == prepared_job().setting
    assert settings[-1].passes < settings[0].passes
    last = story.history.changes[-1]
    assert story.queries[last.step] == settings[-1].queries
    in_force = [
        next(change.setting for change in reversed(story.history.changes) if change.step <= step)
        for step in range(last.step)
    ]
    assert last.samples == sum(setting.batch_size for setting in in_force)
    assert story.jobs[-1].job.change == last
    assert all(settings[-1] != setting for setting in settings[:-1])


def test_a_resumed_run_notes_each_earlier_change_also_back_to_the_first_setting(coordinate: Coordinate) -> None:
    slow = "; ".join(f"slow:device-{rank}:3@step4-20" for rank in range(4))
    reference, again = (
        coordinate(shared(1, 1, 1, 1), slow, adapt=True, steps=120, resume=resume) for resume in (False, True)
    )
    changes = reference.history.changes
    assert len(changes) > 2 and changes[-1].setting == changes[0].setting
    assert again.history.changes == changes and again.history.resumed == 120
    notes = notes_of(again.history, prepared_job(), resume=True)
    assert notes[1:] == [f"From step {change.step + 1} on {policy.words(change.setting)}." for change in changes[1:]]


def test_a_resumed_runs_former_steps_are_predicted_for_the_devices_it_began_with(coordinate: Coordinate) -> None:
    """Not for those that are left at its end; a step of another setting has no prediction."""
    slow = "; ".join(f"slow:device-{rank}:3@step4-8" for rank in range(4))
    log = coordinate(shared(1, 1, 1, 1), slow, adapt=True).history.path
    resumed = 12
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[: 1 + resumed]))
    again = coordinate(shared(1, 1, 1, 1), "kill:device-1@step14", adapt=True, resume=True)
    prepared, cluster = with_options(prepared_job(), steps=16), four_devices()
    planned = Planned(prepared, profile_for(prepared, cluster, ROW_S), cluster, shared(2, 2))
    steps = again.policy.measured_steps(PRGE().predict(planned))
    first, last = again.policy.generations[0], again.policy.last
    assert len(last.members) < len(first.members) == 4 and again.history.resumed
    expected = [
        first.timetable.seconds(number)
        if change_at(again.history.changes, number).setting == first.job.change.setting
        else None
        for number in range(again.history.resumed)
    ]
    assert None in expected and any(expected)
    assert [step.predicted_s for step in steps[: len(expected)]] == expected
    assert steps[-1].predicted_s == last.timetable.seconds(15) != first.timetable.seconds(15)


def test_the_values_after_the_best_epoch_are_scored_and_saved(
    coordinate: Coordinate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those after the last epoch, nor after another one that is equally good."""
    story, prepared = coordinate(shared(2, 2), ""), with_options(prepared_job(), steps=16)
    trained = TrainedByLog(prepared, load_model(prepared), story.policy.last.job)
    qualities = [0.2, 0.9, 0.9, 0.1]
    values = iter([*qualities, 0.9])
    monkeypatch.setattr(method, "evaluate", lambda *_: SimpleNamespace(value=next(values)))
    thetas = []
    for epoch in (*range(len(qualities)), 1):
        trained.score(epoch, (), lambda *_: None)
        thetas.append(theta(trained.model))
    assert all(not torch.equal(one, other) for one, other in pairwise(thetas[:4]))
    assert torch.equal(thetas[4], thetas[1])
    saved, _ = load_trained(trained.save(tmp_path / "adapter", 1))
    assert torch.equal(theta(saved), thetas[1])
