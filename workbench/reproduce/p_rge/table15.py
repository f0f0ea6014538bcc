"""Table 15: minutes of fine-tuning on whole tasks (P-RGE, appendix F.3); task_times.py says how."""

from workbench.reproduce.p_rge.task_times import draw_table as draw
from workbench.reproduce.p_rge.task_times import reproduce
from workbench.reproduce.result import Result, Settings

__all__ = ["draw", "run"]


def run(settings: Settings) -> Result:
    """Simulate it."""
    return reproduce("table15")
