"""What the text claims beside the tables and figures, next to our values of the same (Galaxy+, sections I to IV)."""

from __future__ import annotations

from itertools import product

from workbench_studies.papers.galaxy_plus.counted import A100, MEMORY, PI, cell
from workbench_studies.papers.galaxy_plus.scaling import weak
from workbench_studies.papers.galaxy_plus.speedups import SPEED_UP, cells
from workbench_studies.papers.galaxy_plus.systems import EDGESHARD, GALAXY, MEGATRON, OURS, SEQUENCE
from workbench_studies.papers.galaxy_plus.testbed import ENVIRONMENTS, load_constants
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Cells, Result


def claims(item: Item) -> Result:
    """Compare the claims with the computed tables; of those that are a choice or a time of the paper's there are no
    values of ours.
    """
    constants = load_constants()
    factors = cells(constants)
    ours: Cells = {
        ("scaling efficiency of 4 devices", "about"): 100 * weak(constants, "OPT-L", OURS, (4,))[4] / 4,
    }
    names: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {f"speed-up over {GALAXY}": ((GALAXY,), ENVIRONMENTS)}
    names["speed-up over the state of the art"] = (tuple(SPEED_UP), ENVIRONMENTS)
    for (system, title), environment in product(
        ((MEGATRON, MEGATRON), (SEQUENCE, SEQUENCE), (EDGESHARD, "EdgeShard")), ENVIRONMENTS
    ):
        names[f"speed-up over {title} in {environment}"] = ((system,), (environment,))
    for name, (systems, environments) in names.items():
        quantities = {SPEED_UP[system] for system in systems}
        values = [
            value
            for (_, environment, quantity), value in factors.items()
            if environment in environments and quantity in quantities and isinstance(value, float)
        ]
        ours[name, "least"], ours[name, "most"] = min(values), max(values)
    for name, model in (
        ("slow-down of an RPi 4B (M) against an A100, DistilBert", "DistilBert"),
        ("latency of Bert-L on an RPi 4B against an A100", "Bert-L"),
    ):
        ours[name, "about"] = 1e3 * float(cell(constants, model, PI)) / float(cell(constants, model, A100))
    for model in ("Bert-L", "ViT-Huge"):
        ours[f"memory that {model} needs", "about"] = cell(constants, model, MEMORY)
    return item.result(item.compare(lambda *labels: ours.get(labels)))
