"""Which method, technique and plan for this job on these devices: every sensible combination is simulated and ranked.

A method declares which combinations are sensible (`Declaration.alternatives`).  Costs are those of `workbench
plan`: measured here once and scaled to the devices, or computed from sizes and the catalogue's figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from workbench import experiment
from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, MissingDataError, WorkbenchError
from workbench.core.job import Job
from workbench.core.methods import attribute, declaration_of, methods_with, registered
from workbench.core.once import shared_results
from workbench.core.plan import DISK, RECOMPUTE
from workbench.core.profile import Profile
from workbench.core.report import Report
from workbench.core.schedule import paused_collector
from workbench.core.serial import shown
from workbench.core.summary import energy_j
from workbench.core.units import three_figures
from workbench.methods.base import Event, ignore
from workbench.methods.common.draft_advice import DraftAdvice
from workbench.methods.common.scaling import is_measured_here
from workbench.methods.sustained import GET_HOT
from workbench.methods.training.estimates import estimated_steps
from workbench.models.configuration import model_facts, require_known
from workbench.models.loading import family_of
from workbench.models.speculation import DraftChoice
from workbench.runs.curves import Curve, curves_of

Goal = Literal["time", "energy", "memory"]
COMPUTED = "computed"
"""The model of a device whose costs come from its FLOP/s."""
SHOWN_REASONS = 2
"""Number of reasons to print if nothing can run: most differ only in their numbers."""
CLOSE = 0.02
"""Two combinations whose figures differ by less than this share are equally good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One combination, simulated.

    run_s: seconds of all epochs, without snapshots and scoring.  seconds: the same; if a target score is given, the
    seconds until it is reached, or None if no measured curve says when.
    joules: energy in the same time, modelled; None where a device has no power figures.
    memory_bytes: the largest values of a device in a step.  sent_bytes: by all devices in a step.
    step_s: seconds of a typical step of the first epoch (Galaxy+: of a request).
    is_dominated: another combination is at least as good in time, energy and memory, and better in one.
    """

    name: str
    job: Job
    simulated: experiment.Simulated
    report: Report
    step_s: float
    run_s: float
    seconds: float | None
    joules: float | None
    memory_bytes: int
    sent_bytes: int
    curve: Curve | None = None
    is_dominated: bool = False

    @property
    def decides(self) -> str:
        """Return what decides the length of a step, in a sentence; it is simulated at the first call."""
        return self.simulated.parts.sentence

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the names of the devices that compute in the first epoch."""
        cluster, plan = self.report.cluster, self.report.plan
        return tuple(cluster.devices[rank].name for rank in plan.busy_ranks)

    def figure(self, goal: Goal) -> float | None:
        """Return what counts, the less the better."""
        return {"time": self.seconds, "energy": self.joules, "memory": float(self.memory_bytes)}[goal]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The combinations, best first; those without a figure for the goal last.

    refused: what cannot run here, by name, with the reason.  costs: 'measured' or 'computed'.  drafts: for the texts of
    a model that generates, where requests are answered.
    """

    goal: Goal
    choices: tuple[Choice, ...]
    refused: dict[str, str]
    costs: Literal["measured", "computed"]
    score: float | None
    spent_s: float
    drafts: DraftAdvice | None = None

    @property
    def reason(self) -> str:
        """Return why the first combination is first, in a sentence or two."""
        return _reason(self.choices)


def _reason(choices: Sequence[Choice]) -> str:
    best = choices[0]
    cluster, plan = best.report.cluster, best.report.plan
    recomputed, stored = (
        " and ".join(stage.layers_in_words for stage in plan.stages if stage.activations == choice)
        for choice in (RECOMPUTE, DISK)
    )
    words = _why_first(choices)
    if recomputed:
        words += f" The backward pass computes the activations of {recomputed} again, to save memory."
    if stored:
        words += f" The activations of {stored} are on the disk, to save memory."
    if cluster.medium == "wifi" and len(best.devices) > 1:
        words += " All messages share the air of one Wi-Fi network."
    return words + "".join(f" {note}" for note in plan.notes if note.startswith(GET_HOT))


def _why_first(choices: Sequence[Choice]) -> str:
    best = choices[0]
    alone = next((choice for choice in choices if len(choice.devices) == 1), None)
    several = next((choice for choice in choices if len(choice.devices) > 1), None)
    if len(best.devices) == 1 and several is not None:
        slower = f"{several.step_s / best.step_s:.1f} times as long"
        return f"One device is enough: with {several.name} on {len(several.devices)} a step takes {slower}. " + (
            f"There: {several.decides[:1].lower()}{several.decides[1:]}"
        )
    if len(best.devices) > 1 and alone is not None:
        return f"{best.decides} One device alone takes {alone.step_s / best.step_s:.1f} times as long ({alone.name})."
    return best.decides


def advise(
    job: Job,
    cluster: Cluster,
    *,
    goal: Goal = "time",
    score: float | None = None,
    keeps_data: bool = False,
    serves: bool = False,
    draft: str = "",
    computed: bool = False,
    progress: Callable[[Event], None] = ignore,
) -> Advice:
    """Return every sensible combination for a job on a cluster, simulated and ranked.

    job: its method and options are the adviser's to choose.  score: rank by the time (or energy) until the validation
    metric reaches this, as measured curves say.  keeps_data: only methods whose devices keep their data.  serves:
    answer requests instead of training.  draft: a draft model to compare with the model alone (see DraftChoice.read).
    computed: take costs from the catalogue, without measuring.
    Raises ConfigError if nothing can run, with the reasons, for a draft without texts or of another tokenizer, and
    MissingDataError without the model or the data.
    """
    began_s = time.monotonic()
    require_known(job.model)
    if score is not None and not 0 < score <= 1:
        raise ConfigError(f"A score of {score:g} was asked for.", "A metric ends at 1.", "Give a share, such as 0.75.")
    # A device of another model than this host is never measured here.
    priced = cluster.with_devices(model=COMPUTED) if computed else cluster
    with shared_results(), estimated_steps(), paused_collector():
        candidates = combinations(job, keeps_data=keeps_data, serves=serves)
        writes = serves and family_of(model_facts(job.model).family).generates
        if draft:
            _require_writing(job.model, draft, serves=serves, writes=writes)
        choices, refused = _simulated(cluster, priced, candidates, score, progress)
        choices, refused = _without_idle_disks(choices, refused)
        drafts = None
        if writes and choices:
            progress(Event("phase", message="Simulating drafts"))
            try:
                drafts = _drafts(job, priced, draft, progress)
            except MissingDataError:
                raise
            except WorkbenchError as error:
                refused["texts, one token after the other"] = error.found
    if not choices:
        widest = sorted(by_reason(refused).items(), key=lambda reason: -len(reason[1]))
        reasons = " ".join(f"{', '.join(names)}: {why}" for why, names in widest[:SHOWN_REASONS])
        more = sum(len(names) for _, names in widest[SHOWN_REASONS:])
        reasons += f" {more} other combinations are refused as well." if more else ""
        raise ConfigError(
            "Advice was asked for.", f"Nothing can run. {reasons}", "Choose another model or more devices."
        )
    rankable = [choice for choice in _distinct(choices) if choice.figure(goal) is not None]
    unknown = [choice for choice in _distinct(choices) if choice.figure(goal) is None]
    ranked = [
        *sorted(rankable, key=lambda choice: (choice.figure(goal) or 0.0, choice.run_s)),
        *sorted(unknown, key=lambda choice: choice.run_s),
    ]
    _reason(ranked)  # what it needs is simulated now, and counted in spent_s
    return Advice(
        goal=goal,
        choices=tuple(replace(choice, is_dominated=_is_dominated(choice, ranked)) for choice in ranked),
        refused=refused,
        costs="measured" if is_measured_here(job.model, priced) else "computed",
        score=score,
        spent_s=time.monotonic() - began_s,
        drafts=drafts,
    )


def _require_writing(model: str, draft: str, *, serves: bool, writes: bool) -> None:
    request = f"The draft '{shown(draft, 200)}' was to be compared."
    if not serves:
        raise ConfigError(
            request,
            "Drafts are for requests to a model that writes texts; this is advice on a training.",
            "Ask for --serve, or leave --draft out.",
        )
    if not writes:
        raise ConfigError(
            request,
            f"Drafts are for a model that writes texts; '{shown(model, 200)}' writes none.",
            "Choose a model that does, such as SmolLM2-135M, or leave --draft out.",
        )
    DraftChoice.read(draft, model)


def _drafts(job: Job, priced: Cluster, draft: str, progress: Callable[[Event], None]) -> DraftAdvice | None:
    """Return what a method whose devices write texts says of drafts; None without such a method."""
    if not (methods := methods_with("advises_drafts")):
        return None
    advise = attribute(declaration_of(methods[0]).advises_drafts)

    def profile_of(model: str, options: dict[str, Any]) -> Profile:
        draft_job = replace(job, method=methods[0], model=model, options=options)
        return experiment.profile(draft_job, priced, "simulate", progress=_phases_of(progress))

    advised: DraftAdvice = advise(job.model, priced, profile_of, draft=draft)
    return advised


def _simulated(
    cluster: Cluster,
    priced: Cluster,
    candidates: Iterable[tuple[str, Job]],
    score: float | None,
    progress: Callable[[Event], None],
) -> tuple[list[Choice], dict[str, str]]:
    """Return the simulated combinations, and what cannot run.  priced: the cluster whose costs count."""
    choices: list[Choice] = []
    refused: dict[str, str] = {}
    for name, candidate in candidates:
        if cluster.world_size == 1 and "paradigm" in candidate.options:
            continue  # nothing can be divided
        progress(Event("phase", message=f"Simulating {name}"))
        try:
            simulated = experiment.simulated(_in_short(candidate), priced, progress=_phases_of(progress))
            step_s = simulated.step_s
        except MissingDataError:
            raise  # the others need the same
        except WorkbenchError as error:
            refused[name] = error.found
            continue
        choices.append(_choice(name, candidate, simulated, cluster, step_s, score))
    return choices, refused


def _without_idle_disks(choices: Sequence[Choice], refused: dict[str, str]) -> tuple[list[Choice], dict[str, str]]:
    """Leave out combinations with activations on the disk whose step is not shorter than with activations that are
    computed again: both need the same memory, and disks wear out.
    """
    pays, idle = list[Choice](), dict[str, str]()
    for choice in choices:
        again = replace(choice.job, options=choice.job.options | {"activations": RECOMPUTE})
        sibling = next((other for other in choices if other.job == again), None)
        on_disk = choice.job.options.get("activations") == DISK
        if on_disk and sibling is not None and choice.step_s > (1 - CLOSE) * sibling.step_s:
            idle[choice.name] = (
                f"A step takes {three_figures(choice.step_s)} s, and {three_figures(sibling.step_s)} s with "
                "activations computed again: the disk, which wears out, does not pay."
            )
        else:
            pays.append(choice)
    return pays, refused | idle


def by_reason(refused: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names of what cannot run, by the reason."""
    names: dict[str, list[str]] = {}
    for name, why in refused.items():
        names.setdefault(why, []).append(name)
    return names


