"""What the parameters of each lab may be: their types and ranges, and what must go together; checked before a lab's
first cell works.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal, get_args

from msgspec import Meta

from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Cluster
from workbench.core.device_faults import parse_faults
from workbench.core.errors import ConfigError, check_choice
from workbench.core.job import Job
from workbench.core.ranges import Text
from workbench.core.serial import from_builtins, shown
from workbench.methods import load_method
from workbench.methods.pac_plus.options import Initialization
from workbench.profiler.descriptions import describe
from workbench_labs.exercises import own_cluster
from workbench_labs.parameter_kinds import (
    AllLabs,
    Built,
    Few,
    FewSteps,
    Many,
    Megabits,
    Moments,
    Parameters,
    Pipelined,
    Positive,
    Queries,
    Samples,
    Steps,
    Tokens,
    Trained,
    require_devices,
    require_few_orders,
)

WEIGHTS = 128
"""Columns of the network that the ring of 07_cut_a_layer divides."""


class Quickstart(Trained, frozen=True, kw_only=True):
    """00_quickstart.  sweep_steps: steps that each other plan does."""

    validation_samples: Samples
    test_samples: Samples
    epochs: int
    micro_batches: int
    png: bool
    sweep_steps: FewSteps


class Devices(Parameters, frozen=True, kw_only=True):
    """01_devices.  measure_s: time for each rate of this machine.  most_s: the longest predicted time.  bandwidths:
    those that are simulated.
    """

    measure_s: Moments
    most_s: Annotated[float, Meta(ge=0.01, le=10)]
    message_bytes: Annotated[list[Annotated[int, Meta(ge=1, le=100_000_000)]], Meta(min_length=2, max_length=100)]
    bandwidths: Annotated[list[Megabits], Meta(min_length=1, max_length=100)]
    model: str
    train_samples: Samples

    def cluster(self) -> Cluster:
        """Return the cluster of a student who has described none."""
        return own_cluster.described(own_cluster.GIVEN)

    def check(self) -> None:
        """Check also that a line can be fitted through the messages (see Parameters)."""
        Parameters.check(self)
        if len(set(self.message_bytes)) < 2:
            request = f"message_bytes = {self.message_bytes} was asked for."
            raise ConfigError(
                request, "Latency and bandwidth are fitted to messages of different sizes.", "Give two sizes or more."
            )


class Beside(Trained, frozen=True, kw_only=True):
    """03_beside_the_model.  your_samples: sentences for a student's side network.  target_score: % of the validation
    sentences, at which the trainings of initial_ways are compared.
    """

    train_samples: Annotated[int, Meta(ge=3, le=10**6)]
    validation_samples: Annotated[int, Meta(ge=1, le=10**6)]
    test_samples: Annotated[int, Meta(ge=1, le=10**6)]
    your_samples: Annotated[int, Meta(ge=1, le=1024)]
    epochs: Annotated[int, Meta(ge=2)]
    micro_batches: int
    reduction: int
    initial_ways: Annotated[list[str], Meta(min_length=1, max_length=10)]
    target_score: Annotated[float, Meta(ge=0, le=100)]

    @property
    def options(self) -> dict[str, Any]:
        """Return PAC+'s options."""
        return {"reduction": self.reduction}

    def check(self) -> None:
        """Check also the ways to begin (see Parameters)."""
        Trained.check(self)
        for way in self.initial_ways:
            check_choice("initialization", way, get_args(Initialization))


class Slopes(AllLabs, frozen=True, kw_only=True):
    """05_slopes.  steps: steps of the language model.  studied_queries: how many slopes are compared with exact ones.
    repeats: walks on the bowl.
    """

    model: str
    seed: int
    batch_size: int
    learning_rate: float
    queries: Few
    epsilon: Positive
    steps: FewSteps
    studied_queries: Queries
    epsilons: Annotated[list[Positive], Meta(min_length=1, max_length=100)]
    repeats: FewSteps

    def check(self) -> None:
        """Check also the job (see AllLabs)."""
        options = {"queries": self.queries, "steps": self.steps, "epsilon": self.epsilon, "loss": "label_words"}
        shared = {name: getattr(self, name) for name in ("model", "seed", "batch_size", "learning_rate")}
        job = Job(method="p_rge", task="sentiment", micro_batches=1, options=options, **shared)
        load_method("p_rge").require_known(job, load_cluster("laptop"))


