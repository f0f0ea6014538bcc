"""`workbench devices`: show clusters and their devices, or measure devices, links and layers."""

from __future__ import annotations

import platform
from typing import Annotated

import typer

from workbench.cli.job import CLUSTER, ClusterName, takes_job
from workbench.cli.output import Json, print_json, print_table, print_text, say, show_cluster
from workbench.core.catalogue import cluster_file, cluster_names, load_cluster
from workbench.core.errors import ConfigError, check_choice
from workbench.core.job import Fidelity, Job
from workbench.core.serial import shown
from workbench.core.waiting import wait_for_interrupt


@takes_job("method", "model", "task", "data", "options")
def devices(
    job: Job,
    cluster: ClusterName = CLUSTER,
    names: Annotated[bool, typer.Option("--list", help="List the clusters that come with the project.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure each device's FLOP/s, memory and disk rate.")
    ] = False,
    links: Annotated[
        bool, typer.Option("--links", help="Emulate the cluster and measure bandwidth and latency of every link.")
    ] = False,
    layers: Annotated[
        bool, typer.Option("--layers", help="Profile a model's layers: times and bytes, measured and computed.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="Device whose layers to profile (default: the first).")] = None,
    batch: Annotated[
        list[int], typer.Option("--batch", min=1, max=65_536, help="Batch size for --layers; may be repeated.")
    ] = [1, 4, 16],  # noqa: B006
    length: Annotated[int, typer.Option(min=1, max=1_000_000, help="Tokens per sample for --layers.")] = 32,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure layers again, even if stored results exist.")
    ] = False,
    discover: Annotated[bool, typer.Option("--discover", help="Look for devices in the local network.")] = False,
    announce: Annotated[bool, typer.Option("--announce", help="Let others find this device, until Ctrl-C.")] = False,
    name: Annotated[str, typer.Option(help="With --announce: this device's name (default: its host name).")] = "",
    fidelity: Annotated[Fidelity, typer.Option(help="How links are emulated for --links.")] = "auto",
    as_json: Json = False,
) -> None:
    """Show a cluster's devices, list the clusters, find devices, or measure: devices, links, a model's layers."""
    if names:
        clusters = {name: load_cluster(name) for name in cluster_names()}
        if as_json:
            print_json({name: described.description for name, described in clusters.items()})
        else:
            listed = ((name, described.world_size, described.description) for name, described in clusters.items())
            print_table("Clusters", ("name", "devices", "description"), listed)
    elif announce:
        _announce(name)
    elif discover:
        _discover(as_json=as_json)
    elif measure or links or layers:
        described = load_cluster(cluster)
        if measure + links + layers > 1:
            raise ConfigError(
                "Several measurements were asked for.",
                "Each has an output of its own.",
                "Give --measure, --links or --layers.",
            )
        if device is not None:
            check_choice(f"device of cluster '{described.name}'", device, described.names)
        from workbench.cli.measure import measure_devices, measure_layers, measure_links

        if measure or links:
            file = cluster_file(cluster)
            measured = (
                measure_devices(described, file, as_json=as_json)
                if measure
                else measure_links(described, file, fidelity, as_json=as_json)
            )
            if as_json:
                print_json(measured)
        else:
            measure_layers(
                job, described, device=device, batch_sizes=tuple(batch), length=length, refresh=refresh, as_json=as_json
            )
    else:
        described = load_cluster(cluster)
        if as_json:
            print_json(described)
        else:
            show_cluster(described)


def _announce(name: str) -> None:
    from workbench.runtime.discovery import about_this_machine, announced

    name = name or platform.node().partition(".")[0]
    with announced(name, about_this_machine()) as addresses:
        say(f"This device is announced as '{shown(name)}' at {addresses}.  Ctrl-C ends it.")
        wait_for_interrupt()


def _discover(*, as_json: bool) -> None:
    from workbench.runtime.discovery import discover, named_alike

    candidates = discover()
    if as_json:
        print_json([candidate._asdict() for candidate in candidates])
        return
    about = ("cores", "memory_mb", "machine", "framework", "battery", "version")
    rows = [
        (
            shown(candidate.name),
            candidate.address,
            candidate.port,
            *(shown(candidate.about.get(key, ""), 20) for key in about),
        )
        for candidate in candidates
    ]
    print_table(
        "Devices in this network",
        ("device", "address", "port", "cores", "MB", "machine", "computes by", "battery", "version"),
        rows,
    )
    if alike := named_alike(candidates):
        print_text(alike)
    if candidates:
        users = " ".join(f"USER@{candidate.address}" for candidate in candidates)
        print_text(f"Each is a candidate only.  Next: workbench kit init {users}")
    else:
        print_text("None.  On a device: workbench devices --announce, or install avahi-daemon there.")
