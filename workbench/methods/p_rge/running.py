"""A run from its begin to its last step: on devices that a coordinator looks after, or as one job of all of them."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.methods.base import Engines, Event, Notify
from workbench.methods.common.records import Progress, show_device
from workbench.methods.p_rge.compute import load_model
from workbench.methods.p_rge.history import History
from workbench.methods.p_rge.launch import Launcher
from workbench.methods.p_rge.planning import ProfileOf
from workbench.methods.p_rge.policy import Done, QueryPolicy
from workbench.methods.p_rge.prepare import PreparedJob
from workbench.methods.p_rge.session import Logged, RankPart
from workbench.methods.p_rge.worker import run_rank, serve_rank
from workbench.models.zeroth_order import warn_of_rounding
from workbench.planners.adaptive import Setting
from workbench.runtime.coordinator import Coordinator, Generation
from workbench.runtime.devices import Devices, EngineDevices, fleet_of
from workbench.runtime.engines import EngineCluster


class Run:
    """One run in its folder; use it as a context manager.  model: the whole model as it is before the first step.

    notes: what a user should know of the settings.
    """

    def __init__(
        self,
        prepared: PreparedJob,
        cluster: Cluster,
        folder: Path,
        setting: Setting,
        *,
        profile_of: ProfileOf,
        is_real: bool,
        resume: bool,
        notify: Notify,
    ) -> None:
        """Open the folder.  setting: with which a new run begins.  Raises CacheError for another run's, ConfigError for files of none."""
        self.prepared, self.cluster, self.folder, self.profile_of, self.notify = prepared, cluster, folder, profile_of, notify
        options = prepared.options
        self.model = load_model(prepared.job.model, prepared.trainable, options.precision, compute=options.compute_dtype)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            warn_of_rounding(self.model, options.epsilon)
        self.notes = tuple(str(one.message) for one in told)
        self._said: list[str] = []
        self.history = History(folder, prepared, self.model, resume=resume)
        if not self.history.records and setting != self.history.changes[-1].setting:
            self.history.change(self.history.changed(setting))
        self.launcher = Launcher(prepared, cluster, self.history, folder, profile_of=profile_of, is_real=is_real)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.history.close()

    def coordinated(self, plan: Plan, engines: EngineCluster) -> Done:
        """Do the steps that are left on emulated devices, any of which may die, leave, come back or change its pace."""
        with engines.service() as service:
            model, address = self.prepared.job.model, service.address
            return self.on_devices(plan, EngineDevices(service, serve_rank, lambda rank: (model, address), engines.now_s))

    def on_devices(self, plan: Plan, devices: Devices) -> Done:
        """Do the steps that are left on devices that take commands."""
        policy = QueryPolicy(self.prepared, self.launcher, self.history, plan, self.notify, self._say)
        policy.done.notes = self._said = []
        fleet = fleet_of(devices, self.cluster, self.prepared.job)
        adapts = self.prepared.options.adapt
        coordinator = Coordinator(fleet=fleet, policy=policy, say=self._say, show=partial(show_device, self.notify), adapts=adapts)
        coordinator.run()
        policy.done.recoveries = coordinator.recoveries
        return policy.done

    def _say(self, text: str) -> None:
        self._said.append(f"{text}.")
        self.notify(Event("note", message=text))

    def together(self, plan: Plan, engines: Engines) -> Done:
        """Do the steps that are left as one job of all devices, which ends with the first that dies; the log is there to go on from."""
        done, history, total = Done(), self.history, self.prepared.num_steps
        if len(history.records) >= total:
            return done
        everyone = tuple(range(self.cluster.world_size))
        predictor = self.launcher.predictor(everyone, {}, plan, history.changes[-1])
        job = self.launcher.rank_job(everyone, plan, predictor, history.changes[-1])
        done.predicted_s = {step: predictor.seconds(step) for step in range(len(history.records), total)}
        progress = Progress(plan, self.notify)

        def take(rank: int, event: Any) -> None:
            if not isinstance(event, Logged):
                progress(rank, event)
            elif event.record.step == len(history.records):
                history.add(event.record)

        parts: list[RankPart] = engines.run(run_rank, [job] * self.cluster.world_size, on_event=take)
        for record in max(parts, key=lambda part: len(part.records)).records:  # the last may be under way still
            if record.step == len(history.records):
                history.add(record)
        done.parts.append((Generation(0, everyone, plan, job, predictor), dict(enumerate(parts))))
        return done
