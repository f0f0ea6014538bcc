"""Simulate, and on engines measure, the same steps of the first epoch under several plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.report import SweepPoint
from workbench.methods.base import Engines
from workbench.methods.common.folder import begin_folder
from workbench.methods.common.records import measured_steps, records_of
from workbench.methods.pac_plus import launch
from workbench.methods.pac_plus.initial import initial_adapter
from workbench.methods.pac_plus.predict import Predictor
from workbench.methods.pac_plus.prepare import PreparedJob, check_shape
from workbench.methods.pac_plus.sweep import RankSweep, run_sweep, sweep_steps
from workbench.models.loading import load_stack


def sweep_plans(
    prepared: PreparedJob,
    profile: Profile,
    cluster: Cluster,
    plans: Mapping[str, Plan],
    engines: Engines | None,
    *,
    num_steps: int,
    folder: Path,
) -> tuple[SweepPoint, ...]:
    """Return a point for each plan (see Method.sweep)."""
    for plan in plans.values():
        check_shape(prepared, cluster, plan)
    steps = sweep_steps(prepared, num_steps)
    points = []
    if engines is not None:
        stack = load_stack(prepared.job.model)
        begin_folder(folder, "sweep", prepared.job)
        launch.save_initial(initial_adapter(prepared, stack), folder)
    for name, plan in plans.items():
        predictor = Predictor(prepared.programs(profile, cluster, plan))
        predicted = [predictor.hybrid_s(step) for step in steps]
        point = SweepPoint(name=name, plan=plan, predicted_s=median(predicted), num_steps=num_steps)
        if engines is not None:
            message = launch.rank_job(prepared, cluster, plan, profile, folder=folder, identity="sweep", start_epoch=0)
            results = engines.run(run_sweep, [RankSweep(rank_job=message, steps=steps)] * cluster.world_size)
            records = measured_steps(results, records_of(steps, predicted))
            paced = sum(result.paced_s for result in results)
            point = replace(
                point,
                measured_s=median(record.measured_s or 0.0 for record in records),
                overrun_share=sum(result.late_s for result in results) / paced if paced else 0.0,
            )
        points.append(point)
    return tuple(points)
