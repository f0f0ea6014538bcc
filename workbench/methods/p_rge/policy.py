"""P-RGE's answers to the coordinator: who computes which queries, what the log holds, what becomes of the step of a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.core.plan import Plan
from workbench.core.report import Recovery
from workbench.methods.base import Notify
from workbench.methods.common.records import Progress
from workbench.methods.p_rge.handlers import record_of
from workbench.methods.p_rge.history import History, words
from workbench.methods.p_rge.launch import Launcher
from workbench.methods.p_rge.prepare import PreparedJob
from workbench.methods.p_rge.session import RankPart
from workbench.runtime.commands import StepDone
from workbench.runtime.coordinator import Generation, Parts


@dataclass(kw_only=True)
class Done:
    """What came of a run.  parts: of every generation, the members with what each did.  predicted_s: by step, under the plan of then."""

    parts: list[tuple[Generation, dict[int, RankPart]]] = field(default_factory=list)
    predicted_s: dict[int, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    recoveries: tuple[Recovery, ...] = ()


class QueryPolicy:
    """A runtime.coordinator.Policy.  What a generation begins with is the log of seeds and scalars, which every device replays.

    plan: of the first generation, if its devices are there.  say: takes what a user should know.
    """

    def __init__(
        self, prepared: PreparedJob, launcher: Launcher, history: History, plan: Plan, notify: Notify, say: Callable[[str], None]
    ) -> None:
        self._prepared, self._launcher, self._history, self._plan = prepared, launcher, history, plan
        self._notify, self._say = notify, say
        self._progress: Progress | None = None
        self.done = Done()

    @property
    def step(self) -> int:
        """Return how many steps the log has."""
        return len(self._history.records)

    @property
    def num_steps(self) -> int:
        """Return the steps of the whole run."""
        return self._prepared.num_steps

    def generation(self, number: int, ready: tuple[int, ...], factors: Mapping[int, float]) -> Generation:
        """Return the steps that are left; with another setting, if the job allows it and the devices ask for it (see Policy)."""
        stages, setting = self._plan.stages, self._history.changes[-1].setting
        fits = self._plan.micro_batch_size == setting.batch_size and all(
            sum(share.queries for share in stage.shares) == setting.queries for stage in stages
        )
        if number == 1 and fits and {rank for stage in stages for rank in stage.ranks} <= set(ready):
            return self._launcher.generation(number, ready, factors, setting, self._plan)
        return self._launcher.generation(number, ready, factors, self._launcher.fitted(ready, factors))

    def begun(self, generation: Generation) -> Generation:
        """Note a change of the setting, and what the steps should take now."""
        if generation.job.change != self._history.changes[-1]:
            self._history.change(generation.job.change)
            self._say(f"From step {self.step + 1} on {words(generation.job.change.setting)}")
        members, notify = generation.members, self._notify
        self._progress = Progress(
            generation.plan, lambda event: notify(event._replace(rank=members[event.rank]) if event.rank >= 0 else event)
        )
        for step in range(self.step, self.num_steps):
            self.done.predicted_s[step] = generation.predictor.seconds(step)
        return generation

    def stepped(self, generation: Generation, rank: int, done: StepDone) -> None:
        """Put a step into the log."""
        self._history.add(done.content)

    def heard(self, generation: Generation | None, rank: int, event: Any) -> None:
        """Pass a device's progress on."""
        if generation is not None and rank in generation.members and self._progress is not None and isinstance(event, dict):
            self._progress(generation.members.index(rank), event)

    def ended(self, generation: Generation, parts: Parts, lost: frozenset[int]) -> None:
        """Put what is known into the log; repeat the step of a loss, or make it from the queries that are known."""
        found = {rank: ended.part for rank, ended in parts.items() if ended.part is not None}
        self.done.parts.append((generation, found))
        for part in found.values():
            for record in part.records[-2:]:
                if record.step == self.step:
                    self._history.add(record)
        if self.step < self.num_steps and (lost or any(ended.end == "lost" for ended in parts.values())):
            self._make_lost_step(generation, found, lost)

    def _make_lost_step(self, generation: Generation, parts: Mapping[int, RankPart], lost: frozenset[int]) -> None:
        """Make the step in which a device was lost from the losses that the others know, if that is wished and there are any."""
        step, job = self.step, generation.job
        known: dict[int, float] = {}
        for part in parts.values():
            if job.first_step + len(part.records) == step:
                known |= part.losses
        whole = {part: loss for part, loss in known.items() if part ^ 1 in known}
        # Where the others have not all come to this step, more than the lost device's share would be missing.
        others = 1
        if len(generation.plan.stages) == 1:
            shares = generation.plan.stages[0].shares
            others = sum(share.queries for share in shares if generation.members[share.rank] not in lost)
        if self._prepared.options.after_loss == "repeat" or len(whole) // 2 < max(1, others):
            self._say(f"Step {step + 1} is repeated")
            return
        self._history.add(record_of(job, step, whole))
        self._say(f"Step {step + 1} is made from {len(whole) // 2} of {job.estimator.queries} queries")

    def differs(self, generation: Generation, ready: tuple[int, ...], factors: Mapping[int, float]) -> bool:
        """Return whether the devices' pace asks for another setting or plan."""
        return self._launcher.differs(generation, ready, factors)
