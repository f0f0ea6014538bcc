"""Schedule x Costs -> Timeline: replay in virtual time, memory from liveness."""

from workbench.simulator.memory import live_counts, memory_over_time
from workbench.simulator.simulate import simulate

__all__ = ["live_counts", "memory_over_time", "simulate"]
