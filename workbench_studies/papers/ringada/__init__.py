"""RingAda's table, simulated."""
