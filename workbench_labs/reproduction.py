"""One table of a paper, reproduced by the command line, as cells that a student's functions can judge."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from IPython.display import Markdown

from workbench.core.errors import ConfigError
from workbench.core.run_folder import child_environment, scratch_folder
from workbench.widgets.tables import Table

WAIT_S = 600
SHOWN = 12
MISSING = "The papers' tables are a distribution of their own, not installed: `pip install ./workbench_studies`."


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """A table or figure.  result: as the command writes it.  why: what was missing; then the result is empty."""

    result: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""

    @property
    def title(self) -> str:
        """Return its title."""
        return self.result.get("title", "")

    def part(self, name: str) -> list[Any]:
        """Return a list of the result; an empty one if nothing was reproduced."""
        return self.result.get(name, [])

    @property
    def cells(self) -> list[list[Any]]:
        """Return [kind, paper, ours] of each cell."""
        return [[cell["kind"], cell["paper"], cell["ours"]] for cell in self.part("comparisons")]

    def table(self, kind: str = "", *, most: int = SHOWN) -> Table:
        """Return the first `most` cells, of one kind or of any."""
        rows = [
            (*cell["labels"], cell["kind"], _text(cell["paper"]), _text(cell["ours"]), _off(cell["deviation"]))
            for cell in self.part("comparisons")
            if kind in ("", cell["kind"])
        ]
        more = f"All {len(rows)} cells: found.table(most={len(rows)})." if len(rows) > most else ""
        columns = (*self.part("label_columns"), "kind", "paper", "ours", "deviation")
        return Table(columns, rows[:most], title=self.title, note=self.why or more)

    def kinds(self) -> Table:
        """Return how many cells are of which kind."""
        rows = [(kind, str(count)) for kind, count in Counter(cell[0] for cell in self.cells).most_common()]
        return Table(("kind", "cells"), rows, title=self.title, note=self.why)

    def words(self) -> Markdown:
        """Return the notes on the table: the fitted cells, and the paper's open points."""
        return Markdown("\n".join(f"- {sentence}" for sentence in self.part("explanation")) or self.why)

    def claims(self) -> Table:
        """Return the paper's claims that our numbers could contradict, and what else they say."""
        checks = [(check["claim"], check["holds"], check["found"]) for check in self.part("checks")]
        rows = [(claim, "holds" if holds else "does not hold", finding) for claim, holds, finding in checks]
        rows += [("not a claim of the paper", "finding", finding) for finding in self.part("findings")]
        return Table(("claim", "", "found"), rows, note=self.why)

    def judged(self, deviation: Callable[..., Any]) -> Table:
        """Return what a student's function says of the table, by kind: each kind is given to it as if predicted."""
        rows = []
        for kind in dict.fromkeys(cell[0] for cell in self.cells):
            cells = [["predicted", *cell[1:]] for cell in self.cells if cell[0] == kind]
            deviations = deviation(cells)
            words = (
                ("nothing to compare", "")
                if deviations is None
                else tuple(f"{float(value):.2f}" for value in deviations)
            )
            rows.append((kind, str(len(cells)), *words))
        return Table(("kind", "cells", "median deviation (%)", "largest (%)"), rows, title=self.title, note=self.why)

    def median(self, deviation: Callable[..., Any]) -> float | str:
        """Return a student's median over all cells that were not fitted."""
        cells = [["predicted", *cell[1:]] for cell in self.cells if cell[0] != "fitted"]
        deviations = deviation(cells)
        return "unknown: there is nothing to compare" if deviations is None else float(deviations[0])


def reproduced(paper: str, item: str) -> Reproduction:
    """Run `workbench reproduce PAPER ITEM` in a process, and return its cells.

    Without the studies the result is empty and says so.  Raises ConfigError for an unknown paper or item.
    """
    with scratch_folder() as folder:
        command = [
            sys.executable,
            "-m",
            "workbench",
            "reproduce",
            paper,
            item,
            "--json",
            "--png",
            "no",
            "--out",
            str(folder),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, env=child_environment())
    words = " ".join((done.stderr or done.stdout).split())[:400]
    if done.returncode and "belongs to the studies" in words:
        return Reproduction(why=MISSING)
    if done.returncode:
        raise ConfigError(
            f"'{item}' of '{paper}' was to be reproduced.",
            f"The command stops: {words}.",
            f"See `workbench reproduce {paper} --list`.",
        )
    [result] = json.loads(done.stdout).values()
    return Reproduction(result=result)


def _off(deviation: float | None) -> str:
    return "" if deviation is None else f"{deviation:+.2f}"


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
