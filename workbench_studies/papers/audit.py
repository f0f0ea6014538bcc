"""The replication audit: every claim and cell of the papers next to ours, as a page and a table.

`python -m workbench_studies.papers.audit` computes every table and figure that is simulated or computed, reads the
shipped results of those that are executed, and writes docs/evidence/audit.md and audit.csv.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median

from workbench import __version__
from workbench.cli.output import say
from workbench.core.errors import MissingDataError
from workbench.core.methods import title_of
from workbench.core.serial import read_text, write_text
from workbench_studies.papers import PAPERS, Comparison, Item, Result, Settings, items_of
from workbench_studies.papers.command import number_text
from workbench_studies.papers.items import absent_of
from workbench_studies.papers.result import Progress, paper_values, shipped_result

EVIDENCE = Path(__file__).parents[2] / "docs/evidence"
WORD = r"\{[^}]*\}"
"""A part of a claim's text that the code fills in."""
NOT_FITTED = ("predicted", "computed", "measured")
COLUMNS = ("paper", "item", "cell", "paper's", "ours", "unit", "deviation", "how", "note")
HEAD = """# Replication audit

Every table and figure of the five papers that has numbers, as the workbench reproduces it: each claim of the paper that
our numbers can contradict, whether it holds, how far the cells are off, and why. A *finding* is what our numbers say
beyond these claims; nothing is judged by it. *Simulated* means that events were replayed, *computed* that a formula
gives the numbers. `python -m workbench_studies.papers.audit` writes
this page and [every cell as a table](audit.csv) from `workbench_studies/papers`; no number is typed. This is version
{version}. To cite the audit, cite the workbench (`CITATION.cff`) with this page's name and that version.

Deviations are of cells to which no constant of ours was fitted, in per cent of the paper's value, or in points where
that is a percentage itself. A value of a table that the text repeats counts again, under the claims of the text.
"""


def outcome(item: Item, notify: Progress) -> Result | None:
    """Return an item's result: shipped if it trains, computed now otherwise; None where neither is there."""
    notify(f"{item.paper} {item.name}")
    shipped = shipped_result(item.paper, item.name) if item.source == "executed" or item.trains else None
    return shipped if shipped is not None or item.source == "executed" else item.run(Settings())


def page(results: dict[str, list[tuple[Item, Result | None]]], errata: str) -> str:
    """Return the audit as a page.  errata: the page of the papers' contradictions, whose rows go to their paper."""
    parts = [HEAD.format(version=__version__), _overview(results)]
    for paper, outcomes in results.items():
        parts.append(f"## {title_of(paper)}\n")
        rows = re.findall(rf"^\| {re.escape(title_of(paper))} \| (.*?) \| (.*) \|$", errata, re.MULTILINE)
        if rows:
            parts.append("Where the paper contradicts itself or leaves something open ([errata](errata.md)):\n")
            parts.append("".join(f"- {where}: {text}\n" for where, text in rows))
        parts.append("Where ours differs from the paper: [differences](differences.md).\n")
        parts += [_section(item, result) for item, result in outcomes]
        if absent := absent_of(paper):
            parts.append("### Without an item\n")
            parts.append("".join(f"- {name}: {_plain(why)}\n" for name, why in absent.items()))
    return "\n".join(parts)


def table(results: dict[str, list[tuple[Item, Result | None]]]) -> str:
    """Return every cell as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for paper, outcomes in results.items():
        for item, result in outcomes:
            for cell in _cells(item, result):
                off = "" if cell.deviation is None else f"{cell.deviation:.1f}"
                values = [
                    _label(cell),
                    number_text(cell.paper),
                    number_text(cell.ours),
                    cell.unit,
                    off,
                    cell.how,
                ]
                writer.writerow([paper, item.name, *values, cell.note])
    return text.getvalue()


def _label(cell: Comparison) -> str:
    return ", ".join(filter(None, cell.labels))


def _cells(item: Item, result: Result | None) -> list[Comparison]:
    """Return an item's cells, and the printed values of its table that it compares with nothing."""
    compared = list(result.comparisons) if result is not None else []
    counts = Counter(number_text(cell.paper) for cell in compared)
    try:
        values = paper_values(item.paper, item.name)
    except MissingDataError:  # a picture without printed numbers
        values = ()
    open_ones = []
    for value in values:  # an item may join labels, so a printed number counts, too
        if counts[number_text(value.value)]:
            counts[number_text(value.value)] -= 1
        else:
            open_ones.append(item.cell(tuple(value.labels.values()), value.value, None, value.unit))
    return compared + open_ones


