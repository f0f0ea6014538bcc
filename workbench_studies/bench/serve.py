"""`workbench bench serve`: texts that arrive while devices are killed within them, compared with one process's."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import psutil

from workbench.methods.common.text_model import load_text_model
from workbench.methods.galaxy_plus.serving.text_policy import TextPolicy
from workbench.methods.galaxy_plus.serving.text_service import TextService, text_service
from workbench.models.generation import Sampling
from workbench_studies.bench.frame import Progress
from workbench_studies.bench.serving import soak_cluster

MODEL = "tiny-llama-2"
NUM_TEXTS = 12
"""Texts at each rate."""
RATES = (0, 6, 3)
"""A device is killed within every n-th text; 0: none is."""
LENGTHS, NEW_TOKENS = (4, 70), (3, 24)
KINDS = 8
"""Different texts, which are written in turn: one process's are computed once."""


class Asked(NamedTuple):
    """A text to write, and what one process writes."""

    ids: list[int]
    num_tokens: int
    sampling: Sampling
    expected: list[int]


def bench(progress: Progress = print, *, soak: int = 0) -> dict[str, Any]:
    """Return the figures at every rate of faults.  soak: texts at each rate, by default NUM_TEXTS.

    Raises AssertionError for a text that is lost, comes twice or differs from one process's.
    """
    asked, count = list(_asked()), soak or NUM_TEXTS
    with text_service(MODEL, soak_cluster(), "auto", ends=[], say=progress, system="galaxy") as service:
        points = [_point(service, asked, count, every, progress) for every in RATES]
    return {"numbers_are": "emulated", "model": MODEL, "rates of faults": points}


def _asked() -> Iterator[Asked]:
    local, draws = load_text_model(MODEL), random.Random(0)
    for number in range(KINDS):
        ids = [draws.randrange(5, 500) for _ in range(draws.randint(*LENGTHS))]
        num_tokens = draws.randint(*NEW_TOKENS)
        sampling = Sampling(temperature=float(number % 2), top_p=0.9, seed=number)
        yield Asked(ids, num_tokens, sampling, list(local.writer.write(ids, num_tokens, sampling)))


def _point(service: TextService, asked: list[Asked], count: int, every: int, progress: Progress) -> dict[str, Any]:
    policy, draws = service.policy, random.Random(every)
    seconds, memory, tokens, kills, again = [], [], 0, 0, policy.num_again
    done, killed, begin_s = policy.step, -1, time.monotonic()
    for number in range(count):
        if killed >= 0:
            policy.actions.put((killed, "return"))
            killed = -1
        text, since_s, written = asked[number % len(asked)], time.monotonic(), list[int]()
        for token in service.writer.write(text.ids, text.num_tokens, text.sampling):
            written.append(token)
            if every and number % every == every - 1 and len(written) == 2:
                killed = draws.choice(_serving(policy))
                policy.actions.put((killed, "kill"))
                kills += 1
        if written != text.expected:
            raise AssertionError(f"Text {number} differs from one process's: {written}, not {text.expected}")
        seconds.append(time.monotonic() - since_s)
        memory.append(psutil.Process().memory_info().rss)
        tokens += len(written)
        if (number + 1) % 100 == 0:
            progress(f"{number + 1} of {count} texts, {kills} devices killed")
    if killed >= 0:
        policy.actions.put((killed, "return"))
    if policy.step - done != count:
        raise AssertionError(f"{policy.step - done} texts were written, {count} were asked for")
    fifth = max(1, count // 5)
    return {
        "killed_in_every": every,
        "texts": count,
        "killed": kills,
        "continued": policy.num_again - again,
        **{f"p{share} s": float(np.percentile(seconds, share)) for share in (50, 95, 99)},
        "right tokens per s": tokens / (time.monotonic() - begin_s),
        "memory last over first": median(memory[-fifth:]) / median(memory[:fifth]),
    }


def _serving(policy: TextPolicy) -> list[int]:
    """Return the devices of the plan that serves."""
    plan = policy.rescheduler.plan
    return list(range(len(policy.cluster.devices))) if plan is None else list(plan.ranks)
