"""The shipped audit has every claim and every printed value of the papers' items."""

from __future__ import annotations

import csv
import re
from collections import Counter

from workbench.core.errors import MissingDataError
from workbench_studies.papers import PAPERS, items_of
from workbench_studies.papers.audit import EVIDENCE, _plain, page, table
from workbench_studies.papers.command import number_text
from workbench_studies.papers.result import PaperValue, paper_values

AUDIT = (EVIDENCE / "audit.md").read_text(encoding="utf-8")


def values_of(paper: str, item: str) -> tuple[PaperValue, ...]:
    try:
        return paper_values(paper, item)
    except MissingDataError:  # a picture without numbers
        return ()


def test_every_claim_of_every_item_is_in_the_audit():
    items = [item for paper in PAPERS for item in items_of(paper)]
    results = re.findall(r"`workbench reproduce (\w+ [\w-]+)`(.*?)(?=^##|\Z)", AUDIT, re.MULTILINE | re.DOTALL)
    sections = dict(results)
    assert set(sections) == {f"{item.paper} {item.name}" for item in items}
    missing = []
    for item in items:
        lines = sections[f"{item.paper} {item.name}"].splitlines()
        for claim in (*(claim for claim, _ in item.checks.values()), *item.findings.values()):
            # What the code fills in stands between the braces.
            pattern = ".*".join(re.escape(_plain(part)) for part in re.split(r"\{[^}]*\}", claim))
            if not any(re.search(pattern, line) for line in lines if line.startswith("- **")):
                missing.append((item.paper, item.name, claim))
    assert missing == []


def test_every_printed_value_is_in_the_table():
    with (EVIDENCE / "audit.csv").open(encoding="utf-8", newline="") as file:
        printed = Counter((row["paper"], row["item"], row["paper's"]) for row in csv.DictReader(file))
    expected = Counter(
        (item.paper, item.name, number_text(value.value))
        for paper in PAPERS
        for item in items_of(paper)
        for value in values_of(paper, item.name)
    )
    assert expected - printed == Counter() and expected.total() > 1000


def test_an_item_without_a_result_lists_its_claims_and_values_as_open():
    [item] = [item for item in items_of("confidant") if item.name == "table5"]
    written = page({"confidant": [(item, None)]}, "| Confidant | Table 5 | unclear |")
    assert "No result ships" in written and "- Table 5: unclear" in written
    rows = list(csv.DictReader(table({"confidant": [(item, None)]}).splitlines()))
    assert rows and all(row["paper's"] and not row["ours"] and not row["how"] for row in rows)


def test_a_single_cell_has_no_median():
    counts = re.findall(r"^(\w+) cells? compared: (\S+)", AUDIT, re.MULTILINE)
    assert {word == "median" for number, word in counts if number != "One"} == {True}
    assert "One" in dict(counts) and "1" not in dict(counts)
