"""A method before its plan: it prepares a job, and measures its layers or computes their costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Generic, Protocol, TypeVar, get_type_hints

from workbench.core.cluster import Cluster
from workbench.core.effects import Situation, idle_settings, refuse_idle
from workbench.core.job import Job
from workbench.core.profile import Layers, Profile
from workbench.methods.base import Event, Notify, Planned, Prepared
from workbench.methods.common.device_counts import of_slowest, publishing
from workbench.methods.common.scaling import (
    BATCH_SIZES,
    cached_measurement,
    describe_facts,
    is_measured_here,
    scale_to_cluster,
)
from workbench.models.hub import has_weights
from workbench.models.loading import STAND_IN
from workbench.profiler.analytic import (
    LayerCost,
    layer_costs,
)
from workbench.runtime.context import RankContext
from workbench.runtime.engine_service import Engines


class Layered(Prepared, Protocol):
    """A job whose model is measured layer by layer."""

    @property
    def profiled_length(self) -> int:
        """Return the largest sequence length to measure."""


SHAPE_NOTE = (
    f"The model is a shape without weights: costs are computed from its sizes, and texts are counted in {STAND_IN}'s "
    "tokens where no tokenizer is next to its configuration."
)


Measurement = tuple[dict[str, Any], Callable[[int], Layers]]
"""The settings that affect a measurement, and a function that measures up to a length."""
A = TypeVar("A", bound=Prepared)
L = TypeVar("L", bound=Layered)


class ProfiledMethod(ABC, Generic[A]):
    """The part of a method before its plan.

    known: returns the options; raises ConfigError at once for an unknown option, task or model.  prepared: finds model
    and data.
    measure_rank: measures a device's own core, given (the result of `asked`, whether to measure again); real devices
    call it by its name.
    """

    name: str
    known: Callable[[Job], Any]
    prepared: Callable[[Job], A]
    measure_rank: Callable[..., Any]

    @abstractmethod
    def joined(self, prepared: A, cluster: Cluster, rows: Sequence[Any]) -> Profile:
        """Return the costs on every device from those that real devices have measured."""

    @abstractmethod
    def scaled(self, prepared: A, cluster: Cluster, notify: Notify, *, refresh: bool) -> Profile:
        """Return the costs on every emulated device from those measured on this host, now or earlier."""

    @abstractmethod
    def catalogue(self, prepared: A, cluster: Cluster) -> Profile:
        """Return the costs on every device from the catalogue's figures."""

    def layer_costs(self, prepared: A, *, batch: int, sequence_length: int) -> tuple[LayerCost, ...]:
        """Return every layer's FLOPs of a forward pass and its bytes, computed from sizes (see Method); nothing is
        trained.
        """
        return layer_costs(describe_facts(prepared.facts), "frozen", batch=batch, sequence_length=sequence_length)

    def num_trained(self, prepared: A) -> int:
        """Return 0: nothing is trained by backpropagation (see Method)."""
        return 0

    def holds_whole_model(self, prepared: A) -> bool:
        """Return whether the machine that commands a run has all layers in memory at once (see Method)."""
        return False

    def asked(self, prepared: A) -> Any:
        """Return the parts of a job that a device needs to measure itself."""
        return prepared

    def require_known(self, job: Job, cluster: Cluster) -> None:
        """Reject unknown names, and options without an effect that say how the work is done (see Method)."""
        refuse_idle(Situation(job=job, cluster=cluster, options=self.known(job)))

    def notes(self, planned: Planned[A]) -> tuple[str, ...]:
        """Return the notes of the settings without an effect, and of the job (see Method)."""
        prepared, profile, cluster, plan = planned
        situation = Situation(
            job=prepared.job, cluster=cluster, options=self.known(prepared.job), prepared=prepared, plan=plan
        )
        shape = () if has_weights(prepared.job.model) else (SHAPE_NOTE,)
        return (*(idle.note for idle in idle_settings(situation)), *profile.notes, *prepared.all_notes, *shape)

    def prepare(self, job: Job, notify: Notify) -> A:
        """Find model and data (see Method)."""
        self.known(job)
        notify(Event("phase", message=f"Loading {job.task} and {job.model}"))
        return self.prepared(job)

    def profile(
        self,
        prepared: A,
        cluster: Cluster,
        notify: Notify,
        *,
        emulated: bool = True,
        engines: Engines | None = None,
        refresh: bool = False,
    ) -> Profile:
        """Scale the host's measured costs to each device's share, or use the catalogue's figures for devices of other
        types.

        The costs of a shape without weights are always computed.
        emulated: the cluster will run here, so each device has its host_share of the host's speed, whatever its type.
        engines: real devices measure themselves, all at once.
        """
        if engines is not None and engines.fidelity == "real":
            notify(Event("phase", message=f"Profiling {cluster.in_words}", stage="profile"))
            payloads = [(self.asked(prepared), refresh)] * cluster.world_size
            rows = engines.run(self.measure_rank, payloads, on_event=of_slowest(notify, engines.cluster.names))
            return self.joined(prepared, cluster, rows)
        model = prepared.job.model
        if is_measured_here(model, cluster) or (emulated and has_weights(model)):
            return self.scaled(prepared, cluster, notify, refresh=refresh)
        return self.catalogue(prepared, cluster)


