"""What belongs to single notebooks: planners, rings and bowls to try out, rooflines, exercises and their checks."""
