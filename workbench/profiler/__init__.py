"""Measure devices, links and layers, or compute their costs from sizes (PAC+, section V-A, 'Profiling')."""
