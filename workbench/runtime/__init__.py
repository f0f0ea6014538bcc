"""Execute schedules on devices: engines, emulated links and memory, process groups, transport, executor."""
