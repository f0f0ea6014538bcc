"""Checks for the notebooks' exercises: each looks at an answer and says what is right, or what to look at again."""

from workbench.widgets.exercises.algorithm import (
    check_backward_share,
    check_cache_bytes,
    check_down_projection,
    check_quantization_step,
    check_quantized_bytes,
    check_side_layer_width,
    check_trainable_share,
)
from workbench.widgets.exercises.devices import check_cluster, check_share, check_transfer
from workbench.widgets.exercises.inference import (
    break_even,
    check_break_even,
    check_faster_inference,
    check_most_scheme_2,
    check_ring_time,
    check_travelling_bytes,
)
from workbench.widgets.exercises.pipeline import (
    check_bubble,
    check_faster_split,
    check_grouping,
    check_live_contexts,
    check_memory_floor,
    check_pipeline_time,
)
from workbench.widgets.exercises.runs import check_faster_plan, check_half_time, check_idlest, check_speedup
from workbench.widgets.exercises.verdict import BY_EYE, Verdict
from workbench.widgets.exercises.zeroth_order import (
    check_division,
    check_epsilon,
    check_forward_passes,
    check_knee,
    check_projected_gradient,
    check_queries_for_error,
    check_travelling,
)

__all__ = [
    "BY_EYE",
    "Verdict",
    "break_even",
    "check_backward_share",
    "check_break_even",
    "check_bubble",
    "check_cache_bytes",
    "check_cluster",
    "check_division",
    "check_down_projection",
    "check_epsilon",
    "check_faster_inference",
    "check_faster_plan",
    "check_faster_split",
    "check_forward_passes",
    "check_grouping",
    "check_half_time",
    "check_idlest",
    "check_knee",
    "check_live_contexts",
    "check_memory_floor",
    "check_most_scheme_2",
    "check_pipeline_time",
    "check_projected_gradient",
    "check_quantization_step",
    "check_quantized_bytes",
    "check_queries_for_error",
    "check_ring_time",
    "check_share",
    "check_side_layer_width",
    "check_speedup",
    "check_trainable_share",
    "check_transfer",
    "check_travelling",
    "check_travelling_bytes",
]
