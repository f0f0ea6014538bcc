"""A stream of requests for the command line: simulated, on emulated devices, or on real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.device_faults import Fault
from workbench.core.errors import ConfigError
from workbench.core.job import Fidelity, Mode
from workbench.methods.devices import over_ssh, require_emulated
from workbench.methods.galaxy_plus.costs import analytic_inference
from workbench.methods.galaxy_plus.method import measure_rank
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.methods.galaxy_plus.profiles import HostQuestion, analytic_profile, of_devices
from workbench.methods.galaxy_plus.serving.records import (
    ReschedulingSettings,
    ServingEvent,
    ServingReport,
    StreamSettings,
)
from workbench.methods.galaxy_plus.serving.serve import (
    DEFAULT_LENGTH,
    planner_of,
    serve,
    serve_emulated,
    simulated_times,
    usual_length,
)
from workbench.methods.galaxy_plus.serving.simulation import simulate_serving
from workbench.models.sharding import layout_facts, model_layout
from workbench.profiler.descriptions import MODELS


def serve_requests(
    model: str,
    cluster: Cluster,
    mode: Mode,
    fidelity: Fidelity,
    *,
    num_requests: int,
    rate_per_s: float,
    length: int,
    seed: int,
    settings: ReschedulingSettings,
    faults: Sequence[Fault],
    say: Callable[[str], None],
) -> ServingReport:
    """Serve a stream and return its report (see services.ServeRequests).  A simulation also takes a described model."""
    stream = StreamSettings(num_requests=num_requests, rate_per_s=rate_per_s, seed=seed, length=_length(model, length))
    settings_by_name: Any = {"stream": stream, "rescheduling": settings, "faults": faults}
    if mode == "simulate":
        profile, lengths = _profile(model, cluster, stream.length)
        planner, times = planner_of(profile, cluster, lengths), simulated_times(profile, cluster, lengths)
        return simulate_serving(profile, cluster, planner, times, **settings_by_name)
    question = HostQuestion(model=model, longest=stream.length)
    settings_by_name["on_event"] = lambda event: say(event_line(event, cluster))
    if not cluster.is_real:
        require_emulated(cluster, fidelity)
        return serve_emulated(
            question, cluster, fidelity=fidelity, notify=lambda event: say(event.message), **settings_by_name
        )
    with over_ssh(cluster) as real:
        real.bring_model(model)
        say(f"Profiling {cluster.in_words}")
        host = of_devices(real.run(measure_rank, [(question, False)] * cluster.world_size))
        return serve(model, cluster, real, host, **settings_by_name)


def _length(model: str, length: int) -> int:
    """Return the tokens of a request, 0 for the usual ones.  Raises ConfigError if the model reads fewer."""
    if not length:
        return DEFAULT_LENGTH if model in MODELS else usual_length(model_layout(model))
    most = MODELS[model].positions if model in MODELS else layout_facts(model).max_length
    if most and length > most:
        raise ConfigError(
            f"Requests of {length} tokens were asked for.", f"'{model}' knows {most} positions.", "Lower --length."
        )
    return length


def _profile(model: str, cluster: Cluster, length: int) -> tuple[InferenceProfile, tuple[int, ...]]:
    """Return the profile of the catalogue's devices for a described model or a real one, and the tokens in each
    stack.
    """
    profile = analytic_inference(model, cluster) if model in MODELS else analytic_profile(model, cluster)
    return profile, (length, max(1, length // 2))[: len(profile.stacks)]


def event_line(event: ServingEvent, cluster: Cluster) -> str:
    """Return an event as a line of text."""
    device = f" {cluster.devices[event.rank].name}" if event.rank >= 0 else ""
    value = {
        "slowed": f" {event.value:g} times slower",
        "straggler": f" {event.value:.2f} times slower than the others",
        "probed": f" {event.value:.2f} times slower than it can be",
        "planned": f" plan {event.plan_after}, {1e3 * event.value:.0f} ms a request",
        "loaded": f" plan {event.plan_after} in {event.value:.2f} s, {event.detail}",
        "switched": f" to plan {event.plan_after}",
        "repeated": f" request {event.value:.0f}",
    }.get(event.kind, "")
    return f"{event.time_s:9.2f} s  {event.kind}{device}{value}"
