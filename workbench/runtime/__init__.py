"""Execute schedules on devices: engines, emulated links, memory limits, process groups, transport and executor."""
