"""The schematics in docs/pictures."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from workbench_labs.pictures.__main__ import FOLDER, PICTURES

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
    """No picture is left over, and README.md names each one."""
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(PICTURES)
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"({name}.svg)" in listed for name in PICTURES)
