"""Trainings in one process: techniques compared without devices; results can be kept and found again."""
