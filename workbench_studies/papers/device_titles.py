"""What the device catalogue's titles say of a device, to compare with the papers' specifications."""

from __future__ import annotations

import re

from workbench.core.catalogue import data_folder
from workbench.core.serial import read_toml
from workbench_studies.papers.result import Number

PATTERNS = {
    "memory": r"(\d+) GB",
    "cores": r"(\d+)(?: x |-core)",
    "clock": r"([\d.]+) (MHz|GHz)",
    "power": r"([\d.]+) W mode",
}
"""By quantity; GB, cores, MHz, W."""


def titles() -> dict[str, str]:
    """Return the title of every model of the catalogue."""
    return {model: str(text["title"]) for model, text in read_toml(data_folder() / "devices.toml").items()}


def title_number(model: str, quantity: str) -> Number:
    """Return a quantity of PATTERNS that a model's title names; None if it does not."""
    match = re.search(PATTERNS[quantity], titles()[model])
    return None if match is None else float(match[1]) * (1000 if match[0].endswith("GHz") else 1)
