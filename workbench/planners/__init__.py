"""Planners make a Plan from a Problem: PAC+'s Algorithm 1, fixed plans and the baselines' planners."""

from workbench.planners.cached import cached_step_s, plan_cached
from workbench.planners.fixed import data_parallel, fixed_plan, pipeline_parallel, standalone
from workbench.planners.hetpipe import hetpipe
from workbench.planners.order_study import OrderStudy, order_study
from workbench.planners.pac_plus import candidates, plan
from workbench.planners.problem import Problem
from workbench.planners.refine import refine
from workbench.planners.systems import PARADIGMS, asteroid, homogeneous
