"""What the text claims beside the tables and figures, next to our values of the same (Galaxy+, sections I to IV)."""

from __future__ import annotations

from itertools import product

from workbench_studies.papers.galaxy_plus.counted import A100, MEMORY, PI, cell
from workbench_studies.papers.galaxy_plus.scaling import weak
from workbench_studies.papers.galaxy_plus.speedups import SPEED_UP, cells
from workbench_studies.papers.galaxy_plus.systems import EDGESHARD, GALAXY, MEGATRON, OURS, SEQUENCE
from workbench_studies.papers.galaxy_plus.testbed import ENVIRONMENTS, TABLE_V, load_constants
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Cells, Result


def claims(item: Item) -> Result:
    """Compare the claims with the computed tables.  A choice of the paper and a planner's time have no value of ours.

    The abstract's 1.2 to 4.24 times leave out Galaxy, the paper's earlier form, over which Table V has 1.0 to 1.41.
    """
    constants = load_constants()
    factors = cells(constants)
    ours: Cells = {
        ("scaling efficiency of 4 devices", "about"): 100 * weak(constants, "OPT-L", OURS, (4,))[4] / 4,
    }
    compared = {
        "the state of the art": ((MEGATRON, SEQUENCE, EDGESHARD), ENVIRONMENTS),
        f"{MEGATRON} in Env. A": ((MEGATRON,), ("Env. A",)),
        f"{SEQUENCE} in Env. A": ((SEQUENCE,), ("Env. A",)),
        "EdgeShard in Env. A": ((EDGESHARD,), ("Env. A",)),
        f"{MEGATRON} and {SEQUENCE} in Env. B": ((MEGATRON, SEQUENCE), ("Env. B",)),
        "EdgeShard in Env. B": ((EDGESHARD,), ("Env. B",)),
        GALAXY: ((GALAXY,), ENVIRONMENTS),
    }
    for name, (systems, environments) in compared.items():
        values = [
            value
            for system, model, environment in product(systems, TABLE_V, environments)
            if isinstance(value := factors[model, environment, SPEED_UP[system]], float)
        ]
        ours[f"speed-up over {name}", "least"], ours[f"speed-up over {name}", "most"] = min(values), max(values)
    for name, model in (
        ("slow-down of an RPi 4B (M) against an A100, DistilBert", "DistilBert"),
        ("latency of Bert-L on an RPi 4B against an A100", "Bert-L"),
    ):
        ours[name, "about"] = 1e3 * float(cell(constants, model, PI)) / float(cell(constants, model, A100))
    for model in ("Bert-L", "ViT-Huge"):
        ours[f"memory that {model} needs", "about"] = cell(constants, model, MEMORY)
    return item.result(item.compare(lambda *labels: ours.get(labels)))
