"""Profile and cluster in, plan out: PAC+'s Algorithm 1, fixed plans, the baselines' planners and exhaustive oracles."""

from workbench.planners.cached import cached_step_s, plan_cached
from workbench.planners.fixed import data_parallel, fixed_plan, pipeline_parallel, standalone
from workbench.planners.pac_plus import candidates, plan

__all__ = [
    "cached_step_s",
    "candidates",
    "data_parallel",
    "fixed_plan",
    "pipeline_parallel",
    "plan",
    "plan_cached",
    "standalone",
]
