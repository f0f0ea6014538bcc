"""Plan single-shot inference: Galaxy+'s planning (section III-C), its exact optimum, and its baselines' planners (section IV-A)."""

from workbench.planners.galaxy_plus.algorithm_1 import algorithm_1
from workbench.planners.galaxy_plus.baselines import (
    INFERENCE_SYSTEMS,
    InferencePlanner,
    edgeshard,
    galaxy,
    local,
    megatron_lm,
    replan,
    sequence_parallel,
)
from workbench.planners.galaxy_plus.memory import HELD, PAPER, MemoryRule, SequenceProblem
from workbench.planners.galaxy_plus.planner import plan
from workbench.planners.galaxy_plus.pricing import price_plan
from workbench.planners.galaxy_plus.programme import oracle
from workbench.planners.galaxy_plus.times import (
    all_gather_s,
    capacity,
    con_s,
    mha_s,
    mlp_sequence_s,
    mlp_tensor_s,
    stack_lengths,
)
