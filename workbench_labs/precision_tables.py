"""Tables of the costs and gains of PAC+'s choices (see precision)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workbench.widgets.tables import Table
from workbench_labs.precision import StoredBackbone, TechniqueCost, block_errors


def techniques_table(costs: Sequence[TechniqueCost]) -> Table:
    """Return what a step of each technique costs."""
    rows = [
        (
            one.label,
            f"{one.trained:,}",
            f"{one.forward_s * 1e3:.0f}",
            f"{one.backward_s * 1e3:.0f}",
            f"{one.saved_bytes / 1e6:.1f}",
        )
        for one in costs
    ]
    return Table(
        ("technique", "weights trained", "forward, ms", "backward, ms", "kept for backward, MB"),
        rows,
        title="One training step, by technique (measured in this process, at full speed)",
    )


def outlier_table(block: torch.Tensor, times: float = 20) -> Table:
    """Return the usual error of a block's weights, and with a first weight `times` as large as the largest."""
    spoilt = block.clone()
    spoilt[0] = times * block.abs().max()
    plain, with_outlier = (block_errors(one, block_size=len(block)) for one in (block, spoilt))
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


def storage_table(stored: Sequence[StoredBackbone]) -> Table:
    """Return what storing the backbone in fewer bits changes."""
    rows = [
        (
            one.storage,
            f"{one.held_bytes / 1e6:.1f}",
            f"{one.tap_error:.2%}",
            f"{one.score:.3f}",
            f"{one.forward_s * 1e3:.0f}",
        )
        for one in stored
    ]
    return Table(
        ("storage", "held, MB", "change of the last tap", "right answers", "forward, ms"),
        rows,
        title="The backbone in each storage type (computed in its compute type; "
        "embeddings stay at full precision for int8, int4, nf4)",
    )
