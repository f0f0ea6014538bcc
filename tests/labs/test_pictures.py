"""The schematics in docs/pictures."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from tests.clusters import cluster_of
from tests.plans import staged_plan
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.report import Report
from workbench.core.schedule import Op
from workbench.core.timeline import Span, Timeline
from workbench_labs.pictures.__main__ import FOLDER, PICTURES
from workbench_labs.pictures.executed import executed_run

MOST_BYTES = 20_000
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_those_of_the_script(name: str) -> None:
    """Each file is what its function draws, small, and told to whoever does not see it; all text is on the card."""
    text = PICTURES[name]()
    assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == text, "Run make pictures"
    assert len(text.encode()) <= MOST_BYTES
    root = ElementTree.fromstring(text)
    assert root.findtext(f"{SVG}title") and len(root.findtext(f"{SVG}desc", "")) > 80
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for one in root.iter(f"{SVG}text"):
        assert 0 <= float(one.attrib["x"]) < width and 0 <= float(one.attrib["y"]) < height


def test_the_folder_holds_and_lists_all_of_them() -> None:
    """No picture is left over, and README.md names each one.  That of an executed run is not drawn again."""
    assert {path.stem for path in FOLDER.glob("*.svg")} == {*PICTURES, "run"}
    for path in FOLDER.glob("*.svg"):
        boxes = ElementTree.fromstring(path.read_text(encoding="utf-8")).iter(f"{SVG}rect")
        assert all(float(box.attrib[side]) > 0 for box in boxes for side in ("width", "height")), path.name
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"({name}.svg)" in listed for name in [*PICTURES, "run"])


def test_an_executed_run_is_drawn_from_its_report_and_a_simulated_one_is_refused() -> None:
    shared = {"device_names": ("alpha",)}
    spans = (Span(0, Op("F", 0, 0), 0.0, 0.18), Span(0, Op("STEP", 0), 0.18, 0.181))
    simulated = Timeline(source="simulated", spans=spans, **shared)
    measured = Timeline(source="emulated", fidelity="kernel", spans=(Span(0, Op("F", 0, 0), 0.0, 0.184),), **shared)
    report = Report(
        source="emulated",
        fidelity="kernel",
        mode="execute",
        job=Job(),
        cluster=cluster_of(("alpha",)),
        plan=staged_plan((1, {0: 1}), method="pac_plus"),
        timelines={"first epoch, predicted": simulated, "first epoch, measured": measured},
    )
    drawn = executed_run(report)
    assert "simulated: 181 ms" in drawn and "measured: 184 ms" in drawn
    assert [name for name in ("forward", "update", "on the link") if f">{name}<" in drawn] == ["forward", "update"]
    for unusable in (replace(report, valid=False), replace(report, timelines={"first epoch, predicted": simulated})):
        with pytest.raises(ConfigError):
            executed_run(unusable)