class ForwardOnly(Trained, frozen=True, kw_only=True):
    """06_forward_only.  compared_queries, compared_steps: trainings with the same q x E.  parts: copies in one pass.
    measured_s: time for each rate.  device_mb: memory of each device for the model.
    """

    method: ClassVar[str] = "p_rge"
    learning_rate: float
    queries: Few
    epsilon: Positive
    loss: Literal["label_words", "vocabulary"]
    steps: Steps
    train_samples: Many
    validation_samples: Many
    score_every: Steps
    compared_queries: Annotated[list[Queries], Meta(min_length=1, max_length=16)]
    compared_steps: FewSteps
    parts: Annotated[list[Annotated[int, Meta(ge=1, le=1024)]], Meta(min_length=1, max_length=100)]
    measured_s: Moments
    engine_steps: Annotated[int, Meta(ge=0, le=10_000)]
    device_mb: Many
    spread_queries: Queries
    spread_steps: Annotated[int, Meta(ge=2, le=100_000)]

    @property
    def options(self) -> dict[str, Any]:
        """Return P-RGE's options, as the run over several devices has them."""
        return {"queries": self.spread_queries, "steps": self.spread_steps, "epsilon": self.epsilon, "loss": self.loss}

    @property
    def job(self) -> Job:
        """Return the job, without micro-batches (see Parameters)."""
        names = ("model", "task", "seed", "batch_size", "learning_rate", "train_samples", "validation_samples")
        shared = {name: getattr(self, name) for name in names}
        return Job(method=self.method, micro_batches=1, options=self.options, **shared)

    def check(self) -> None:
        """Check also that another device is there when one dies, and that q x E can be divided (see Parameters)."""
        Trained.check(self)
        require_devices(self.cluster(), 2, "one of them is lost")
        product = self.queries * self.batch_size
        for count in self.compared_queries:
            if product % count:
                request = f"compared_queries = {self.compared_queries} was asked for."
                raise ConfigError(request, f"q x E is {product}; {count} does not divide it.", "Choose divisors.")


class NeverDrain(Trained, frozen=True, kw_only=True):
    """10_never_drain.  stages, mini_batches: size of the pipeline to step through.  layer_ms: time of the shortest
    layer on emulated devices.  learning_rate: the descents' with stale gradients.
    """

    method: ClassVar[str] = "confidant"
    stages: Annotated[int, Meta(ge=2, le=16)]
    mini_batches: Few
    layer_ms: Positive
    learning_rate: Annotated[float, Meta(ge=0.05, le=1.2)]
    profile_seed: int
    num_devices: Annotated[int, Meta(ge=2)]
    training_devices: Annotated[int, Meta(ge=2)]
    technique: str
    validation_samples: Samples
    test_samples: Samples
    epochs: int
    window: int
    snapshot_every: int
    fault_step: Steps
    faults: str
    png: bool

    @property
    def options(self) -> dict[str, Any]:
        """Return Confidant's options."""
        return {"technique": self.technique, "window": self.window, "devices": self.training_devices}

    @property
    def job(self) -> Job:
        """Return the job; the descents' learning rate is not its own (see Parameters)."""
        names = {field.name for field in fields(Job)} & set(self.__struct_fields__) - {"learning_rate"}
        values = {name: getattr(self, name) for name in names}
        return Job(method=self.method, options=self.options, snapshot_to="neighbour", **values)

    def cluster(self) -> Cluster:
        """Return the cluster's first devices.  Raises ConfigError if it has fewer."""
        cluster = load_cluster(self.cluster_name)
        require_devices(cluster, self.num_devices, f"num_devices = {self.num_devices}")
        if self.num_devices == cluster.world_size:
            return cluster
        about = f"The first {self.num_devices} of: {cluster.description or cluster.in_words}"
        return replace(cluster.part(range(self.num_devices)), description=about)

    def check(self) -> None:
        """Check also how many devices train, and that the cut's cluster is not too large (see Parameters)."""
        if self.training_devices > self.num_devices:
            request = f"training_devices = {self.training_devices} was asked for."
            problem = f"The run has num_devices = {self.num_devices}."
            raise ConfigError(request, problem, "Lower training_devices, or raise num_devices.")
        Trained.check(self)
        if load_cluster(self.cluster_name).world_size > 4:
            request = f"The cluster '{self.cluster_name}' was asked for."
            raise ConfigError(request, "Section 1 has layers for four devices.", "Choose a cluster of two to four.")
        for faults in (self.faults, f"leave:1@step{self.fault_step}"):
            parse_faults(faults, self.cluster())


