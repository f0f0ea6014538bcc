"""Trainings in one process: techniques compared without devices; results can be stored and reused."""
