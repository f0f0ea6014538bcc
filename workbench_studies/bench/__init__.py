"""Benchmarks: two sides in one process tree, interleaved, reported as a ratio with its spread."""
