"""Checks about devices, and about forward passes (P-RGE, sections 2 and 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from functools import wraps
from typing import Any, get_type_hints

from workbench.core.catalogue import cluster_names, load_cluster
from workbench.core.cluster import Cluster
from workbench.core.errors import WorkbenchError
from workbench_labs.course.verdict import Verdict, WrongAnswerError, require_number

BY_EYE = 0.10  # tolerance, as a share, of an answer read off a figure


def number_verdict(answer: float | None, expected: float, hint: str, right: str, tolerance: float = BY_EYE) -> Verdict:
    """Compare a number with the expected one; it may differ by a share of it."""
    if answer is None:
        return Verdict(None, hint)
    try:
        return Verdict(True, require_number(answer, expected, tolerance, right))
    except WrongAnswerError as error:
        return Verdict(False, f"{error} {hint}")


def exercise(hint: str) -> Callable[[Callable[..., tuple[bool, str]]], Callable[..., Verdict]]:
    """Return a decorator for a function that examines an answer and returns whether it is right, and why; it becomes a
    check.

    hint: what the check says before there is an answer, and after why an answer is wrong.  An answer that raises an
    error is wrong.
    """

    def decorate(examine: Callable[..., tuple[bool, str]]) -> Callable[..., Verdict]:
        wanted = next(iter(get_type_hints(examine).values()))

        @wraps(examine)
        def check(answer: Any, *given: Any, **named: Any) -> Verdict:
            if answer is None:
                return Verdict(None, hint)
            if isinstance(wanted, type) and is_dataclass(wanted) and not isinstance(answer, wanted):
                return Verdict(False, f"A {wanted.__name__} is asked for, this is {answer!r}. {hint}")
            try:
                passed, why = examine(answer, *given, **named)
            except (WorkbenchError, AttributeError, TypeError) as error:
                passed, why = False, str(error)
            return Verdict(passed, why if passed else f"{why} {hint}")

        return check

    return decorate


def check_share(answer: float | None, cluster: Cluster, device: str, factor: float) -> Verdict:
    """Which share of a core makes a device `factor` times slower than the named device?"""
    [share] = [one.host_share for one in cluster.devices if one.name == device]
    assert share is not None, f"device '{device}' is not emulated"
    hint = (
        f"'{device}' has {share:g} of a core. An operation that takes c seconds on a whole core takes c / share on a "
        "device."
    )
    right = f"{share:g} / {factor:g} = {share / factor:.3f} of a core."
    return number_verdict(answer, share / factor, hint, right, 0.03)


def check_transfer(answer_s: float | None, cluster: Cluster, source: str, destination: str, nbytes: int) -> Verdict:
    """How many seconds does a message take from device to device?"""
    names = [device.name for device in cluster.devices]
    link = cluster.link(names.index(source), names.index(destination))
    hint = (
        f"Latency plus bytes / rate, in cluster '{cluster.name}'. The rate of a path is that of its slower end; "
        "1 Mbit/s is 125,000 bytes/s."
    )
    right = (
        f"{link.latency_s * 1e3:g} ms + {nbytes:,} / {link.bytes_per_s:,.0f} s = {link.transfer_s(nbytes) * 1e3:.1f} "
        "ms."
    )
    return number_verdict(answer_s, link.transfer_s(nbytes), hint, right, 0.03)


@exercise("Describe three devices with different host_share whose sum stays below the number of cores.")
def check_cluster(cluster: Cluster, *, cores: int, given: Cluster) -> tuple[bool, str]:
    """Does the student's cluster have three unequal emulated devices that this host can carry, and is it new?

    given: the cluster that the notebook describes.
    """
    shares = [device.host_share for device in cluster.devices]
    if cluster.world_size < 3:
        return False, f"It has {cluster.world_size} devices."
    if any(share is None for share in shares):
        return False, "A device without host_share cannot be emulated."
    if len(set(shares)) < len(shares):
        return False, f"Two devices have the same share: {shares}."
    for known in (given, *map(load_cluster, cluster_names())):
        if [device.host_share for device in known.devices] == shares:
            return False, f"Its devices have the shares of '{known.name}', which was given. Describe your own."
    total = sum(share for share in shares if share is not None)
    return total <= cores, f"{cluster.world_size} devices, which ask for {total:.2f} of {cores} cores in all."
