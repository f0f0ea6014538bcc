"""Around runs: their progress, sweeps of many and their comparison, notebooks as batches, devices measured."""