class Simulator(Pipelined, frozen=True, kw_only=True):
    """02_write_the_simulator.  forward_s, backward_s: time of one micro-batch on each stage of the executed
    pipeline.
    """

    forward_s: Annotated[float, Meta(gt=0, le=1)]
    backward_s: Annotated[float, Meta(gt=0, le=1)]


class Cut(Pipelined, frozen=True, kw_only=True):
    """04_cut_for_unequal_devices.  layer_ms: time of each layer on the fastest device.  slowness: how many times slower
    each device is.

    paper_cluster, paper_model: those that are simulated.  group_cluster: groups of its devices train the model.
    sweep_steps: steps that each plan does.
    """

    layer_ms: Annotated[list[Positive], Meta(max_length=16)]
    slowness: Annotated[list[Annotated[float, Meta(ge=1, le=100)]], Meta(max_length=16)]
    paper_cluster: Text
    paper_model: Literal["T5-Base", "BART-Large", "T5-Large"]
    group_cluster: Text
    model: str
    task: str
    train_samples: Many
    batch_size: int
    micro_batches: int
    sweep_steps: FewSteps

    def check(self) -> None:
        """Check also that there is one number for each device, and a layer for each, and the groups (see Built)."""
        Pipelined.check(self)
        size = self.cluster().world_size
        if len(self.slowness) != size or len(self.layer_ms) < size:
            raise ConfigError(
                f"{len(self.layer_ms)} layers on {len(self.slowness)} devices were asked for.",
                f"Cluster '{self.cluster_name}' has {size} devices; each gets a layer or more.",
                "Give slowness one number for each device, and layer_ms as many numbers or more.",
            )
        require_few_orders(load_cluster(self.paper_cluster))
        groups = load_cluster(self.group_cluster)
        require_devices(groups, 2, "a group has two")
        load_method(self.method).require_known(self.job, groups)


class KitDay(Trained, frozen=True, kw_only=True):
    """12_kit_day.  steps: steps that each plan does.  loss: how the whole run loses a device, as a fault."""

    validation_samples: Samples
    test_samples: Samples
    epochs: int
    micro_batches: int
    max_length: int
    png: bool
    steps: FewSteps
    loss: str

    @property
    def losing(self) -> Job:
        """Return the job with its lost device."""
        return replace(self.job, faults=self.loss)

    def check(self) -> None:
        """Check also the loss, and that there is a second device (see Parameters)."""
        Trained.check(self)
        require_devices(self.cluster(), 2, "a project over several devices")
        parse_faults(self.loss, self.cluster())


class LayerCut(Built, frozen=True, kw_only=True):
    """07_cut_a_layer.  megabits, product_ms: links and products of the executed ring.  paper_*: settings of the
    simulation.  serving_cluster: cluster that answers requests with the model.
    """

    megabits: Annotated[float, Meta(ge=0.5, le=100)]
    product_ms: Annotated[float, Meta(ge=1, le=1000)]
    paper_model: Text
    paper_cluster: Text
    paper_tokens: Annotated[int, Meta(ge=1, le=4096)]
    model: str
    tokens: Tokens
    requests: Annotated[int, Meta(ge=1, le=10_000)]
    serving_cluster: Text

    def check(self) -> None:
        """Check also the paper's side, and the model's requests (see Parameters)."""
        Built.check(self)
        describe(self.paper_model)
        require_devices(load_cluster(self.paper_cluster), 2, "a sequence is divided over them")
        if WEIGHTS % self.cluster().world_size:
            raise ConfigError(
                f"cluster_name = '{self.cluster_name}' was asked for.",
                f"It has {self.cluster().world_size} devices; {WEIGHTS} columns are divided equally.",
                "Choose a cluster of 2, 4 or 8 devices.",
            )
        job = Job(
            method="galaxy_plus", model=self.model, task="sst2", test_samples=self.requests, max_length=self.tokens
        )
        load_method("galaxy_plus").require_known(job, load_cluster(self.serving_cluster))


