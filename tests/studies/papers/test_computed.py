"""What holds for the computed tables and figures of every paper."""

import pytest
from computed import computed

from workbench.core.serial import from_json, to_json
from workbench_studies.papers import Item, Result, items_of
from workbench_studies.papers.items import PAPERS

REFUTED = {
    ("confidant", "algorithm1"),  # misses optima
    ("confidant", "fig8"),  # three devices take more charge than one
    ("galaxy_plus", "fig12"),  # M-LM stays ahead of EdgeShard at 125 Mbit/s
    ("galaxy_plus", "fig13"),  # small models lose to SP on the cards
    ("galaxy_plus", "fig14"),  # on three devices heads do not divide
    ("galaxy_plus", "fig15"),  # as fig14
}
"""Items of which a claim of the paper does not hold in ours; docs/evidence/audit.md has the numbers."""
ITEMS = [item for paper in PAPERS for item in items_of(paper) if item.source != "executed"]


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: f"{item.paper} {item.name}")
def test_every_claim_holds_and_figures_are_drawn_from_json(item: Item) -> None:
    result = computed(item.paper, item.name)
    refuted = [f"{check.claim}: {check.found}" for check in result.checks if not check.holds]
    assert bool(refuted) == ((item.paper, item.name) in REFUTED), refuted
    read = from_json(to_json(result), Result)
    assert [comparison.labels for comparison in read.comparisons] == [
        comparison.labels for comparison in result.comparisons
    ]
    drawn = item.draw(read)
    assert bool(drawn) == bool(item.figures)
    for captioned in drawn:
        assert f"({result.source})" in captioned.figure.layout.title.text and captioned.figure.data


def claims_of(paper: str) -> dict[tuple[str, ...], float | str | None]:
    """Return our values of the text's claims by their labels; those without one say why."""
    cells = computed(paper, "claims").comparisons
    assert all(cell.note for cell in cells if cell.ours is None)
    return {cell.labels: cell.ours for cell in cells}


@pytest.mark.parametrize(
    ("name", "systems", "environments", "printed"),
    [
        ("the state of the art", ("M-LM", "SP", "ES"), ("Env. A", "Env. B"), (1.2, 4.24)),  # not Galaxy, its own
        ("M-LM and SP in Env. B", ("M-LM", "SP"), ("Env. B",), (2.91, 3.97)),
    ],
)
def test_speed_ups_that_the_text_claims_are_of_the_systems_it_names(name, systems, environments, printed) -> None:
    of_claim = {(environment, f"speed-up over {system}") for environment in environments for system in systems}
    cells = [one for one in computed("galaxy_plus", "table5").comparisons if one.labels[1:] in of_claim]
    papers = [one.paper for one in cells if isinstance(one.paper, float)]
    assert (min(papers), max(papers)) == printed
    for bound, pick in (("least", min), ("most", max)):
        ours = pick((one for one in cells if isinstance(one.ours, float)), key=lambda one: one.ours)
        labels = (f"speed-up over {name}", bound)
        [claim] = [one for one in computed("galaxy_plus", "claims").comparisons if one.labels == labels]
        assert (claim.ours, claim.kind) == (ours.ours, "fitted" if ours.labels[1] == "Env. A" else "predicted")


def test_claims_are_those_of_the_tables() -> None:
    assert list(claims_of("galaxy_plus").values()).count(None) == 2
    speedups = [cell.ours for cell in computed("p_rge", "fig4").comparisons if cell.labels[1] == "MeZO (full)"]
    claims = claims_of("p_rge")
    assert claims[("end-to-end speedup over MeZO (full)",)] == max(map(float, speedups))
    assert list(claims.values()).count(None) == 2
    hours = {cell.labels: cell.ours for cell in computed("pac_plus", "table5").comparisons}
    claims = claims_of("pac_plus")
    one_epoch = 60 / 3 * float(hours["lora", "standalone", "T5-Base", "MRPC"])
    assert claims["standalone LoRA, one epoch", "T5-Base"] == pytest.approx(one_epoch)
    assert None not in claims.values()
    [check] = computed("pac_plus", "claims").checks  # "less than 1 GB" is a limit, so no deviation is counted
    assert check.holds and check.found == "0.76 GB" and not any("cache" in labels[0] for labels in claims)