def _overview(results: dict[str, list[tuple[Item, Result | None]]]) -> str:
    rows = ["| paper | items | claims that hold | cells | compared | fitted | median deviation |", "|" + " --- |" * 7]
    for paper, outcomes in results.items():
        checks = [check for _, result in outcomes if result for check in result.checks]
        cells = [cell for item, result in outcomes for cell in _cells(item, result) if cell.paper is not None]
        off = _deviations(cells)
        numbers = (
            len(outcomes),
            f"{sum(check.holds for check in checks)} of {len(checks)}",
            len(cells),
            sum(cell.ours is not None for cell in cells),
            sum(cell.kind == "fitted" and cell.ours is not None for cell in cells),
            f"{median(off):.1f}" if off else "",
        )
        rows.append(f"| [{title_of(paper)}](#{_anchor(title_of(paper))}) | {' | '.join(map(str, numbers))} |")
    return "\n".join(rows) + "\n"


def _anchor(title: str) -> str:
    return re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))


def _deviations(cells: Iterable[Comparison]) -> list[float]:
    return [abs(cell.deviation) for cell in cells if cell.deviation is not None and cell.kind in NOT_FITTED]


def _section(item: Item, result: Result | None) -> str:
    """Return the text about one table or figure."""
    lines = [
        f"### {_plain(result.title if result else item.title)}\n",
        f"`workbench reproduce {item.paper} {item.name}`: {item.source}.\n",
        *([] if result else ["No result ships; the command executes it.\n"]),
    ]
    checks = list(result.checks) if result else []
    lines += [f"{words}\n" for words in _off(result)] if result else []
    claims = [f"- **{_verdict(check.holds)}** {_plain(check.claim)}: {_plain(check.found)}\n" for check in checks]
    claims += [f"- **finding:** {_plain(finding)}\n" for finding in (result.findings if result else ())]
    judged = {check.claim for check in checks}
    for claim, _ in item.checks.values():
        if not any(re.fullmatch(_pattern(claim), text) for text in judged):
            claims.append(f"- **not judged here:** {_plain(re.sub(WORD, '…', claim))}\n")
    if not (result and result.findings):
        for finding in item.findings.values():
            claims.append(f"- **not found here:** {_plain(re.sub(WORD, '…', finding))}\n")
    lines.append("".join(claims))
    lines += [f"{_plain(sentence)}\n" for sentence in (result.explanation if result else ())]
    if result and result.environment:
        lines.append("Executed with " + _plain(", ".join(f"{k} {v}" for k, v in result.environment.items())) + ".\n")
    return "\n".join(lines)


def _pattern(claim: str) -> str:
    """Return a pattern of a claim, in which any text may stand for a word that the code fills in."""
    return ".*".join(map(re.escape, re.split(WORD, claim)))


def _verdict(holds: bool) -> str:
    return "holds:" if holds else "does not hold:"


def _off(result: Result) -> Iterator[str]:
    """Yield how far an item's cells are off."""
    known = [cell for cell in result.comparisons if cell.deviation is not None and cell.kind in NOT_FITTED]
    for unit, words in (("percent", "%"), ("points", "points")):
        cells = [cell for cell in known if cell.deviation_in == unit]
        if cells:
            worst = max(cells, key=lambda cell: abs(cell.deviation or 0.0))
            middle = f"median deviation {median(_deviations(cells)):.1f} {words}, the largest "
            start = "One cell compared: " if len(cells) == 1 else f"{len(cells)} cells compared: {middle}"
            yield (
                f"{start}{worst.deviation:+.1f} {words} ({_plain(_label(worst))}: paper {number_text(worst.paper)}, "
                f"ours {number_text(worst.ours)} {_plain(worst.unit)})."
            )
    words_said = [cell.agrees for cell in result.comparisons if cell.agrees is not None]
    if words_said:
        yield f"{sum(words_said)} of {len(words_said)} words (such as OOM or a plan) are the paper's."
    for note in dict.fromkeys(cell.note for cell in result.comparisons if cell.note):
        yield f"Note: {_plain(note)}."


def _plain(text: str) -> str:
    """Return text in which Markdown sees no marks."""
    return re.sub(r"([|*<$\[\]])", r"\\\1", " ".join(text.split()))


def main() -> None:
    """Compute the audit and write it."""
    results = {paper: [(item, outcome(item, say)) for item in items_of(paper)] for paper in PAPERS}
    errata = read_text(EVIDENCE / "errata.md", "the errata")
    write_text(EVIDENCE / "audit.md", page(results, errata))
    write_text(EVIDENCE / "audit.csv", table(results))


if __name__ == "__main__":
    main()