class BreakIt(Parameters, frozen=True, kw_only=True):
    """08_break_it.  tokens: length of a request.  straggler: the rank of the device that becomes `slower` times
    slower.
    """

    method: ClassVar[str] = "galaxy_plus"
    cluster_name: Text
    model: str
    tokens: Tokens
    stream_requests: Annotated[int, Meta(ge=1, le=100_000)]
    straggler: Annotated[int, Meta(ge=0)]
    slower: Annotated[float, Meta(gt=1, le=100)]
    text_model: str
    new_tokens: Tokens

    @property
    def job(self) -> Job:
        """Return the job of the requests (see Parameters)."""
        return Job(method=self.method, model=self.model, task="sst2", test_samples=4, max_length=self.tokens)

    @property
    def text_job(self) -> Job:
        """Return the job that writes text."""
        options = {"generate": self.new_tokens, "compare": 2}
        return Job(
            method=self.method, model=self.text_model, task="sentiment", test_samples=2, max_length=32, options=options
        )

    def check(self) -> None:
        """Check also the straggler's rank, and the model that writes text (see Parameters)."""
        Parameters.check(self)
        cluster = self.cluster()
        require_devices(cluster, 2, "one of them is lost")
        if self.straggler >= cluster.world_size:
            request = f"straggler = {self.straggler} was asked for."
            todo = f"Choose a rank from 0 to {cluster.world_size - 1}."
            raise ConfigError(request, f"'{cluster.name}' has {cluster.world_size} devices.", todo)
        load_method(self.method).require_known(self.text_job, cluster)


class DataThatStay(Trained, frozen=True, kw_only=True):
    """09_data_that_stay.  rule: which device owns which samples.  blocks, depth: the ring of the paper's Fig. 2.
    steps: mini-batches of a training.  layer_ms: time of a block's forward pass on emulated devices.
    """

    method: ClassVar[str] = "ringada"
    rule: str
    blocks: Annotated[list[Few], Meta(min_length=2, max_length=64)]
    depth: Annotated[int, Meta(ge=1)]
    steps: Annotated[int, Meta(ge=4, le=1000)]
    layer_ms: Positive

    @property
    def options(self) -> dict[str, Any]:
        """Return RingAda's options."""
        return {"data": self.rule}

    def check(self) -> None:
        """Check also the depth of the drawn ring (see Parameters)."""
        Trained.check(self)
        require_devices(self.cluster(), 2, "a ring has two or more")
        if self.depth > sum(self.blocks):
            request = f"depth = {self.depth} with blocks = {self.blocks} was asked for."
            raise ConfigError(
                request, f"The ring has {sum(self.blocks)} blocks, each with one adapter.", "Lower depth."
            )


class Clinic(AllLabs, frozen=True, kw_only=True):
    """11_reproduction_clinic.  item: a table or figure of the paper, such as table3."""

    paper: Literal["pac_plus", "galaxy_plus", "p_rge", "ringada", "confidant"]
    item: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,31}\Z")]


LABS: dict[str, type[AllLabs]] = {
    "00_quickstart": Quickstart,
    "01_devices": Devices,
    "03_beside_the_model": Beside,
    "05_slopes": Slopes,
    "06_forward_only": ForwardOnly,
    "07_cut_a_layer": LayerCut,
    "08_break_it": BreakIt,
    "09_data_that_stay": DataThatStay,
    "10_never_drain": NeverDrain,
    "02_write_the_simulator": Simulator,
    "04_cut_for_unequal_devices": Cut,
    "11_reproduction_clinic": Clinic,
    "12_kit_day": KitDay,
}


def check_parameters(lab: str, values: Mapping[str, Any]) -> Any:
    """Return what a lab's parameters cell, or papermill after it, has set: the lab's Parameters.  lab: the notebook's
    name.  values: among others, by name.

    Raises ConfigError naming the parameter, its value and what it may be.
    """
    check_choice("lab", lab, LABS)
    kind = LABS[lab]
    values_given = {name: values[name] for name in kind.__struct_fields__ if name in values}
    for name, value in values_given.items():
        if isinstance(value, set | frozenset):  # msgspec would take it for a list; a cell may look for its last value
            request = f"The parameter {name} = {shown(value)} was asked for."
            raise ConfigError(request, "A set has no order.", "Write a list: [...].")
    values_given = {
        name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in values_given.items()
    }
    checked = from_builtins(values_given, kind, source="the lab's parameters")
    checked.check()
    return checked
