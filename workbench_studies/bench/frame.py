"""Code shared by the benchmarks: sides that take turns, ratios with their spread, kernel links, peak memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from workbench.core.errors import ConfigError, RuntimeSetupError, did_you_mean
from workbench.core.job import Job
from workbench.core.serial import read_toml
from workbench.runtime.engines import EngineCluster
from workbench.runtime.memory import read_memory, reset_peak

Progress = Callable[[str], None]
Figures = dict[str, Any]
"""The result of a benchmark, or of one of its points: values by name."""
Step = Callable[[int], object]
T = TypeVar("T")

LONG_S = 30.0
"""If a round takes longer, the number of rounds is halved."""
JOBS = Path(__file__).with_name("bench.toml")


def turns(names: Iterable[str], rounds: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Yield (round, side): every side once a round, by name; the order is reversed from one round to the next."""
    for turn in rounds:
        for name in sorted(names, reverse=bool(turn % 2)):
            yield turn, name


def interleaved(sides: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each side's step in each round, after a warm-up step.

    If the warm-up takes longer than LONG_S it counts as a round, and the number of rounds is halved.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}

    def play(chosen: range, first_step: int) -> None:
        for turn, name in turns(sides, chosen):
            begin = time.perf_counter()
            sides[name](turn + first_step)
            seconds[name].append(time.perf_counter() - begin)

    play(range(1), 0)
    if sum(sum(of_side) for of_side in seconds.values()) > LONG_S:
        play(range(1, rounds // 2), 0)
        return seconds
    for of_side in seconds.values():
        of_side.clear()
    play(range(rounds), 1)
    return seconds


def ratios(slow: Sequence[float], fast: Sequence[float], name: str = "ratio") -> dict[str, float]:
    """Return the median ratio of two sides' seconds and its spread, computed round by round."""
    values = [slower / other for slower, other in zip(slow, fast, strict=True)]
    return {name: median(values), "ratio_min": min(values), "ratio_max": max(values)}


def line_of(point: Mapping[str, Any]) -> str:
    """Return a point's numbers and words as one line, for the progress."""
    shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in point.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items() if not isinstance(value, dict | list | tuple))


def require_words(only: Iterable[str], words: Sequence[str]) -> None:
    """Raise ConfigError for a word that chooses no part of a benchmark."""
    for word in only:
        if word not in words:
            request = f"Only '{word}' of the benchmark was asked for."
            raise ConfigError(request, f"There are {', '.join(words)}.", did_you_mean(word, words))


def jobs_of(name: str) -> dict[str, Job]:
    """Return the jobs of a benchmark in bench.toml."""
    text = read_toml(JOBS)[name]
    return {side: Job(**text["shared"] | job) for side, job in text["jobs"].items()}


def require_kernel_links(engines: EngineCluster, name: str) -> None:
    """Raise RuntimeSetupError if the kernel does not shape the links of emulated devices."""
    if engines.fidelity != "kernel":
        raise RuntimeSetupError(
            f"The {name} benchmark was asked for.",
            f"Links have {engines.fidelity} fidelity here: {engines.fidelity_reason}.",
            "Run it as root on Linux, or where user namespaces are allowed (see `workbench doctor`).",
        )


def peak_bytes(load: Callable[[], T], run: Callable[[T], object]) -> int:
    """Return this process's peak resident bytes while `run` works on what `load` returned, above its memory now.

    The peak of loading itself does not count.  Raises ConfigError if the system cannot reset a peak.
    """
    gc.collect()
    own_bytes = read_memory().rss_bytes
    loaded = load()
    gc.collect()
    if not reset_peak():
        problem = "This system does not reset a process's high-water mark."
        raise ConfigError("A peak was to be measured.", problem, "Run it on Linux.")
    run(loaded)
    return read_memory().peak_rss_bytes - own_bytes
