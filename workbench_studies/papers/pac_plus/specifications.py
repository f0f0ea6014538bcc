"""The paper's models, boards and first claims next to ours (PAC+, Tables III and IV, sections II-B and V-A)."""

from __future__ import annotations

from workbench.core.catalogue import load_device
from workbench_studies.papers.device_titles import title_number
from workbench_studies.papers.items import each_cell
from workbench_studies.papers.pac_plus.testbed import description, load_constants
from workbench_studies.papers.result import Number

BOARDS = {"Nano, H": "jetson-nano-h", "Nano, L": "jetson-nano-l", "TX2, H": "jetson-tx2-h", "TX2, L": "jetson-tx2-l"}


@each_cell
def table3(model: str, quantity: str) -> Number:
    """Return a size of one of our models."""
    sizes = description(load_constants(), model)
    values = {
        "layers": sizes.num_layers,
        "heads": sizes.heads,
        "hidden size": sizes.hidden,
        "parameters": sizes.params / 1e9,
    }
    return float(values[quantity])


@each_cell
def table4(board: str, quantity: str) -> Number:
    """Return what the catalogue says of a board."""
    return title_number(BOARDS[board], quantity)


@each_cell
def motivation(what: str) -> Number:
    """Return a Nano's time over an A100's by the catalogue's speeds; planning time is not computed."""
    ratio = load_device("a100-40gb").flops_per_s / load_device("jetson-nano-h").flops_per_s
    return ratio if what.startswith("epoch") else None