class LayerMethod(ProfiledMethod[L]):
    """A ProfiledMethod whose devices are measured layer by layer."""

    def __init_subclass__(cls) -> None:
        """Add the function that a real device calls to measure itself."""

        def measure_rank(context: RankContext, payload: tuple[Any, bool]) -> Layers:
            prepared, refresh = payload
            return cls().device_layers(context, prepared, refresh=refresh)

        if "prepared" in vars(cls):
            kind: Any = get_type_hints(cls.prepared)["return"]
            cls.called_by_devices(measure_rank, payload=tuple[kind, bool])

    @classmethod
    def called_by_devices(cls, function: Callable[[RankContext, Any], Any], **payload: Any) -> None:
        """Make a function a static one of this class, with the type of its payload, so that a message can name it and
        be decoded.

        payload: the type of the function's second argument, by its name.  The method declares the function in `calls`.
        """
        function.__module__, function.__qualname__ = cls.__module__, f"{cls.__qualname__}.{function.__name__}"
        function.__annotations__ |= payload
        setattr(cls, function.__name__, staticmethod(function))

    def device_layers(self, context: RankContext, prepared: L, *, refresh: bool) -> Layers:
        """Return every layer's cost on the real device where this runs.  refresh: measure again."""
        return self.host_layers(prepared, publishing(context), refresh=refresh)

    @abstractmethod
    def measured(self, prepared: L) -> Measurement:
        """Return the settings besides model and lengths that affect this host's layer costs, and a function to measure
        up to a length.
        """

    def host_layers(self, prepared: L, notify: Notify, *, refresh: bool = False) -> Layers:
        """Return every layer's cost on one unslowed core of this host, measured now or stored earlier."""
        settings, measure = self.measured(prepared)
        model, max_length = prepared.job.model, prepared.profiled_length
        key = {
            "model": model,
            # The name alone may be a folder that contains another model by now.
            "shape": asdict(prepared.facts),
            "batch_sizes": BATCH_SIZES,
            "max_length": max_length,
        }
        words = f"{self.name} with {model} and its length"
        return cached_measurement(
            key | settings,
            Profile,
            lambda: Profile(model=model, method=self.name, source="measured", layers=(measure(max_length),)),
            words,
            notify,
            refresh=refresh,
        ).layers[0]

    def joined(self, prepared: L, cluster: Cluster, rows: Sequence[Any]) -> Profile:
        """Return every layer's cost on every device (see ProfiledMethod)."""
        return Profile(model=prepared.job.model, method=self.name, source="measured", layers=tuple(rows))

    def scaled(self, prepared: L, cluster: Cluster, notify: Notify, *, refresh: bool) -> Profile:
        """Return every layer's cost on every device (see ProfiledMethod)."""
        layers = self.host_layers(prepared, notify, refresh=refresh)
        return scale_to_cluster(layers, cluster, model=prepared.job.model, method=self.name)
