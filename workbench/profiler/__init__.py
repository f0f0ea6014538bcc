"""Measure devices, links and layers, or compute them from sizes (PAC+, section V-A, 'Profiling')."""
