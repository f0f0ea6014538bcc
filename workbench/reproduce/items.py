"""Which tables and figures of which papers can be reproduced, found by the names that people give them ('Fig. 13', 'Table V')."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from workbench.core.errors import ConfigError, did_you_mean
from workbench.reproduce.result import Result, Settings, Source

if TYPE_CHECKING:  # plotly takes long to import, and a list of items needs none
    from workbench.plots.export import Captioned

# Each module has ITEMS: the paper's items in its order.  A paper more is a folder and a line here.
PAPERS = {
    "pac_plus": "workbench.reproduce.pac_plus",
    "galaxy_plus": "workbench.reproduce.galaxy_plus",
    "p_rge": "workbench.reproduce.p_rge",
}
_ROMAN = {"i": "1", "ii": "2", "iii": "3", "iv": "4", "v": "5", "vi": "6", "vii": "7", "viii": "8", "ix": "9", "x": "10"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A table or figure.  module: has run(settings: Settings) -> Result and draw(result: Result) -> list[Captioned]."""

    name: str
    title: str
    source: Source
    module: str

    def run(self, settings: Settings) -> Result:
        """Compute it."""
        result: Result = import_module(self.module).run(settings)
        return result

    def draw(self, result: Result) -> list[Captioned]:
        """Return its figures."""
        drawn: list[Captioned] = import_module(self.module).draw(result)
        return drawn


def items_of(paper: str) -> tuple[Item, ...]:
    """Return a paper's items.  Raises ConfigError for an unknown paper."""
    if paper not in PAPERS:
        todo = did_you_mean(paper, PAPERS)
        raise ConfigError(f"A reproduction of the paper '{paper}' was asked for.", f"There are: {', '.join(PAPERS)}.", todo)
    found: tuple[Item, ...] = import_module(PAPERS[paper]).ITEMS
    return found


def find_item(paper: str, name: str) -> Item:
    """Return an item by name: 'table5', 'Table V', 'fig. 13', 'Figure 13'.  Raises ConfigError with the list for an unknown one."""
    known: Sequence[Item] = items_of(paper)
    wanted = canonical(name)
    for item in known:
        if item.name == wanted:
            return item
    names = [item.name for item in known]
    raise ConfigError(f"'{name}' of the paper '{paper}' was asked for.", f"There are: {', '.join(names)}.", did_you_mean(wanted, names))


def canonical(name: str) -> str:
    """Return 'fig13', 'table5' or 'fig18-executed' for whatever way it is written."""
    words = re.sub(r"[\s._]+", "", name.lower()).replace("figure", "fig")
    head, _, tail = words.partition("-")
    found = re.fullmatch(r"(table|fig)([ivx]+)", head)
    if found and found[2] in _ROMAN:
        head = found[1] + _ROMAN[found[2]]
    return f"{head}-{tail}" if tail else head
