"""Schedule x Costs -> Timeline: replay in virtual time, memory from liveness, energy."""

from workbench.simulator.energy import Energy, energy
from workbench.simulator.memory import live_counts, memory_over_time
from workbench.simulator.simulate import simulate

__all__ = ["Energy", "energy", "live_counts", "memory_over_time", "simulate"]
