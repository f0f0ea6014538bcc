"""The settings that RingAda's table and figure share."""

from __future__ import annotations

from itertools import accumulate

from workbench.methods.ringada.published import Constants, depth_of, layer_times

PAPER = "ringada"


def seconds_after(constants: Constants, scheme: str) -> tuple[float, ...]:
    """Return the time after each epoch, which is assumed to be one mini-batch."""
    times, _ = layer_times(constants, scheme, constants.micro_batches)
    steps = range(round(constants.epochs))
    return tuple(accumulate(constants.layer_s * times[depth_of(constants, scheme, step)] for step in steps))
