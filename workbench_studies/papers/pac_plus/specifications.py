"""The paper's models, boards and first claims next to ours (PAC+, Tables III and IV, sections II-B and V-A)."""

from __future__ import annotations

from workbench.core.catalogue import load_device
from workbench_studies.papers.device_titles import title_number
from workbench_studies.papers.items import Item
from workbench_studies.papers.pac_plus.testbed import description, load_constants
from workbench_studies.papers.result import Number, Result, Settings

BOARDS = {"Nano, H": "jetson-nano-h", "Nano, L": "jetson-nano-l", "TX2, H": "jetson-tx2-h", "TX2, L": "jetson-tx2-l"}


def table3(item: Item, settings: Settings) -> Result:
    """Compare the sizes of our models with the paper's."""
    constants = load_constants()

    def ours(model: str, quantity: str) -> Number:
        sizes = description(constants, model)
        values = {
            "layers": sizes.num_layers,
            "heads": sizes.heads,
            "hidden size": sizes.hidden,
            "parameters": sizes.params / 1e9,
        }
        return float(values[quantity])

    return item.result(item.compare(ours))


def table4(item: Item, settings: Settings) -> Result:
    """Compare the catalogue's boards with the paper's."""
    return item.result(item.compare(lambda board, quantity: title_number(BOARDS[board], quantity)))


def motivation(item: Item, settings: Settings) -> Result:
    """Compare a Nano with an A100 by the catalogue's speeds; planning time is not computed."""
    ratio = load_device("a100-40gb").flops_per_s / load_device("jetson-nano-h").flops_per_s
    return item.result(item.compare(lambda what: ratio if what.startswith("epoch") else None))
