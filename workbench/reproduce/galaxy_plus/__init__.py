"""Galaxy+: every table and figure, simulated or counted from sizes; serving also executed."""
