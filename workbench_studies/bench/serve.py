"""`workbench bench serve`: many clients' texts while devices are killed within them, compared with one process's."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import median
from threading import Lock
from typing import NamedTuple

import psutil

from workbench.core.spread import percentile
from workbench.methods.common.text_model import load_text_model
from workbench.methods.galaxy_plus.serving.text_service import TextService, text_service
from workbench.models.generation import Sampling
from workbench_studies.bench.frame import Figures, Progress
from workbench_studies.bench.serving import soak_cluster

MODEL = "tiny-llama-2"
NUM_TEXTS = 600
"""Texts, a share at each rate."""
RATES = (0, 200, 50)
"""A device is killed within every n-th text, unless one is away; 0: none is."""
CLIENTS = 24
"""Number of clients: more than texts are written at a time, so some wait."""
SAMPLES = 50
"""Readings of this process's memory."""
LENGTHS, NEW_TOKENS = (4, 70), (3, 24)
KINDS = 8
"""Different texts, which are written in turn: one process's are computed once."""


class TextRequest(NamedTuple):
    """A text to write, and what one process writes."""

    ids: list[int]
    num_tokens: int
    sampling: Sampling
    expected: list[int]


def bench(progress: Progress = print, *, soak: int = 0) -> Figures:
    """Return the figures at every rate of faults.  soak: so many texts in all, by default NUM_TEXTS.

    Raises AssertionError for a text that is lost, comes twice or differs from one process's.
    """
    requests, texts = list(_text_requests()), soak or NUM_TEXTS
    ends = [texts * number // len(RATES) for number in range(len(RATES) + 1)]
    with text_service(MODEL, soak_cluster(), "auto", ends=[], say=progress, system="galaxy") as service:
        points = [
            _point(service, requests, end - begin, every, progress)
            for every, (begin, end) in zip(RATES, pairwise(ends), strict=True)
        ]
    return {"label": "emulated", "model": MODEL, "rates of faults": points}


def _text_requests() -> Iterator[TextRequest]:
    local, draws = load_text_model(MODEL), random.Random(0)
    for number in range(KINDS):
        ids = [draws.randrange(5, 500) for _ in range(draws.randint(*LENGTHS))]
        num_tokens = draws.randint(*NEW_TOKENS)
        sampling = Sampling(temperature=float(number % 2), top_p=0.9, seed=number)
        yield TextRequest(ids, num_tokens, sampling, list(local.writer.write(ids, num_tokens, sampling)))


class _Load:
    """Clients who each ask for a text, and for the next one when they have it.  every: see RATES."""

    def __init__(
        self, service: TextService, requests: list[TextRequest], count: int, every: int, progress: Progress
    ) -> None:
        self._service, self._requests, self._count, self._every = service, requests, count, every
        self._progress, self._draws, self._lock = progress, random.Random(every), Lock()
        self._next = 0
        self.seconds, self.first_s, self.memory = list[float](), list[float](), list[int]()
        self.tokens = self.kills = 0

    def run(self) -> None:
        """Ask for all texts.  Raises AssertionError for one that differs from one process's."""
        with ThreadPoolExecutor(CLIENTS) as clients:
            for client in [clients.submit(self._ask) for _ in range(CLIENTS)]:
                client.result()

    def _ask(self) -> None:
        while (number := self._take()) < self._count:
            text, since_s, written = self._requests[number % len(self._requests)], time.monotonic(), list[int]()
            first_s, killed = 0.0, -1
            for token in self._service.writer.write(text.ids, text.num_tokens, text.sampling):
                first_s = first_s or time.monotonic() - since_s
                written.append(token)
                if self._every and number % self._every == self._every - 1 and len(written) == 2:
                    killed = self._kill()
            if written != text.expected:
                raise AssertionError(f"Text {number} differs from one process's: {written}, not {text.expected}")
            if killed >= 0:
                self._service.policy.actions.put((killed, "return"))
            self._note(time.monotonic() - since_s, first_s, len(written))

    def _take(self) -> int:
        with self._lock:
            self._next += 1
            return self._next - 1

    def _note(self, seconds: float, first_s: float, tokens: int) -> None:
        with self._lock:
            self.seconds.append(seconds)
            self.first_s.append(first_s)
            self.tokens += tokens
            if len(self.seconds) % max(1, self._count // SAMPLES) == 0:
                self.memory.append(psutil.Process().memory_info().rss)
            if len(self.seconds) % 1000 == 0:
                self._progress(f"{len(self.seconds)} of {self._count} texts, {self.kills} devices killed")

    def _kill(self) -> int:
        """Kill one of the devices that serve, and return it; -1 while another one is away."""
        policy = self._service.policy
        with self._lock:
            plan = policy.rescheduler.plan
            if plan is None or policy.state.lost:
                return -1
            killed = self._draws.choice(plan.ranks)
            policy.actions.put((killed, "kill"))
            self.kills += 1
            return killed


def _point(service: TextService, requests: list[TextRequest], count: int, every: int, progress: Progress) -> Figures:
    policy, load = service.policy, _Load(service, requests, count, every, progress)
    first_step, again, begin_s = policy.step, policy.num_again, time.monotonic()
    load.run()
    took_s = time.monotonic() - begin_s
    if policy.step - first_step != count:
        raise AssertionError(f"{policy.step - first_step} texts were written, {count} were asked for")
    fifth = max(1, len(load.memory) // 5)
    return {
        "killed_in_every": every,
        "texts": count,
        "killed": load.kills,
        "continued": policy.num_again - again,
        **{f"p{share} s": percentile(load.seconds, share / 100) for share in (50, 95, 99)},
        "first token p95 s": percentile(load.first_s, 0.95),
        "right texts per s": count / took_s,
        "right tokens per s": load.tokens / took_s,
        "memory last over first": median(load.memory[-fifth:]) / median(load.memory[:fifth]),
    }
