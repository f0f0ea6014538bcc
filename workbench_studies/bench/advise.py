"""`workbench bench advise`: is the adviser's first choice the best one?  Settings drawn at random, executed.

A setting has 2 to 6 emulated devices with speeds, memory and links drawn by its number.  The adviser's first six
combinations and four drawn from the rest train 20 steps each.  The first choice is compared with the fastest of those
executed, and each prediction with its measurement.

data/advise.json has what was executed so far, written after each combination.  The next call goes on where one was
interrupted, and repeats what a busy host spoilt.  docs/advise.md is made from it.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from workbench.core.catalogue import data_folder, load_cluster
from workbench.core.cluster import MEGABIT_BYTES, Cluster, Link
from workbench.core.errors import WorkbenchError
from workbench.core.job import Job
from workbench.core.run_folder import scratch_folder
from workbench.core.serial import write_json
from workbench.experiment import environment, run
from workbench.profiler.timing import tiny
from workbench.runs.advice import Choice, advise
from workbench_studies.bench.frame import Progress, require_words

WORDS = tuple(map(str, range(20)))
"""The numbers of the settings."""
FIRST, DRAWN, STEPS = 6, 4, 20
SHARES = (0.05, 0.1, 0.2, 0.3)
MEGABITS_PER_S = (20, 100, 1000)
LATENCIES_S = (2e-4, 2e-3, 1e-2)
MEMORIES_BYTES = (250_000_000, 400_000_000, 800_000_000)
BATCHES = ((8, 2), (8, 4), (16, 4))


def setting(number: int) -> tuple[Job, Cluster]:
    """Return the job and the devices of a setting; the same for the same number."""
    draw = random.Random(number)
    link = Link(bytes_per_s=draw.choice(MEGABITS_PER_S) * MEGABIT_BYTES, latency_s=draw.choice(LATENCIES_S))
    [device, *_] = load_cluster("laptop").devices
    devices = []
    for index in range(draw.randint(2, 6)):
        share, memory_bytes = draw.choice(SHARES), draw.choice(MEMORIES_BYTES)
        flops_per_s = device.flops_per_s * share / (device.host_share or 1.0)
        changed = {"host_share": share, "memory_bytes": memory_bytes, "flops_per_s": flops_per_s, "link": link}
        devices.append(replace(device, name=f"device{index}", **changed))  # type: ignore[arg-type]
    batch_size, micro_batches = draw.choice(BATCHES)
    steps = 4 if tiny() else STEPS
    job = Job(
        model="tiny-bert" if tiny() else "all-MiniLM-L6-v2",
        epochs=1,
        batch_size=batch_size,
        micro_batches=micro_batches,
        train_samples=steps * batch_size,
        validation_samples=16,
        test_samples=16,
    )
    return job, Cluster(name=f"setting {number}", devices=tuple(devices))


def chosen(choices: Sequence[Choice], number: int) -> list[Choice]:
    """Return the first combinations and some drawn from the rest."""
    first, drawn = (2, 1) if tiny() else (FIRST, DRAWN)
    others = list(choices[first:])
    return [*choices[:first], *random.Random(number).sample(others, min(drawn, len(others)))]


Points = list[dict[str, Any]]


def shipped() -> Path:
    """Return the file of what was executed."""
    return data_folder() / "advise.json"


def bench(
    progress: Progress, *, only: Sequence[str] = (), minutes: float = 0, path: Path | None = None
) -> dict[str, Any]:
    """Return each setting's first choice over the best executed, and the predictions' deviations.

    only: the numbers of the settings.  minutes: begin no further combination after so many; 0: do all.  path: the file
    that is read, and written after each combination; by default the shipped one, and at the smallest settings none.
    """
    require_words(only, WORDS)
    path = path or (None if tiny() else shipped())
    chosen_names, points = _stored(path)
    until_s = time.monotonic() + 60 * (minutes or float("inf"))
    for number in map(int, only or WORDS[: 1 if tiny() else None]):
        if _is_done(chosen_names.get(f"{number}"), number, points):
            continue
        job, cluster = setting(number)
        ranking = chosen(advise(job, cluster).choices, number)
        # A ranking by newer costs may have other combinations.
        points = [
            point for point in points if point["setting"] != number or point["what"] in {each.name for each in ranking}
        ]
        chosen_names[f"{number}"] = [choice.name for choice in ranking]
        for place, choice in enumerate(ranking):
            if time.monotonic() >= until_s:
                progress(f"advise: {minutes:g} minutes are over; the same command goes on.")
                return _result(chosen_names, points)
            if _is_done([choice.name], number, points):
                continue
            points = [point for point in points if (point["setting"], point["what"]) != (number, choice.name)]
            points.append(_executed(choice, cluster, number, place == 0, progress))
            if path is not None:
                write_json(path, _result(chosen_names, points))
    return _result(chosen_names, points)


def _stored(path: Path | None) -> tuple[dict[str, list[str]], Points]:
    """Return the names of each setting's chosen combinations, and the points, of a file that need not exist."""
    if path is None or not path.is_file():
        return {}, []
    stored = json.loads(path.read_text(encoding="utf-8"))
    return stored["chosen"], stored["combinations"]


