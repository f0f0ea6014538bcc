"""A simulated run with faults: P-RGE's queries on devices in virtual time (see training.faults)."""

from __future__ import annotations

from typing import Any

from workbench.methods.base import Planned, ignore
from workbench.methods.p_rge.policy import Changes, SettingPolicy
from workbench.methods.p_rge.prepare import PreparedJob
from workbench.methods.p_rge.rank_job import PRGERankJob
from workbench.methods.training.faults import VirtualJob, VirtualPolicy
from workbench.methods.training.phases import Plans
from workbench.runtime.commands import Generation, Parts, StepDone, is_broken


class VirtualQueryPolicy(VirtualPolicy, SettingPolicy):
    """A VirtualPolicy of queries.

    A device that comes back repeats the log while the others work.  With after_loss = 'drop' the others finish the step
    of a loss without the lost queries, with 'repeat' it is done again.
    """

    def __init__(self, method: Plans, planned: Planned[PreparedJob], first: PRGERankJob) -> None:
        super().__init__(method, planned, Changes(first.change), ignore)
        self._stepped_s = 0.0  # the end of the last step
        self._rest_s = 0.0  # what the others still have to do of a step in which a device was lost

    def begun(self, generation: Generation) -> Generation:
        """Begin a generation, after the rest of a step in which a device was lost (see Policy)."""
        job: Any = generation.job
        self._record(job)
        self._begin(generation)
        begins_s, self._rest_s = self._rest_s, 0.0
        self._stepped_s = self.clock() + begins_s
        virtual = VirtualJob(job, self.step, self.num_steps, generation.timeout_s, begins_s)
        return generation._replace(job=virtual)

    def stepped(self, generation: Generation, rank: int, done: StepDone) -> None:
        """Count a step."""
        super().stepped(generation, rank, done)
        self._stepped_s = self.clock()

    def ended(self, generation: Generation, parts: Parts, lost: frozenset[int]) -> None:
        """Repeat the step of a loss, or let the others finish it."""
        super().ended(generation, parts, lost)
        if not is_broken(parts, lost) or self.step >= self.num_steps:
            return
        if self.prepared.options.after_loss == "repeat" or len(lost) == len(generation.members):
            self.say(f"Step {self.step + 1} is repeated")
            return
        self.say(f"Step {self.step + 1} is made without the lost queries")
        whole_s = generation.predictor.seconds(self.step)
        self._rest_s = max(0.0, whole_s - (self.clock() - self._stepped_s))
        self._step += 1
        self._stepped_s = self.clock()
