"""How much Galaxy+'s tables depend on each constant."""

from __future__ import annotations

from functools import partial

from workbench.reproduce.sensitivity import sensitivity_table

VARIED = (
    "speed_factor",
    "ring_efficiency",
    "collective_efficiency",
    "handling_s_per_byte",
    "message_s",
    "operation_s",
    "pi_memory_bytes_per_s",
    "embedding_share",
)

sensitivity = partial(sensitivity_table, varied=VARIED)
