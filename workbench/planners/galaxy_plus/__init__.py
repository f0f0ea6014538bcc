"""Where one sequence is computed: Galaxy+'s planning (section III-C), its exact optimum, and its baselines' planners (section IV-A)."""

from workbench.planners.galaxy_plus.algorithm_1 import algorithm_1
from workbench.planners.galaxy_plus.baselines import InferencePlanner, edgeshard, galaxy, local, megatron_lm, sequence_parallel
from workbench.planners.galaxy_plus.memory import HELD, PAPER, InferenceNeed, MemoryRule, check_inference, inference_needs
from workbench.planners.galaxy_plus.planner import plan
from workbench.planners.galaxy_plus.pricing import InferencePrice, price_plan
from workbench.planners.galaxy_plus.programme import Optimum, oracle
from workbench.planners.galaxy_plus.systems import INFERENCE_SYSTEMS, InferenceSystem, replan, slowed
from workbench.planners.galaxy_plus.times import (
    all_gather_s,
    capacity,
    con_s,
    mha_s,
    mlp_sequence_s,
    mlp_tensor_s,
    reduce_scatter_s,
    stack_lengths,
)

__all__ = [
    "HELD",
    "INFERENCE_SYSTEMS",
    "PAPER",
    "InferenceNeed",
    "InferencePlanner",
    "InferencePrice",
    "InferenceSystem",
    "MemoryRule",
    "Optimum",
    "algorithm_1",
    "all_gather_s",
    "capacity",
    "check_inference",
    "con_s",
    "edgeshard",
    "galaxy",
    "inference_needs",
    "local",
    "megatron_lm",
    "mha_s",
    "mlp_sequence_s",
    "mlp_tensor_s",
    "oracle",
    "plan",
    "price_plan",
    "reduce_scatter_s",
    "replan",
    "sequence_parallel",
    "slowed",
    "stack_lengths",
]
