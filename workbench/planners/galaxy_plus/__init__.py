"""Plan single-shot inference: Galaxy+'s planning (section III-C), its exact optimum, and its baselines' planners (section IV-A)."""

from workbench.planners.galaxy_plus.baselines import (
    INFERENCE_SYSTEMS,
    InferencePlanner,
    edgeshard,
    galaxy,
    local,
    megatron_lm,
    sequence_parallel,
)
from workbench.planners.galaxy_plus.memory import HELD, PAPER, MemoryRule, SequenceProblem
from workbench.planners.galaxy_plus.planner import algorithm_1, plan, plans
from workbench.planners.galaxy_plus.pricing import (
    all_gather_s,
    capacity,
    con_s,
    hop_lines,
    mha_s,
    mlp_sequence_s,
    mlp_tensor_s,
    price_plan,
    stack_lengths,
)
from workbench.planners.galaxy_plus.programme import oracle
