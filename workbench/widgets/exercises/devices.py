"""Checks about devices, links and clusters."""

from __future__ import annotations

from workbench.core.cluster import Cluster
from workbench.widgets.exercises.verdict import Verdict, number_verdict


def check_share(answer: float | None, cluster: Cluster, device: str, factor: float) -> Verdict:
    """Which share of a core makes a device `factor` times slower than the one named?"""
    [share] = [one.host_share for one in cluster.devices if one.name == device]
    assert share is not None, f"device '{device}' is not emulated"
    return number_verdict(
        answer,
        share / factor,
        tolerance=0.03,
        hint=f"'{device}' has {share:g} of a core. An operation that takes c seconds on a whole core takes c / share on a device.",
        right=f"{share:g} / {factor:g} = {share / factor:.3f} of a core.",
    )


def check_transfer(answer_s: float | None, cluster: Cluster, source: str, destination: str, nbytes: int) -> Verdict:
    """How many seconds does a message take from device to device?"""
    names = [device.name for device in cluster.devices]
    link = cluster.link(names.index(source), names.index(destination))
    return number_verdict(
        answer_s,
        link.transfer_s(nbytes),
        tolerance=0.03,
        hint="Latency plus bytes / rate. The rate of a path is that of its slower end; 1 Mbit/s is 125,000 bytes/s.",
        right=f"{link.latency_s * 1e3:g} ms + {nbytes:,} / {link.bytes_per_s:,.0f} s = {link.transfer_s(nbytes) * 1e3:.1f} ms.",
    )


def check_cluster(cluster: Cluster | None, *, cores: int) -> Verdict:
    """Does a cluster of the student's own have three unequal emulated devices that this host can carry?"""
    hint = "Describe three devices with different host_share whose sum stays below the number of cores."
    if cluster is None:
        return Verdict(None, hint)
    shares = [device.host_share for device in cluster.devices]
    if cluster.world_size < 3:
        return Verdict(False, f"It has {cluster.world_size} devices. {hint}")
    if any(share is None for share in shares):
        return Verdict(False, f"A device without host_share cannot be emulated. {hint}")
    if len(set(shares)) < len(shares):
        return Verdict(False, f"Two devices have the same share: {shares}. {hint}")
    total = sum(share for share in shares if share is not None)
    if total > cores:
        return Verdict(False, f"Together they ask for {total:.2f} cores; this host has {cores}. {hint}")
    return Verdict(True, f"{cluster.world_size} devices, {total:.2f} of {cores} cores in all.")
