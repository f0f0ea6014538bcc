"""Lab 'A device is four numbers': a link fitted to measured messages, and a roofline.

The model of a message is Hockney's (1994): latency plus bytes over bandwidth.  That of arithmetic is the roofline
(Williams et al., 2009): the slower of arithmetic and memory counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import count
from random import Random
from statistics import median
from typing import Any

from workbench.core.cluster import MEGABIT_BYTES, Cluster, Device, Link
from workbench.core.job import Fidelity
from workbench.profiler.host import HostProfile
from workbench_labs.course.verdict import (
    Exercise,
    Numbers,
    Verdict,
    WrongAnswerError,
    comparison,
    number_of,
    require_list,
    require_number,
    usable,
)
from workbench_labs.exercises.judging import Function, code_exercise
from workbench_labs.exercises.own_cluster import judge_cluster
from workbench_labs.probing import WITHIN, Amounts, fresh_probes, measure

Rates = Mapping[str, float]
"""A device: flops_per_s, memory_bytes_per_s, latency_s, bytes_per_s."""
CASES = 20
SIZES = (1, 1_000, 10_000, 100_000, 1_000_000)
NOISE, DISTURBED, LONGEST = 0.03, 0.3, 8.0
"""The judge's measurements: usual deviation, probability that every second message is delayed, and by how many times a
delayed one takes longer at most."""
CLOSE = 1e-6


def noisy_messages(draws: Random, latency_s: float, bytes_per_s: float) -> list[list[float]]:
    """Return [bytes, seconds] of messages on a link, as a computer measures them that also does other things."""
    messages = []
    for nbytes in SIZES:
        for number in range(7):
            seconds = (latency_s + nbytes / bytes_per_s) * (1 + abs(draws.gauss(0, NOISE)))
            is_disturbed = number % 2 == 1 and draws.random() < DISTURBED
            messages.append([nbytes, seconds * (draws.uniform(2, LONGEST) if is_disturbed else 1)])
    draws.shuffle(messages)
    return messages


def judge_fit_link(answer: Function, draws: Random) -> str:
    """Compare latency and bandwidth with those from which disturbed measurements were drawn."""
    for _ in range(CASES):
        link = (draws.uniform(0.2, 5) / 1e3, draws.uniform(5, 200) * MEGABIT_BYTES)
        messages = noisy_messages(draws, *link)
        answered = [number_of(value) for value in require_list(answer(messages), "A link", 2)]
        if any(abs(value - true) > WITHIN * true for value, true in zip(answered, link, strict=True)):
            raise WrongAnswerError(
                f"Messages of a link with {1e3 * link[0]:.2f} ms and {link[1]:,.0f} bytes/s: "
                f"yours has {1e3 * answered[0]:.2f} ms and {answered[1]:,.0f} bytes/s.",
                _link_table(messages, link, answered),
            )
    return f"Latency and bandwidth are within {WITHIN:.0%} on {CASES} random links, disturbed messages among them."


def _link_table(messages: Sequence[Sequence[float]], link: Sequence[float], answered: Sequence[float]) -> Any:
    rows = []
    for nbytes in SIZES:
        times_ms = sorted(1e3 * seconds for size, seconds in messages if size == nbytes)
        lines = (1e3 * (line[0] + nbytes / line[1]) if line[1] else 0.0 for line in (link, answered))
        rows.append(
            (
                f"{nbytes:,}",
                " ".join(f"{taken_ms:.3g}" for taken_ms in times_ms),
                *(f"{line_ms:.3g}" for line_ms in lines),
            )
        )
    return comparison("Milliseconds", ("bytes", "measured", "of the link", "of yours"), rows)


def _amounts(flops: float = 0.0, memory: float = 0.0, sent: float = 0.0) -> Amounts:
    return {"flops": flops, "memory_bytes": memory, "sent_bytes": sent}


def judge_seconds_of(answer: Function, draws: Random) -> str:
    """Check properties: each resource alone takes amount / rate, arithmetic and memory work at the same time, a
    message comes afterwards.
    """
    for _ in range(CASES):
        device = {
            "flops_per_s": draws.uniform(1, 100) * 1e9,
            "memory_bytes_per_s": draws.uniform(1, 20) * 1e9,
            "latency_s": draws.uniform(0.1, 5) / 1e3,
            "bytes_per_s": draws.uniform(1, 125) * 1e6,
        }
        flops, memory, sent = draws.uniform(1, 90) * 1e8, draws.uniform(1, 90) * 1e7, draws.uniform(1, 90) * 1e4

        def seconds(why: str, *, device: Rates = device, expected: float, **amounts: float) -> float:
            operation = _amounts(**amounts)
            answered_s = number_of(answer(operation, device))
            if abs(answered_s - expected) > CLOSE * max(expected, 1e-9):
                rows = [(name, f"{amount:.4g}") for name, amount in {**operation, **device}.items()]
                raise WrongAnswerError(
                    f"{why}: {expected:.4g} s; yours takes {answered_s:.4g} s.", comparison("The case", ("", ""), rows)
                )
            return answered_s

        seconds("Nothing to do takes no time", expected=0.0)
        arithmetic_s = seconds(
            "Arithmetic alone takes flops / rate", flops=flops, expected=flops / device["flops_per_s"]
        )
        other = seconds(
            "Memory alone takes bytes / rate", memory=memory, expected=memory / device["memory_bytes_per_s"]
        )
        both = seconds(
            "Arithmetic and memory work at the same time, so the longer one counts",
            flops=flops,
            memory=memory,
            expected=max(arithmetic_s, other),
        )
        alone = seconds(
            "A message takes latency + bytes / bandwidth",
            sent=sent,
            expected=device["latency_s"] + sent / device["bytes_per_s"],
        )
        seconds(
            "A result is sent when it is there",
            flops=flops,
            memory=memory,
            sent=sent,
            expected=both + alone,
        )
    return f"It has every property of the model, on {CASES} random devices."


def judge_transfer(answer: Any, numbers: Numbers) -> str:
    """Compare with a transfer of the workbench's own cluster: both latencies, and the rate of the slower end."""
    ends = [(numbers["first_mbit"], numbers["first_ms"]), (numbers["second_mbit"], numbers["second_ms"])]
    devices = tuple(
        Device(
            name=f"device {number}",
            flops_per_s=1e9,
            memory_bytes=1,
            link=Link(bytes_per_s=megabits * MEGABIT_BYTES, latency_s=milliseconds / 1e3),
        )
        for number, (megabits, milliseconds) in enumerate(ends)
    )
    link = Cluster(name="two", devices=devices).link(0, 1)
    nbytes = numbers["megabytes"] * 1_000_000
    right = f"{1e3 * link.latency_s:g} ms + {nbytes:,} / {link.bytes_per_s:,.0f} s = {link.transfer_s(nbytes):.3f} s."
    return require_number(answer, link.transfer_s(nbytes), 0.01, right)


