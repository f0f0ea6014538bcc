"""Choose setting and plan for the devices: who takes how many queries, or which layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.methods.p_rge.prepare import PreparedJob
from workbench.planners.adaptive import Precision, Price, Setting, candidates, choose
from workbench.planners.queries import plan_queries
from workbench.planners.query_costs import RankCosts

ProfileOf = Callable[[Precision], Profile]
"""What every layer costs on every device, with frozen weights of a precision."""


TOLERATED = 1.5
"""With `adapt` alone, how many times as long as at first a step may take before its setting is changed."""


def fitted_setting(
    prepared: PreparedJob, cluster: Cluster, profile_of: ProfileOf, asked: Setting, *, step_s: float | None = None
) -> Setting:
    """Return the asked setting, or the most wanted that fits in the devices' memory and in the seconds that a step may take.

    step_s: those seconds, if the job says nothing of them.  Raises PlanError if none fits.
    """
    allowed = prepared.options.allowed

    def price(setting: Setting) -> Price:
        profile = profile_of(setting.precision)
        try:
            return Price(plan_queries(profile, cluster, prepared.size(setting)).total_s)
        except PlanError:
            size = prepared.size(setting)
            missing = min(
                RankCosts(profile=profile, cluster=cluster, size=size, rank=rank, start=0, stop=profile.num_layers).need_bytes(1)
                - device.memory_bytes
                for rank, device in enumerate(cluster.devices)
            )
            return Price(math.inf, max(0, missing))

    if not adapts(prepared):
        return asked
    return choose(
        candidates(asked, precisions=allowed), price, step_s=step_s if prepared.options.step_s is None else prepared.options.step_s
    )


def adapts(prepared: PreparedJob) -> bool:
    """Return whether the run may use other settings than those that were asked for."""
    options = prepared.options
    return options.adapt or options.step_s is not None or bool(options.precisions)


def plan_job(prepared: PreparedJob, profile: Profile, cluster: Cluster, setting: Setting) -> Plan:
    """Return the plan of a setting.  Raises PlanError, naming device and bytes, if nothing fits."""
    return plan_queries(profile, cluster, prepared.size(setting))


_BYTES_PER_WEIGHT = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0625, "nf4": 0.5625}
"""Of quantized weights with the constants of their blocks of 64."""


def in_precision(profile: Profile, asked: Precision, precision: Precision) -> Profile:
    """Return a profile with its frozen weights in another precision: their bytes change, and what was not measured stays as it was."""
    ratio = _BYTES_PER_WEIGHT[precision] / _BYTES_PER_WEIGHT[asked]
    rows = tuple(tuple(replace(layer, frozen_bytes=round(ratio * layer.frozen_bytes)) for layer in row) for row in profile.layers)
    return replace(profile, layers=rows)
