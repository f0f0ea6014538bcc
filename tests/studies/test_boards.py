"""The device catalogue against what others have published of the same boards."""

from __future__ import annotations

from pathlib import Path

import pytest
from generate.boards import board_sources, published_boards

from workbench.core.errors import ConfigError
from workbench_studies.boards import FAR_OFF, compared, published

FOUND = published()


def test_every_figure_has_a_source_and_every_source_a_figure() -> None:
    assert {figure.source for figure in FOUND.figure} == set(FOUND.source)
    assert {figure.board for figure in FOUND.figure} == set(FOUND.board)
    pages = published_boards() + board_sources()
    assert [one.address for one in FOUND.source.values() if one.address not in pages] == []


def test_the_catalogue_is_near_the_published_figures_or_says_why_not() -> None:
    groups = compared(FOUND)
    far = {(group.board, group.quantity) for group in groups if abs(group.deviation or 0.0) > FAR_OFF}
    assert far == {(one.board, one.quantity) for one in FOUND.reason}
    speeds = {group.board: group.deviation for group in groups if group.quantity == "gflops"}
    assert set(speeds) >= {"rpi-4b-l", "rpi-5", "orange-pi-5", "jetson-orin-nano"}


def test_figures_are_converted_to_the_catalogues_clock_and_precision() -> None:
    [group] = [one for one in compared(FOUND) if (one.board, one.quantity) == ("rpi-4b-l", "gflops")]
    value = dict(zip((figure.source for figure in group.figures), group.converted, strict=True))["top500-33"]
    assert value == pytest.approx(2 * 11.433 * 1.47 / 1.5)


def test_a_figure_without_its_source_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "published.toml"
    file.write_text(
        'board = {}\nsource = {}\n[[figure]]\nboard = "rpi-5"\nquantity = "gflops"\nvalue = 3\nsetting = "x"\n'
    )
    with pytest.raises(ConfigError, match="source"):
        published(file)
