"""Checks for the notebooks' exercises: each looks at an answer and says what is right, or what to look at again."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from statistics import mean

from workbench import experiment
from workbench.core.cluster import Cluster
from workbench.core.errors import WorkbenchError
from workbench.core.plan import Plan
from workbench.core.report import Report

BY_EYE = 0.10  # how far an answer read off a figure may be away


class Verdict:
    """What a check found.  passed: None as long as there is no answer."""

    def __init__(self, passed: bool | None, message: str) -> None:
        self.passed, self.message = passed, message

    def __str__(self) -> str:
        return f"{ {None: 'Not answered yet.', True: 'Right.', False: 'Not yet.'}[self.passed] } {self.message}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        colour = {None: "#4D4D4D", True: "#007A57", False: "#B04A00"}[self.passed]
        return f"<div role='status' style='border-left:4px solid {colour};padding:4px 10px'>{html.escape(str(self))}</div>"


def _number(answer: float | None, expected: float, *, hint: str, right: str, tolerance: float = BY_EYE) -> Verdict:
    """Compare a number with what is expected, within a share of it."""
    if answer is None:
        return Verdict(None, hint)
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        return Verdict(False, f"A number is asked for, this is {answer!r}. {hint}")
    if abs(answer - expected) <= tolerance * abs(expected):
        return Verdict(True, right)
    return Verdict(False, f"{answer:g} is too {'large' if answer > expected else 'small'}. {hint}")


def _epochs(report: Report) -> tuple[float, float]:
    """Return the seconds of the first epoch and of a cached one."""
    return report.epochs[0].seconds, mean(epoch.seconds for epoch in report.epochs if epoch.cached)


def check_speedup(answer: float | None, report: Report) -> Verdict:
    """How many times shorter is an epoch from the cache?"""
    first, cached = _epochs(report)
    return _number(
        answer,
        first / cached,
        hint="Divide the first epoch's seconds by those of a later one; both are in the figure of the epoch times.",
        right=f"{first:.1f} s / {cached:.1f} s = {first / cached:.1f}.",
    )


def check_idlest(answer: str | None, report: Report, timeline: str = "first epoch, predicted") -> Verdict:
    """Which device computes for the smallest share of a first-epoch step?"""
    shown = report.timelines[timeline]
    hint = f"Look for the lane with the most grey in the Gantt chart '{timeline}'."
    if answer is None:
        return Verdict(None, hint)
    if answer not in shown.device_names:
        return Verdict(False, f"There is no device {answer!r}, only {', '.join(shown.device_names)}.")
    busy = {name: shown.busy_s(rank) for rank, name in enumerate(shown.device_names)}
    idlest = min(busy, key=busy.__getitem__)
    if math.isclose(busy[answer], busy[idlest], rel_tol=0.02, abs_tol=1e-9):
        return Verdict(True, f"{answer} computes for {busy[answer] / shown.makespan_s:.0%} of the step.")
    return Verdict(False, f"{answer} computes for {busy[answer] / shown.makespan_s:.0%} of the step; another one for less. {hint}")


def check_half_time(answer: int | None, report: Report) -> Verdict:
    """From how many epochs on does the cache save at least half of the time?"""
    first, cached = _epochs(report)
    if cached >= first / 2:
        return Verdict(None, "In this run a cached epoch takes more than half of the first: it never does. Train on more samples.")
    # first + (n - 1) cached <= n first / 2
    fewest = math.ceil((first - cached) / (first / 2 - cached) - 1e-9)
    hint = "With the cache n epochs take first + (n - 1) cached, without it n first. For which n is the one half of the other?"
    if answer is None:
        return Verdict(None, hint)
    if answer == fewest:
        with_cache = first + (fewest - 1) * cached
        return Verdict(True, f"{fewest} epochs take {with_cache:.1f} s with the cache and {fewest * first:.1f} s without.")
    return Verdict(False, f"Not {answer}. {hint}")


def check_faster_plan(plan: Plan | None, report: Report) -> Verdict:
    """Is the student's plan faster (simulated) than the planner's?  Close is good, too."""
    hint = "Write layers and groups of your own with fixed_plan; the groups name ranks, 0 is the first device."
    if plan is None:
        return Verdict(None, hint)
    try:
        mine, planned = experiment.sweep(report.job, report.cluster, {"mine": plan, "planner": report.plan}, "simulate", num_steps=4)
    except WorkbenchError as error:
        return Verdict(False, str(error))
    ratio = mine.predicted_s / planned.predicted_s
    said = f"A step takes {mine.predicted_s * 1e3:.0f} ms with yours, {planned.predicted_s * 1e3:.0f} ms with the planner's."
    if ratio < 1:
        return Verdict(
            True, f"{said} You beat the planner: its prices (Eq. 5-7) are approximations, and it keeps the devices in the cluster's order."
        )
    if ratio <= 1.2:
        return Verdict(True, f"{said} That is within 20 %.")
    return Verdict(False, f"{said} Get within 20 %: which device is the slowest of its stage, and what does it hold?")


def check_share(answer: float | None, cluster: Cluster, device: str, factor: float) -> Verdict:
    """Which share of a core makes a device `factor` times slower than the one named?"""
    [share] = [one.host_share for one in cluster.devices if one.name == device]
    assert share is not None, f"device '{device}' is not emulated"
    return _number(
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
    return _number(
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


def check_trainable_share(answer: float | None, trainable: int, frozen: int) -> Verdict:
    """Which share of all parameters is trained?"""
    return _number(
        answer,
        trainable / (trainable + frozen),
        tolerance=0.05,
        hint="Trained parameters divided by all parameters, the frozen ones included; 0.01 is one per cent.",
        right=f"{trainable:,} of {trainable + frozen:,} parameters: {trainable / (trainable + frozen):.2%}.",
    )


def check_cache_bytes(answer: int | None, *, tokens: int, num_layers: int, hidden_size: int, itemsize: int) -> Verdict:
    """How many bytes does the activation cache take for a sample?"""
    expected = tokens * hidden_size * (num_layers + 1) * itemsize
    return _number(
        answer,
        expected,
        tolerance=0.001,
        hint=f"s x h x (l + 1) values for s = {tokens} tokens (section V-B): b_0 counts as well. How many bytes has a value?",
        right=f"{tokens} x {hidden_size} x {num_layers + 1} x {itemsize} = {expected:,} bytes.",
    )


def check_live_contexts(answer: Sequence[int] | None, *, num_stages: int, num_micro_batches: int) -> Verdict:
    """How many contexts does each stage of a 1F1B pipeline keep at most?"""
    hint = "Count, for each stage, the forwards before its first backward. The last stage goes back at once."
    if answer is None:
        return Verdict(None, hint)
    expected = [min(num_stages - stage, num_micro_batches) for stage in range(num_stages)]
    if list(answer) == expected:
        return Verdict(True, f"Stage s of p keeps min(p - s, M) contexts: {expected}.")
    if len(list(answer)) != num_stages:
        return Verdict(False, f"One number for each of the {num_stages} stages is asked for. {hint}")
    wrong = next(stage for stage, (mine, right) in enumerate(zip(answer, expected, strict=True)) if mine != right)
    return Verdict(False, f"Stage {wrong} is the first that differs. {hint}")


def check_pipeline_time(answer_s: float | None, *, num_stages: int, num_micro_batches: int, forward_s: float, backward_s: float) -> Verdict:
    """How long does 1F1B take on equal stages and free links?"""
    expected = (num_micro_batches + num_stages - 1) * (forward_s + backward_s)
    return _number(
        answer_s,
        expected,
        tolerance=0.01,
        hint="Every micro-batch costs one forward and one backward; filling and draining the pipeline costs p - 1 of them more.",
        right=f"(M + p - 1) (f + b) = ({num_micro_batches} + {num_stages} - 1) x {forward_s + backward_s:g} s = {expected:g} s.",
    )
