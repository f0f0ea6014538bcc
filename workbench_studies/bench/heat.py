"""`workbench bench heat`: a device that gets hot stays and is slow, or leaves; simulated and emulated.

Of some equal devices, one falls to a fraction of its speed after a quarter of the run.  It stays, with the plan that
is best over the run and another one if that pays, or it leaves as soon as it is slower (leave_if_throttled).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Cluster
from workbench.core.heat import Level
from workbench.core.job import Mode
from workbench.core.report import Report
from workbench.core.run_folder import scratch_folder
from workbench.experiment import run
from workbench.runtime.engines import default_pool
from workbench_studies.bench.frame import Figures, Progress, jobs_of, line_of, require_words

CLUSTER, HOT, SHARE, BEGINS = "laptop-equal", 1, 0.03, 0.25
"""HOT: the rank of the device that gets hot.  SHARE: of a core, which each device has.  BEGINS: the part of the cold
run after which the hot device is slow."""
DEVICES, SPEEDS = (2, 4), (0.8, 0.5, 0.2)
WORDS = (*map(str, DEVICES), *map(str, SPEEDS))


def bench(progress: Progress = print, *, only: Sequence[str] = ()) -> Figures:
    """Return the seconds of the run of each method if the hot device stays and if it leaves, over those of devices that
    stay cold.

    only: numbers of devices, and speeds when hot; none is all.  Raises ConfigError for another word.
    """
    require_words(only, WORDS)
    counts = [count for count in DEVICES if str(count) in only] or DEVICES
    speeds = [speed for speed in SPEEDS if str(speed) in only] or SPEEDS
    points = []
    for name in jobs_of("heat"):
        for count in counts:
            cold = load_cluster(CLUSTER).emulated(SHARE).part(range(count))
            cold_s = {mode: _seconds(run_of(name, cold, mode)) for mode in ("simulate", "execute")}
            for speed in speeds:
                point: Figures = {"method": name, "devices": count, "speed when hot": speed}
                for side in ("stays", "leaves"):
                    cluster = with_hot(cold, speed, BEGINS * cold_s["simulate"], leaves=side == "leaves")
                    for mode, word in (("simulate", "simulated"), ("execute", "emulated")):
                        report = run_of(name, cluster, mode)  # type: ignore[arg-type]
                        point[f"{side}, {word}"] = _seconds(report) / cold_s[mode]
                        point["valid"] = point.get("valid", True) and report.valid
                points.append(point)
                progress(line_of(point))
    default_pool().stop()
    return {
        "label": "simulated and emulated",
        "what": f"seconds of a run over those of cold devices; one device is slower after {BEGINS:.0%} of the cold run",
        "points": points,
    }


def run_of(name: str, cluster: Cluster, mode: Mode) -> Report:
    """Return the report of a job of the benchmark."""
    with scratch_folder() as folder:
        return run(jobs_of("heat")[name], cluster, mode, workdir=folder / "run", fidelity="paced")


def with_hot(cluster: Cluster, speed: float, after_s: float, *, leaves: bool) -> Cluster:
    """Return the cluster with one device that falls to a speed after so many seconds of computing."""
    curve = (Level(heat_s=0.0, speed=1.0), Level(heat_s=after_s, speed=speed))
    devices = list(cluster.devices)
    devices[HOT] = replace(devices[HOT], sustained=curve, leave_if_throttled=leaves)
    return replace(cluster, devices=tuple(devices))


def _seconds(report: Report) -> float:
    """Return the seconds of all steps, and those in which the devices stood still between two plans."""
    steps_s = sum(step.seconds or 0.0 for step in report.steps)
    return steps_s + sum(max(0.0, recovery.stood_still_s) for recovery in report.recoveries)
