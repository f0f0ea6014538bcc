"""What every method that trains sets: time-outs, and how long a plan is refined."""

from __future__ import annotations

SILENT_AFTER_STEPS = 10
"""A peer counts as silent when it takes so many times longer than a step should."""

REAL_TIMEOUT_S = 300.0
"""How long a real device waits for a silent one: another may take so long to load its layers.  A lost connection is noticed at once."""

MAX_SIMULATIONS = 200
"""Steps that the refinement of a plan may simulate: a second or two."""
