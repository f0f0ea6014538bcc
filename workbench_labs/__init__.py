"""The parts of single notebooks: planners, rings and bowls to try out, rooflines, exercises and their checks."""
