"""Planners make a Plan from a Problem: PAC+'s Algorithm 1, fixed plans and the baselines' planners."""

from workbench.planners.fixed import (
    PARADIGMS,
    asteroid,
    data_parallel,
    fixed_plan,
    homogeneous,
    pipeline_parallel,
    standalone,
)
from workbench.planners.hybrid import candidates, plan, plan_cached
from workbench.planners.problem import Problem, TrainingProblem
from workbench.planners.refine import refine, refine_on_any_count