def _is_done(names: Sequence[str] | None, number: int, points: Points) -> bool:
    """Return whether these combinations of a setting have run on a host that kept pace, or cannot run."""
    done = {point["what"] for point in points if point["setting"] == number and (point["valid"] or point["why_not"])}
    return names is not None and done.issuperset(names)


def _result(chosen_names: dict[str, list[str]], points: Points) -> dict[str, Any]:
    figures = summed_up(points)
    return {"label": "emulated"} | figures | {"chosen": chosen_names, "where": environment()}


def summed_up(points: Points) -> dict[str, Any]:
    """Return the figures over all settings whose first choice was executed, and the tables."""
    settings = []
    for number in sorted({point["setting"] for point in points}):
        ran = [point for point in points if point["setting"] == number and point["measured_s"] is not None]
        first = next((point for point in ran if point["is_first"]), None)
        if first is not None:
            settings.append(
                {
                    "setting": number,
                    "devices": setting(number)[1].world_size,
                    "executed": len(ran),
                    "first": first["what"],
                    "first_over_best": first["measured_s"] / min(point["measured_s"] for point in ran),
                    "deviation": median(map(_deviation, ran)),
                    "valid": all(point["valid"] for point in ran),
                }
            )
    deviations = [_deviation(point) for point in points if point["measured_s"] is not None]
    return {
        "settings_executed": len(settings),
        "first_within_5_percent": sum(setting["first_over_best"] <= 1.05 for setting in settings),
        "worst_first_over_best": max((setting["first_over_best"] for setting in settings), default=None),
        "median_deviation": median(deviations) if deviations else None,
        "settings": settings,
        "combinations": points,
    }


def _deviation(point: dict[str, Any]) -> float:
    return float(abs(point["measured_s"] / point["predicted_s"] - 1))


def _executed(choice: Choice, cluster: Cluster, number: int, is_first: bool, progress: Progress) -> dict[str, Any]:
    point: dict[str, Any] = {
        "setting": number,
        "what": choice.name,
        "is_first": is_first,
        "predicted_s": choice.report.predicted_s,
        "measured_s": None,
        "valid": False,
        "why_not": "",
    }
    try:
        with scratch_folder() as folder:
            report = run(choice.job, cluster, workdir=folder / "run")
    except WorkbenchError as error:
        point["why_not"] = error.found
    else:
        point["measured_s"] = report.measured_s
        point["valid"] = report.valid
    progress(f"advise, setting {number}, {choice.name}: {point['predicted_s']:.3g} s, executed {point['measured_s']}")
    return point
