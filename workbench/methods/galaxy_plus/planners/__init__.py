"""Plan single-shot inference: Galaxy+'s planning (section III-C), its exact optimum, and its baselines' planners
(section IV-A).
"""

from workbench.methods.galaxy_plus.planners.baselines import (
    INFERENCE_SYSTEMS,
    InferencePlanner,
    edgeshard,
    galaxy,
    local,
    megatron_lm,
    sequence_parallel,
)
from workbench.methods.galaxy_plus.planners.memory import check, needs
from workbench.methods.galaxy_plus.planners.planner import algorithm_1, plan, plans
from workbench.methods.galaxy_plus.planners.programme import oracle
from workbench.methods.galaxy_plus.planners.terms import (
    LayerTimes,
    all_gather_s,
    capacity,
    hop_lines,
    lengths_of,
    stack_lengths,
)
