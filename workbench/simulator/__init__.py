"""Simulate a Schedule with Costs in virtual time; return a Timeline, with memory from the values' lifetimes."""

from workbench.simulator.memory import live_counts
from workbench.simulator.simulate import ends_s, makespan_s, simulate
