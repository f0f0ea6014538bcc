"""Plan a run on devices that get hot: which plan is best over the whole run, not at its first step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.heat import speed_at
from workbench.core.methods import declaration_of
from workbench.core.once import once_for
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.serial import to_json
from workbench.core.units import three_figures
from workbench.methods.base import Method, Planned, Prediction

GET_HOT = "Devices get hot"
"""What a plan's note about heat begins with."""


def plan_over_run(method: Method, prepared: Any, costs: Profile, cluster: Cluster) -> Plan:
    """Return the method's plan for cold devices, or the one for hot devices if the whole run is simulated to be shorter
    with it.

    Hot devices have the speed to which they fall if they compute all the time for as long as the run takes.
    """
    cold = method.plan(prepared, costs, cluster)
    if not any(device.sustained for device in cluster.devices):
        return cold
    steady = cluster.with_devices(sustained=())
    cold_s, never_hot_s = (_run_s(method, Planned(prepared, costs, variant, cold)) for variant in (cluster, steady))
    speeds = [speed_at(device.sustained, cold_s) for device in cluster.devices]
    hot = cold
    if min(speeds) < 1:
        slower = {rank: 1 / speed for rank, speed in enumerate(speeds) if speed < 1}
        hot = method.plan(prepared, costs.part(range(cluster.world_size), slower), cluster)
    is_same = _work(hot) == _work(cold)
    hot_s = cold_s if is_same else _run_s(method, Planned(prepared, costs, cluster, hot))
    chosen, taken_s = (hot, hot_s) if hot_s < cold_s else (cold, cold_s)
    if taken_s <= never_hot_s:
        return chosen
    steps = "steps" if declaration_of(prepared.job.method).trains else "requests"
    words = f"{GET_HOT}: the run's {steps} take {three_figures(taken_s)} s, and would take "
    words += f"{three_figures(never_hot_s)} s on cold ones"
    if chosen is hot:
        words += "; the plan is for hot devices, because with the one for cold ones they take "
        words += f"{three_figures(cold_s)} s"
    return replace(chosen, notes=(*chosen.notes, f"{words} (simulated)."))


def _work(plan: Plan) -> object:
    """Return the parts of a plan that say what devices do."""
    split = plan.inference and replace(plan.inference, predicted_s=0.0, notes=())
    return plan.assignments, plan.cached, split


def predicted(method: Method, planned: Planned[Any]) -> Prediction:
    """Return the prediction of a plan, which planning for devices that get hot has already made (see core.once)."""

    def key() -> tuple[object, ...]:
        plan_text = to_json(replace(planned.plan, notes=()), indent=0)
        return "prediction", planned.prepared, planned.profile, planned.cluster, plan_text

    return once_for(key, lambda: method.predict(planned))


def _run_s(method: Method, planned: Planned[Any]) -> float:
    return sum(step.predicted_s or 0.0 for step in predicted(method, planned).steps)
