"""Checks about devices and links, and about Parallel Adapters, their activation cache and quantization (PAC+, section IV)."""

from __future__ import annotations

from workbench.core.cluster import Cluster
from workbench.widgets.exercises.verdict import Verdict, number_verdict


def check_trainable_share(answer: float | None, trainable: int, frozen: int) -> Verdict:
    """Which share of all parameters is trained?"""
    hint = "Trained parameters divided by all parameters, the frozen ones included; 0.01 is one per cent."
    right = f"{trainable:,} of {trainable + frozen:,} parameters: {trainable / (trainable + frozen):.2%}."
    return number_verdict(answer, trainable / (trainable + frozen), hint, right, 0.05)


def check_cache_bytes(answer: int | None, *, tokens: int, num_layers: int, hidden_size: int, itemsize: int) -> Verdict:
    """How many bytes does the activation cache take for a sample?"""
    expected = tokens * hidden_size * (num_layers + 1) * itemsize
    hint = f"s x h x (l + 1) values for s = {tokens} tokens (section V-B): b_0 counts as well. How many bytes has a value?"
    right = f"{tokens} x {hidden_size} x {num_layers + 1} x {itemsize} = {expected:,} bytes."
    return number_verdict(answer, expected, hint, right, 0.001)


def check_backward_share(answer: float | None, forward_s: float, backward_s: float) -> Verdict:
    """Which share of a step (forward and backward) is the backward pass?"""
    hint = "Backward divided by forward and backward together, both in the table; 0.5 is one half."
    right = f"{backward_s * 1e3:.0f} ms of {(forward_s + backward_s) * 1e3:.0f} ms: {backward_s / (forward_s + backward_s):.0%}."
    return number_verdict(answer, backward_s / (forward_s + backward_s), hint, right)


def check_down_projection(answer: int | None, *, hidden_size: int, reduction: int) -> Verdict:
    """How many weights has one down-projection (its bias left out)?"""
    expected = hidden_size * hidden_size // reduction
    hint = "W_down maps the backbone's width d to the side network's d / r (section IV-A)."
    right = f"{hidden_size} x {hidden_size // reduction} = {expected:,}."
    return number_verdict(answer, expected, hint, right, 0.001)


def check_quantization_step(answer: float | None, *, absmax: float) -> Verdict:
    """By how much may a weight of a block be off after INT8 (Eq. 1-2)?"""
    bound = absmax / 127 / 2
    hint = "Eq. 1 rounds 127 / absmax times the weight to a whole number. Rounding is off by at most one half; undo the factor."
    right = f"1/2 x {absmax:g} / 127 = {bound:.2e}."
    return number_verdict(answer, bound, hint, right, 0.03)


def check_quantized_bytes(answer: float | None, *, bits: int, block_size: int) -> Verdict:
    """How many bytes does a weight take, its block's share of the float32 constant included?"""
    expected = bits / 8 + 4 / block_size
    hint = f"{bits} bits for the code, and each block of {block_size} weights keeps one constant of 4 bytes."
    right = f"{bits} / 8 + 4 / {block_size} = {expected:g} bytes."
    return number_verdict(answer, expected, hint, right, 0.01)


def check_share(answer: float | None, cluster: Cluster, device: str, factor: float) -> Verdict:
    """Which share of a core makes a device `factor` times slower than the one named?"""
    [share] = [one.host_share for one in cluster.devices if one.name == device]
    assert share is not None, f"device '{device}' is not emulated"
    hint = f"'{device}' has {share:g} of a core. An operation that takes c seconds on a whole core takes c / share on a device."
    right = f"{share:g} / {factor:g} = {share / factor:.3f} of a core."
    return number_verdict(answer, share / factor, hint, right, 0.03)


def check_transfer(answer_s: float | None, cluster: Cluster, source: str, destination: str, nbytes: int) -> Verdict:
    """How many seconds does a message take from device to device?"""
    names = [device.name for device in cluster.devices]
    link = cluster.link(names.index(source), names.index(destination))
    hint = "Latency plus bytes / rate. The rate of a path is that of its slower end; 1 Mbit/s is 125,000 bytes/s."
    right = f"{link.latency_s * 1e3:g} ms + {nbytes:,} / {link.bytes_per_s:,.0f} s = {link.transfer_s(nbytes) * 1e3:.1f} ms."
    return number_verdict(answer_s, link.transfer_s(nbytes), hint, right, 0.03)


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
