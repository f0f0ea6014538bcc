"""What the text claims beside the tables and figures, next to our values of the same (P-RGE, sections 4.1 to 4.3,
appendix F).
"""

from __future__ import annotations

from workbench.methods.p_rge.published import Precision, load_constants
from workbench_studies.papers.items import Item
from workbench_studies.papers.p_rge.memory import more_memory, run_gb
from workbench_studies.papers.p_rge.steps import SPEEDUP, jetson_s, speedup
from workbench_studies.papers.p_rge.tasks import FULL, MODEL_OF, STANDARD, run_minutes, speedups
from workbench_studies.papers.p_rge.testbed import LLAMA, PAPER
from workbench_studies.papers.result import Cells, Result, printed


def claims(item: Item) -> Result:
    """Compare the claims with the computed tables; the scores of trainings that are not executed have no value of
    ours.
    """
    constants, ours = load_constants(), Cells()
    for name, over in (("MeZO (full)", FULL), ("MeZO (LoRA-FA)", STANDARD)):
        ours[f"end-to-end speedup over {name}",] = max(
            value
            for table in MODEL_OF
            for value in speedups(
                {labels: run_minutes(table, constants, *labels) for labels in printed(PAPER, table)}, over
            ).values()
        )
    precisions: dict[Precision, str] = {"nf4": "NF4", "float16": "float16"}
    for precision, title in precisions.items():
        ours[f"speedup of inner-loop parallelization, {title}",] = speedup(constants, LLAMA, precision, 64, 1)
    ours["speedup on Jetson, NF4",] = max(
        jetson_s(constants, *labels) for labels in printed(PAPER, "table4") if labels[1] == SPEEDUP
    )
    of_llama = {labels: run_gb("table18", constants, *labels) for labels in printed(PAPER, "table18")}
    ours["more memory by inner-loop parallelization, Llama2-7B",] = max(more_memory(of_llama).values())
    return item.result(item.compare(lambda *labels: ours.get(labels)))
