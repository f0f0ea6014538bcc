"""PAC+: Parallel Adapters, activation cache, hybrid parallelism planned for unequal devices."""
