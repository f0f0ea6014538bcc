"""Start the devices of a service that writes texts, emulated or real, and run its coordinator in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from workbench.core.cluster import Cluster
from workbench.core.device_faults import FaultSchedule
from workbench.core.errors import PlanError, RuntimeSetupError
from workbench.core.inference import InferencePlan
from workbench.core.job import Fidelity
from workbench.core.schedule import Ranks
from workbench.core.threads import in_background
from workbench.core.timeline import Timeline
from workbench.methods.devices import over_ssh, require_emulated
from workbench.methods.galaxy_plus.costs import scaled_to
from workbench.methods.galaxy_plus.method import measure_rank
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.methods.galaxy_plus.options import System
from workbench.methods.galaxy_plus.prepare import Request
from workbench.methods.galaxy_plus.prices import Programs
from workbench.methods.galaxy_plus.profiles import HostQuestion, host_profile, of_devices
from workbench.methods.galaxy_plus.serving.drafts import DraftPrices, Round, draft_profile
from workbench.methods.galaxy_plus.serving.log import ServingLog
from workbench.methods.galaxy_plus.serving.messages import WHOLE
from workbench.methods.galaxy_plus.serving.records import ReschedulingSettings, ServingEvent
from workbench.methods.galaxy_plus.serving.rescheduler import BlockTimes, Rescheduler
from workbench.methods.galaxy_plus.serving.serve import run_service
from workbench.methods.galaxy_plus.serving.text_plans import (
    KEPT,
    PLANNED_TOKENS,
    planned_lengths,
    text_planner,
)
from workbench.methods.galaxy_plus.serving.text_policy import MOST_TEXTS, DeviceWriter, TextPolicy
from workbench.methods.galaxy_plus.serving.worker import serve_worker
from workbench.methods.galaxy_plus.session import SessionSetup
from workbench.models.configuration import require_generating
from workbench.models.sharding import ModelLayout, model_layout
from workbench.models.speculation import DraftChoice
from workbench.runtime.engines import default_pool
from workbench.simulator import simulate

END_S = 20.0


@dataclass(frozen=True, kw_only=True)
class TextService:
    """A running service.  fidelity: how the devices' links are."""

    writer: DeviceWriter
    policy: TextPolicy
    cluster: Cluster
    fidelity: str
    programs: Programs

    def token_timeline(self, plan: InferencePlan) -> Timeline:
        """Return the simulation of one more token under a plan."""
        lengths = (PLANNED_TOKENS,) * len(self.programs.stacks)
        return simulate(self.programs.token(plan, lengths).program, memory=False)


