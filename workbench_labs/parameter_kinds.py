"""Parameters that several labs share: ranges, a job, a cluster, and their checks."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.job import Fidelity, Job
from workbench.core.ranges import Text
from workbench.methods import load_method

Megabits = Annotated[float, Meta(ge=0.1, le=100_000)]
"""Mbit/s of a link."""
Moments = Annotated[float, Meta(gt=0, le=60)]
"""Seconds for a measurement."""
Tokens = Annotated[int, Meta(ge=1, le=65_536)]
Few = Annotated[int, Meta(ge=1, le=64)]
Steps = Annotated[int, Meta(ge=1, le=100_000)]
FewSteps = Annotated[int, Meta(ge=1, le=1000)]
Queries = Annotated[int, Meta(ge=1, le=4096)]
Many = Annotated[int, Meta(ge=1, le=10**9)]
Positive = Annotated[float, Meta(gt=0, le=1000)]
Samples = Many | None
"""None takes the whole split."""
Student = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}\Z")]
"""The student's short name.  It determines the numbers of the exercises and the name of the work's file."""
MOST_IN_ALL_ORDERS = 7
"""Devices whose orders a lab lists: 5,040 of seven."""


class AllLabs(Struct, frozen=True, kw_only=True):
    """Parameters of all labs."""

    output: Text
    student: Student

    def check(self) -> None:
        """Raise ConfigError for an unknown name, and for values that do not go together."""


class Parameters(AllLabs, frozen=True, kw_only=True):
    """Parameters of the labs with devices.  Fields that a Job has, too, are checked as its fields, and their ranges are
    not repeated here.
    """

    method: ClassVar[str] = "pac_plus"
    fidelity: Fidelity

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of the lab's job."""
        return {}

    @property
    def job(self) -> Job:
        """Return the job that the lab runs, as far as its parameters describe it.  Raises ConfigError."""
        names = {field.name for field in fields(Job)} & set(self.__struct_fields__)
        return Job(method=self.method, options=self.options, **{name: getattr(self, name) for name in names})

    def check(self) -> None:
        """Check the job and the cluster (see AllLabs)."""
        cluster = self.cluster()
        load_method(self.method).require_known(self.job, cluster)

    def cluster(self) -> Cluster:
        """Return the cluster on which the lab runs its job.  Raises ConfigError."""
        return load_cluster(self.cluster_name)  # type: ignore[attr-defined]  # all labs but one have it


class Trained(Parameters, frozen=True, kw_only=True):
    """Parameters of the labs that train on a cluster from the catalogue."""

    cluster_name: Text
    model: str
    task: str
    train_samples: Samples
    batch_size: int
    seed: int


class Built(Parameters, frozen=True, kw_only=True):
    """Parameters of the labs in which students build a pipeline."""

    cluster_name: Text

    def check(self) -> None:
        """Raise ConfigError for a cluster that is unknown or has a single device: the work is divided."""
        require_devices(self.cluster(), 2, "the work is divided")


class Pipelined(Built, frozen=True, kw_only=True):
    """Parameters of the labs that execute a pipeline."""

    num_micro_batches: Few


def require_devices(cluster: Cluster, least: int, why: str) -> None:
    """Raise ConfigError if a cluster has fewer devices.  why: what they are for."""
    if cluster.world_size < least:
        request = f"The cluster '{cluster.name}' was asked for, and {least} devices or more: {why}."
        raise ConfigError(request, f"It has {cluster.world_size}.", "Choose another cluster.")


def require_few_orders(cluster: Cluster) -> None:
    """Raise ConfigError if a cluster has more devices than a lab tries in all orders."""
    if cluster.world_size > MOST_IN_ALL_ORDERS:
        request = f"The cluster '{cluster.name}' with {cluster.world_size} devices was asked for."
        raise ConfigError(
            request,
            f"All orders of the devices are listed here, for at most {MOST_IN_ALL_ORDERS}.",
            "Choose a smaller one.",
        )
