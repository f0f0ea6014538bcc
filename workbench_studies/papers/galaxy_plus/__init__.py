"""Galaxy+: every table and figure of the evaluation, computed; re-scheduling simulated and executed."""
