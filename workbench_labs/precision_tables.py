"""Tables of the costs and gains of PAC+'s choices (see precision)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from workbench.widgets.tables import Table
from workbench_labs.course.verdict import is_right
from workbench_labs.exercises.side_layers import EXERCISES
from workbench_labs.precision import TechniqueCost, block_errors, errors_of


def techniques_table(costs: Sequence[TechniqueCost]) -> Table:
    """Return what a step of each technique costs."""
    rows = [
        (
            cost.label,
            f"{cost.trained:,}",
            f"{cost.forward_s * 1e3:.0f}",
            f"{cost.backward_s * 1e3:.0f}",
            f"{cost.saved_bytes / 1e6:.1f}",
        )
        for cost in costs
    ]
    return Table(
        ("technique", "weights trained", "forward, ms", "backward, ms", "kept for backward, MB"),
        rows,
        title="One training step, by technique (measured in this process, at full speed)",
    )


OUTLIER = 20
"""An outlier is so many times as large as the largest other weight."""


def outlier_table(weights: Sequence[float]) -> Table:
    """Return the usual error of a block's weights, and with an outlier as the first weight."""
    block = torch.tensor(weights)
    spoilt = block.clone()
    spoilt[0] = OUTLIER * block.abs().max()
    plain, with_outlier = (block_errors(weights, block_size=len(block)) for weights in (block, spoilt))
    rows = [
        (
            storage,
            f"{plain[storage][0]:.2e}",
            f"{with_outlier[storage][0]:.2e}",
            f"{with_outlier[storage][0] / plain[storage][0]:.0f}",
        )
        for storage in plain
    ]
    return Table(
        ("type", "usual error", "usual error with the outlier", "times"),
        rows,
        title="One outlier coarsens the steps of its whole block, and of no other",
    )


def your_block_table(block: Sequence[float], quantize: Callable[..., Any], dequantize: Callable[..., Any]) -> Table:
    """Return the errors of a block in INT8 by a student's functions, once both are right, next to the workbench's."""
    errors = {"the workbench's": block_errors(torch.tensor(block), block_size=len(block))["int8"]}
    if is_right(EXERCISES, "quantize", quantize) and is_right(EXERCISES, "dequantize", dequantize):
        restored = torch.tensor(dequantize(*quantize(list(block), len(block)), len(block)))
        errors = {"yours": errors_of(restored - torch.tensor(block))} | errors
    largest = max(map(abs, block))
    rows = [(name, f"{usual:.2e}", f"{most:.2e}", f"{largest / 254:.2e}") for name, (usual, most) in errors.items()]
    columns = ("functions", "usual error", "largest error", "largest that can be")
    return Table(columns, rows, title=f"A block of {len(block)} real weights in INT8; the largest is {largest:.3f}")