def judge_ridge(answer: Any, numbers: Numbers) -> str:
    """Try one size after another until arithmetic takes longer than memory."""
    flops_per_s, bytes_per_s = numbers["gflops"] * 1e9, numbers["gigabytes"] * 1e9
    first = next(n for n in count(1) if 2 * n**3 / flops_per_s >= 12 * n**2 / bytes_per_s)
    if abs(number_of(answer) - first) > 1:
        raise WrongAnswerError(f"{number_of(answer):g} is not it.")
    return f"From n = {first} on: 2 n³ / {flops_per_s:.3g} is more than 12 n² / {bytes_per_s:.3g}."


def _transfer(draws: Random) -> Numbers:
    """Return a transfer of which each part takes more than the tolerance."""
    while True:
        first, second = draws.sample([20, 50, 100, 250], 2)
        megabytes, first_ms, second_ms = draws.randint(1, 8), draws.randint(10, 49), draws.randint(50, 90)
        if first_ms > 0.03 * (first_ms + second_ms + 8000 * megabytes / min(first, second)):
            return {
                "megabytes": megabytes,
                "first_mbit": first,
                "second_mbit": second,
                "first_ms": first_ms,
                "second_ms": second_ms,
            }


def _plain_fit(messages: Sequence[Sequence[float]]) -> list[float]:
    """Return the link through the medians of the smallest and the largest messages."""
    sizes = sorted({size for size, _ in messages})
    small, large = (median(taken for size, taken in messages if size == end) for end in (sizes[0], sizes[-1]))
    bytes_per_s = (sizes[-1] - sizes[0]) / max(large - small, 1e-9)
    return [max(0.0, small - sizes[0] / bytes_per_s), bytes_per_s]


def _plain_seconds(operation: Rates, device: Rates) -> float:
    work_s = max(operation["flops"] / device["flops_per_s"], operation["memory_bytes"] / device["memory_bytes_per_s"])
    sent = operation["sent_bytes"]
    return work_s + (device["latency_s"] + sent / device["bytes_per_s"] if sent else 0.0)


