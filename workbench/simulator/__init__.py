"""Schedule x Costs -> Timeline: replay in virtual time, memory from liveness."""

from workbench.simulator.simulate import live_counts, simulate
