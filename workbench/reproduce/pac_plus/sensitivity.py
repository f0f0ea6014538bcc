"""How much PAC+'s tables depend on each constant; those of both boards go together."""

from __future__ import annotations

from functools import partial

from workbench.reproduce.sensitivity import sensitivity_table

VARIED = (
    "achieved_share",
    "backward_factor",
    "side_factor",
    "operation_overhead_s",
    "step_overhead_s",
    "nano_bytes",
    "link_efficiency",
    "nano_mb_per_s",
)

sensitivity = partial(sensitivity_table, varied=VARIED, together={"nano_bytes": "tx2_bytes", "nano_mb_per_s": "tx2_mb_per_s"})