@contextmanager
def text_service(
    model: str,
    cluster: Cluster,
    fidelity: Fidelity,
    *,
    ends: Sequence[int],
    say: Callable[[str], None],
    system: System = "galaxy_plus",
    first_plan: InferencePlan | None = None,
    draft: str = "",
) -> Iterator[TextService]:
    """Start a cluster's devices with a model, and end them afterwards.

    ends: tokens that end a text, besides the model's own.  say: receives what happens.  system: whose planner divides
    the model.  first_plan: a plan of all devices, instead of that planner's.  draft: which model guesses tokens (see
    DraftChoice.read); '' for none.
    Raises ConfigError for a model that cannot be divided, PlanError if it fits on no devices, RuntimeSetupError.
    """
    require_generating(model, f"Texts of '{model}' were asked for.")
    layout = model_layout(model)
    choice = DraftChoice.read(draft, model) if draft else None
    lengths = planned_lengths(layout)
    question = HostQuestion(model=model, longest=lengths[0], what="last")
    settings = ReschedulingSettings(request_timeout_s=60.0)
    with ExitStack() as stack:
        engines: Any
        host: InferenceProfile | None = None
        if cluster.is_real:
            engines = stack.enter_context(over_ssh(cluster))
            say(f"Profiling {cluster.in_words}")

            def profile_of(name: str) -> InferenceProfile:
                engines.bring_model(name)
                draft_question = replace(question, model=name), False
                return of_devices(engines.run(measure_rank, [draft_question] * cluster.world_size))

            profile = profile_of(model)
        else:
            require_emulated(cluster, fidelity)

            def measured(name: str) -> InferenceProfile:
                draft_question = replace(question, model=name)
                return host_profile(draft_question, lambda event: say(event.message) if event.kind == "phase" else None)

            def profile_of(name: str) -> InferenceProfile:
                return scaled_to(measured(name), cluster)

            host = measured(model)
            profile = scaled_to(host, cluster)
            say(f"Starting {cluster.in_words}")
            engines = default_pool().acquire(cluster, fidelity)
            stack.callback(default_pool().stop)
        log = ServingLog(watch=lambda event: _tell(event, cluster, say))
        rescheduler = Rescheduler(
            settings,
            cluster.world_size,
            text_planner(profile, cluster, lengths, system=system, first=first_plan),
            lambda plan, slow_downs: BlockTimes(plan.predicted_s, {rank: {WHOLE: 1.0} for rank in plan.ranks}),
            log,
        )
        programs, drafts = Programs(cluster, layout.stacks, profile), None
        if choice is not None:
            costs = draft_profile(choice, profile_of(choice.model) if choice.model else profile)
            drafts = DraftPrices(programs, costs, profile, lengths, **KEPT)
        setup = SessionSetup(
            model=model,
            cluster=cluster,
            host=host,
            costs=profile if cluster.is_real else None,
            timeout_s=settings.request_timeout_s,
            report_every_s=settings.report_every_s,
            draft=choice,
            draft_costs=None if choice is None else costs,
        )
        service = stack.enter_context(engines.service(serve_worker, [setup] * cluster.world_size))
        is_over = threading.Event()
        policy = TextPolicy.on(
            service,
            cluster,
            FaultSchedule(()),
            rescheduler,
            stacks=layout.stacks,
            num_steps=MOST_TEXTS,
            requests=(_warm_up(layout),),
            is_over=lambda now_s: is_over.is_set(),
            place_draft=_placing(drafts, cluster, say),
        )
        thread = in_background(_work, policy, is_over, name="coordinator")
        try:
            yield TextService(
                writer=DeviceWriter(layout, ends, policy),
                policy=policy,
                cluster=cluster,
                fidelity=engines.fidelity,
                programs=programs,
            )
        finally:
            is_over.set()
            thread.join(END_S)


def _placing(
    drafts: DraftPrices | None, cluster: Cluster, say: Callable[[str], None]
) -> Callable[[InferencePlan, Ranks], Round | None]:
    """Return how the device that guesses is chosen; it says which one guesses, and when that pays."""

    @cache
    def place(plan: InferencePlan, others: Ranks) -> Round | None:
        if drafts is None:
            return None
        try:
            best = drafts.best(plan, others)
        except PlanError as error:
            say(f"Nothing guesses tokens: {error}")
            return None
        say(f"{cluster.devices[best.rank].name} guesses tokens: {best.verdict}")
        return best

    return place


def _work(policy: TextPolicy, is_over: threading.Event) -> None:
    error: Exception = RuntimeSetupError("A text was to be written.", "The service has ended.", "Start it again.")
    try:
        run_service(policy)
    except Exception as found:  # of any kind: the texts that wait must hear of it
        error = found
    policy.fail(error)


def _warm_up(layout: ModelLayout) -> Request:
    ids = torch.ones(1, 8, dtype=torch.int64)
    return Request(8, ids, 1, ids[:, :1]) if layout.has_decoder else Request(8, ids)


_TEXTS = {
    "lost": "is lost",
    "revived": "is back",
    "excluded": "is slow: the others go on without it",
    "readmitted": "takes part again",
    "waiting": "No plan fits now",
}


def _tell(event: ServingEvent, cluster: Cluster, say: Callable[[str], None]) -> None:
    if event.kind in _TEXTS:
        name = cluster.devices[event.rank].name if event.rank >= 0 else ""
        say(f"{name} {_TEXTS[event.kind]}".strip())