def combinations(job: Job, *, keeps_data: bool = False, serves: bool = False) -> Iterator[tuple[str, Job]]:
    """Yield every sensible combination as a name and a job."""
    for method in registered():
        declared = declaration_of(method)
        if declared.trains == serves or (keeps_data and not declared.keeps_data):
            continue
        for words, options in declared.alternatives.items():
            title = declared.title or method
            yield f"{title}: {words}" if words else title, replace(job, method=method, options=dict(options))


def _in_short(job: Job) -> Job:
    """Return the job with hardly any samples to score, which a simulation does not do."""
    if not declaration_of(job.method).trains:
        return job
    return replace(job, validation_samples=1, test_samples=1)


def _phases_of(progress: Callable[[Event], None]) -> Callable[[Event], None]:
    """Pass on what takes long: profiles that are measured."""
    return lambda event: progress(event) if event.kind == "count" or event.stage == "profile" else None


def _choice(
    name: str, job: Job, simulated: experiment.Simulated, cluster: Cluster, step_s: float, score: float | None
) -> Choice:
    report = replace(simulated.report, cluster=cluster)
    curve = next(iter(curves_of(job)), None)
    steps = curve.steps_to(score) if curve is not None and score is not None else None
    epochs = None if steps is None else steps / sum(step.epoch == report.steps[0].epoch for step in report.steps)
    whole_s = sum(epoch.seconds for epoch in report.epochs) or report.predicted_s
    seconds = whole_s if score is None else None if epochs is None else seconds_of(report, epochs)
    joules = sum(energy_j(report).values()) or None
    timelines = [timeline for timeline in report.timelines.values() if timeline.memory]
    return Choice(
        name=name,
        job=job,
        simulated=simulated,
        report=report,
        step_s=step_s,
        run_s=whole_s,
        seconds=seconds,
        joules=joules if joules is None or score is None else None if seconds is None else joules * seconds / whole_s,
        memory_bytes=max((timeline.highest_peak_bytes for timeline in timelines), default=0),
        sent_bytes=next(iter(report.timelines.values())).all_sent_bytes,
        curve=curve,
    )


