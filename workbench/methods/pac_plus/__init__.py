"""PAC+: Parallel Adapters, activation cache, hybrid parallelism planned for heterogeneous devices."""
