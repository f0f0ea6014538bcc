"""`workbench bench planning`: processor seconds of a first profile of this machine, and of planning for many devices.

A plan has a bound next to it: a planner that simulates what it chooses has to do that once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

from workbench.core.catalogue import MB, load_cluster, load_device
from workbench.core.cluster import MEGABIT_BYTES, Cluster, Link
from workbench.core.job import Job
from workbench.core.once import shared_results
from workbench.core.profile import Profile
from workbench.methods import load_method
from workbench.methods.base import Method, Planned, ignore
from workbench.methods.step_parts import typical_step_s
from workbench.methods.sustained import plan_over_run
from workbench_studies.bench.frame import Figures, Progress, line_of

JOBS: dict[str, Job] = {
    "PAC+": Job(method="pac_plus"),
    "LoRA": Job(method="fine_tuning", options={"technique": "lora"}),
    "full fine-tuning": Job(method="fine_tuning", options={"technique": "full"}),
    "RingAda": Job(method="ringada"),
}
BOARDS = ("rpi-5", "rpi-4b-l", "orange-pi-5", "jetson-nano-h", "jetson-tx2-h")
MEMORY_MB, MBIT_PER_S, LATENCY_MS = (400, 800, 1600, 3200), (100, 300, 1000), (0.1, 1.0, 3.0)
"""The values from which a board's memory, the rate of its link and its latency to the switch are drawn."""
NUM_DEVICES, ROUNDS = 64, 3


def bench(
    progress: Progress = print,
    *,
    jobs: dict[str, Job] = JOBS,
    num_devices: int = NUM_DEVICES,
    rounds: int = ROUNDS,
) -> Figures:
    """Return the processor seconds of each job's profile and plan, and the plan's bound, without libraries, data and
    tokens.
    """
    points, cluster = list[Figures](), drawn_cluster(num_devices)
    for name, job in jobs.items():
        points.append({"job": name} | _point(job, cluster, rounds))
        progress(line_of(points[-1]))
    return {
        "label": "processor seconds of this machine",
        "what": f"a profile, measured again; a plan for {num_devices} boards drawn at random, median of {rounds}",
        "model": next(iter(jobs.values())).model,
        "points": points,
    }


def _point(job: Job, cluster: Cluster, rounds: int) -> Figures:
    method, laptop = load_method(job.method), load_cluster("laptop")
    prepared = method.prepare(job, ignore)
    method.profile(prepared, laptop, ignore, emulated=True)  # imports the libraries
    profile_s, _ = _timed(lambda: method.profile(prepared, laptop, ignore, emulated=True, refresh=True))
    costs = method.profile(prepared, cluster, ignore, emulated=False)
    plans = [_timed(lambda: _planned(method, prepared, costs, cluster)) for _ in range(rounds)]
    planned = plans[0][1]
    return {
        "profile_s": profile_s,
        "plan_s": median(plan_s for plan_s, _ in plans),
        "plan_bound_s": _timed(lambda: typical_step_s(method, planned))[0],
    }


def drawn_cluster(num_devices: int, seed: int = 0) -> Cluster:
    """Return boards of the catalogue, with memory and links drawn at random; the same for the same seed."""
    draw, devices = random.Random(seed), []
    for number in range(num_devices):
        link = Link(bytes_per_s=MEGABIT_BYTES * draw.choice(MBIT_PER_S), latency_s=draw.choice(LATENCY_MS) / 1e3)
        board = load_device(draw.choice(BOARDS), name=f"board-{number}")
        devices.append(replace(board, link=link, memory_bytes=MB * draw.choice(MEMORY_MB)))
    return Cluster(name=f"drawn-{num_devices}", devices=tuple(devices))


def _planned(method: Method, prepared: Any, costs: Profile, cluster: Cluster) -> Planned[Any]:
    with shared_results():
        return Planned(prepared, costs, cluster, plan_over_run(method, prepared, costs, cluster))


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the processor seconds of a call, and what it returns."""
    began_s = time.process_time()
    result = call()
    return time.process_time() - began_s, result
