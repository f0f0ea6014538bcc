"""The schedule of one sequence, or of one more token, by a plan's paradigm."""

from __future__ import annotations

from workbench.core.schedule import Schedule
from workbench.schedules.inference.baselines import pipeline_inference, sequence_inference, tensor_inference
from workbench.schedules.inference.hybrid import hybrid_inference
from workbench.schedules.inference.layout import InferenceLayout

BUILDERS = {
    "hybrid": hybrid_inference,
    "tensor": tensor_inference,
    "sequence": sequence_inference,
    "pipeline": pipeline_inference,
}


def inference_schedule(layout: InferenceLayout, world_size: int | None = None) -> Schedule:
    """Return the schedule of one sequence by the plan's paradigm, complete with its transfers.

    world_size: of the cluster; ranks that the plan does not use have no operations.
    """
    return BUILDERS[layout.plan.paradigm](layout, world_size)


def decode_schedule(layout: InferenceLayout, world_size: int | None = None) -> Schedule:
    """Return the schedule of one more token (a layout of InferenceLayout.decode): scheme 1 in every layer, or the pipeline."""
    return (pipeline_inference if layout.plan.paradigm == "pipeline" else tensor_inference)(layout, world_size)
