"""Code shared by all methods that train: a rank's session and reports, a run's folder, steps and their records."""
