"""What all methods that train share: a rank's session, its journal and its reports, the folder of a run, steps and their records."""