EXERCISES = (
    Exercise(
        name="cluster",
        question="""**Describe a cluster** (5 points): three devices or more that take {cores} cores in all or less \
(`host_share`). The fastest computes {factor} times as fast as the slowest, emulated (`host_share`) and simulated \
(`gflops`). One device's link has {megabits} Mbit/s; \
all other links are faster.""",
        points=5,
        hints=(
            "Change the text above: a `[[device]]` for each, with `name` and `host_share`.",
            "A device may have its own `bandwidth_mbit_per_s`; the one in `[defaults]` holds for the others.",
            "Choose the slowest device's share first; the fastest has the factor times as much, of `gflops`, too.",
        ),
        draw=lambda draws: {
            "cores": draws.choice([0.8, 1.2, 1.5]),
            "factor": draws.randint(3, 8),
            "megabits": draws.choice([20, 25, 40, 50]),
        },
        judge=judge_cluster,
    ),
    code_exercise(
        name="seconds_of",
        question="""**Write the model** (8 points). `seconds_of(operation, device)` returns seconds. `operation` has \
`flops`, `memory_bytes` and `sent_bytes`; `device` has `flops_per_s`, `memory_bytes_per_s`, `latency_s` and \
`bytes_per_s`; both are dicts. Arithmetic and memory work at the same time. What is sent is sent afterwards; nothing \
is sent if `sent_bytes` is 0.""",
        points=8,
        hints=(
            "How long would arithmetic take if memory were infinitely fast? And the other way round?",
            "Of two things that happen at the same time, the longer one counts: `max`.",
            "A message of 0 bytes is no message: it has no latency either.",
        ),
        judge=judge_seconds_of,
        stand_in=_plain_seconds,
    ),
    code_exercise(
        name="fit_link",
        question="""**Fit a link** (10 points). `fit_link(messages)` gets a list of `[bytes, seconds]`, measured \
several times for each size, and returns `[latency_s, bytes_per_s]`. Some messages were held up because the computer \
did something else. Both numbers must be within 10 %.""",
        points=10,
        hints=(
            "Plot seconds over bytes first. Which measurements of one size can you trust?",
            "The median of each size ignores what was held up. Then a line: seconds = latency + bytes / bandwidth.",
            "Plain least squares looks at the large messages only. Divide each equation by its seconds, so that every "
            "size counts alike: `numpy.linalg.lstsq`.",
        ),
        judge=judge_fit_link,
        stand_in=_plain_fit,
    ),
    Exercise(
        name="transfer",
        question="""**Two ends** (3 points). {megabytes} MB travel from a device whose link has {first_mbit} Mbit/s \
and {first_ms} ms to one with {second_mbit} Mbit/s and {second_ms} ms. Nothing else is sent. How many seconds does it \
take, to 1 %?""",
        points=3,
        hints=(
            "Mbit are not MB: a byte has 8 bits.",
            "Both links are on the way: which rate counts?",
            "Latencies add up; the slower rate counts.",
        ),
        draw=_transfer,
        judge=judge_transfer,
    ),
    Exercise(
        name="ridge",
        question="""**Where the roof bends** (3 points). A device computes {gflops} GFLOP/s and moves {gigabytes} \
GB/s. A product of two n x n matrices takes 2 n³ operations and moves 12 n² bytes. From which n on does arithmetic \
decide (to 1)?""",
        points=3,
        hints=(
            "Write down both times. For which n are they equal?",
            "2 n³ / F = 12 n² / M.",
            "n = 6 F / M, rounded up.",
        ),
        draw=lambda draws: {"gflops": draws.randint(4, 120), "gigabytes": draws.choice([0.5, 1, 2, 4, 8])},
        judge=judge_ridge,
    ),
)


def twelve(
    seconds_of: Function,
    device: Rates,
    cluster: Cluster,
    rank: int,
    host: HostProfile,
    *,
    fidelity: Fidelity = "paced",
    most_s: float = 0.1,
    seed: int | None = None,
) -> Verdict:
    """Predict twelve things that nobody has measured yet, measure them on a device, and compare.

    device: what the student knows of it.  most_s: the most seconds that one of them may take.  seed: None draws others
    each time.
    """
    probes = fresh_probes(Random(seed), cluster, rank, host, most_s)
    began = time.perf_counter()
    model = usable(EXERCISES, "seconds_of", seconds_of)
    predicted = [number_of(model(probe.amounts, dict(device))) for probe in probes]
    measured = measure(cluster, rank, probes, host, fidelity)
    off = [value / true - 1 for value, true in zip(predicted, measured, strict=True)]
    rows = [
        (str(probe), f"{1e3 * value:.1f}", f"{1e3 * true:.1f}", f"{by:+.1%}")
        for probe, value, true, by in zip(probes, predicted, measured, off, strict=True)
    ]
    right = sum(abs(by) <= WITHIN for by in off)
    name = cluster.devices[rank].name
    table = comparison(f"{name}, milliseconds", ("what", "predicted", "measured (emulated)", "off by"), rows)
    return Verdict(
        right == len(probes),
        f"{right} of {len(probes)} predictions are within {WITHIN:.0%}.",
        seconds=time.perf_counter() - began,
        details=table,
    )
