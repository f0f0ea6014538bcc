"""Galaxy+: every table and figure of the evaluation, simulated or counted from sizes; re-scheduling executed too."""
