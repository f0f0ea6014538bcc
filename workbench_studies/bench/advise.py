"""`workbench bench advise`: is the adviser's first choice the best one?  Settings drawn at random, executed.

A setting has 2 to 6 emulated devices with speeds, memory and links drawn by its number.  The adviser's first six
combinations and four drawn from the rest train 20 steps each.  The first choice is compared with the fastest of those
executed, and each prediction with its measurement.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Cluster, Link
from workbench.core.errors import WorkbenchError
from workbench.core.job import Job
from workbench.core.run_folder import scratch_folder
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
BATCHES = ((16, 2), (16, 4), (32, 4))


def setting(number: int) -> tuple[Job, Cluster]:
    """Return the job and the devices of a setting; the same for the same number."""
    draw = random.Random(number)
    link = Link(bytes_per_s=draw.choice(MEGABITS_PER_S) * 125_000, latency_s=draw.choice(LATENCIES_S))
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
    rest = list(choices[first:])
    return [*choices[:first], *random.Random(number).sample(rest, min(drawn, len(rest)))]


def bench(progress: Progress, *, only: Sequence[str] = ()) -> dict[str, Any]:
    """Return each setting's first choice over the best executed, and the predictions' deviations.

    only: the numbers of the settings.
    """
    require_words(only, WORDS)
    points: list[dict[str, Any]] = []
    settings: list[dict[str, Any]] = []
    for number in map(int, only or WORDS[: 1 if tiny() else None]):
        job, cluster = setting(number)
        advice = advise(job, cluster)
        own = [_executed(choice, cluster, number, progress) for choice in chosen(advice.choices, number)]
        ran = [point for point in own if point["measured_s"] is not None]
        points += own
        if ran and ran[0] is own[0]:
            settings.append(
                {
                    "setting": number,
                    "devices": cluster.world_size,
                    "executed": len(ran),
                    "first": own[0]["what"],
                    "first_over_best": ran[0]["measured_s"] / min(point["measured_s"] for point in ran),
                    "valid": all(point["valid"] for point in ran),
                }
            )
            progress(f"advise, setting {number}: the first takes {settings[-1]['first_over_best']:.3f} of the best")
    return {"name": "advise", "fidelity": "emulated"} | summed_up(settings, points) | {"where": environment()}


def summed_up(settings: Sequence[dict[str, Any]], points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures over all settings, and the tables."""
    ran = [point for point in points if point["measured_s"] is not None]
    deviations = [abs(point["measured_s"] / point["predicted_s"] - 1) for point in ran]
    return {
        "settings_executed": len(settings),
        "first_within_5_percent": sum(setting["first_over_best"] <= 1.05 for setting in settings),
        "worst_first_over_best": max((setting["first_over_best"] for setting in settings), default=None),
        "median_deviation": median(deviations) if deviations else None,
        "settings": list(settings),
        "combinations": list(points),
    }


def _executed(choice: Choice, cluster: Cluster, number: int, progress: Progress) -> dict[str, Any]:
    point: dict[str, Any] = {
        "setting": number,
        "what": choice.name,
        "predicted_s": sum(step.predicted_s or 0.0 for step in choice.report.steps),
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
        point["measured_s"] = sum(step.measured_s or 0.0 for step in report.steps)
        point["valid"] = report.valid
    progress(f"advise, setting {number}, {choice.name}: {point['predicted_s']:.3g} s, executed {point['measured_s']}")
    return point
