"""Simulate a Schedule with Costs in virtual time; return a Timeline, with memory from the values' lifetimes."""

from workbench.simulator.simulate import ends_s, live_counts, makespan_s, simulate
