"""The devices of a job: real ones over SSH, with its model, and whether those of a cluster can be emulated here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.assets.fetch import cache_folder
from workbench.core.cluster import Cluster
from workbench.core.errors import RuntimeSetupError
from workbench.core.job import Fidelity, Job
from workbench.core.run_folder import require_temporary_space
from workbench.methods.base import Event, Notify, ignore
from workbench.runtime.network import require_loopback, require_open_files

if TYPE_CHECKING:
    from workbench.runtime.ssh_devices import SshEngines


def over_ssh(cluster: Cluster, folder: Path | None = None, imports: Sequence[str] = ()) -> SshEngines:
    """Return a cluster's real devices, which are connected inside a `with` block.  Raises ConfigError.

    folder: the run's folder.  imports: modules that their engines will need and import meanwhile.
    """
    from workbench.methods.calls import CALLS
    from workbench.runtime.ssh_devices import SshEngines, require_addresses

    require_addresses(cluster)
    return SshEngines(cluster, folder or cache_folder() / "runs", CALLS, imports=imports)


@contextlib.contextmanager
def connected(job: Job, cluster: Cluster, folder: Path, notify: Notify = ignore) -> Iterator[SshEngines]:
    """Lend a cluster's real devices after the job's model was brought to them.  folder: the run's folder."""
    devices = over_ssh(cluster, folder, ["transformers.modeling_utils"])
    notify(Event("phase", message=f"Starting {cluster.in_words} over SSH", stage="start devices"))
    with devices as real:
        real.bring_model(job.model)
        yield real


def require_emulated(cluster: Cluster, fidelity: Fidelity = "auto") -> None:
    """Raise an error, before anything is loaded or measured, if the cluster's devices cannot be emulated here.

    fidelity: how their links are to be emulated.
    """
    real = [device.name for device in cluster.devices if device.address]
    if real:
        raise RuntimeSetupError(
            f"Running on cluster '{cluster.name}' was asked for.",
            f"{', '.join(real)} {'has an address' if len(real) == 1 else 'have addresses'}; this takes emulated "
            "devices only.",
            "Use `workbench run`, or leave the address out to emulate them.",
        )
    if any(device.framework == "jax" for device in cluster.devices):
        from workbench.models.cross_framework import check_jax

        check_jax()
    cluster.host_shares()
    if fidelity == "paced":
        require_loopback()
    if fidelity != "auto" or cluster.medium == "wifi":
        from workbench.runtime.engines import emulated_links

        emulated_links(cluster, fidelity)
    require_open_files(cluster.world_size)
    require_temporary_space()