def seconds_of(report: Report, epochs: float) -> float:
    """Return the simulated seconds of some epochs; the last may be partial, and epochs beyond the simulated ones take
    as long as the last.
    """
    epochs_s = [epoch.seconds for epoch in report.epochs]
    while len(epochs_s) < epochs:
        epochs_s.append(epochs_s[-1])
    ends = list(accumulate(epochs_s, initial=0.0))
    full = int(epochs)
    return ends[full] + (epochs - full) * (epochs_s[full] if full < len(epochs_s) else 0.0)


def _distinct(choices: Sequence[Choice]) -> list[Choice]:
    """Leave out combinations whose plan another one has, too."""
    distinct: dict[object, Choice] = {}
    for choice in choices:
        plan, job = choice.report.plan, choice.job
        options = {key: value for key, value in job.options.items() if key not in ("paradigm", "system")}
        division = plan.inference if plan.inference is not None and len(choice.devices) > 1 else None
        distinct.setdefault((job.method, str(sorted(options.items())), plan.stages, str(division)), choice)
    return list(distinct.values())


def _is_dominated(choice: Choice, others: Sequence[Choice]) -> bool:
    """Return whether another is at least as good in everything that is known of both, and better in one."""

    def figures(candidate: Choice) -> list[float | None]:
        return [candidate.figure("time"), candidate.figure("energy"), candidate.figure("memory")]

    def beats(other: Choice) -> bool:
        pairs = [(theirs, ours) for theirs, ours in zip(figures(other), figures(choice), strict=True)]
        if any((theirs is None) != (ours is None) for theirs, ours in pairs):
            return False
        comparable = [(theirs, ours) for theirs, ours in pairs if theirs is not None and ours is not None]
        return all(theirs <= ours * (1 + CLOSE) for theirs, ours in comparable) and any(
            theirs < ours * (1 - CLOSE) for theirs, ours in comparable
        )

    return any(beats(other) for other in others if other is not choice)
