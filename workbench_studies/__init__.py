"""The evidence for the workbench: the papers' tables and figures reproduced, and benchmarks of the workbench itself."""
