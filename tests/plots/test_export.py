from __future__ import annotations

import re
from dataclasses import replace

import pytest
from made_up_report import report

from workbench.core.errors import RuntimeSetupError, WriteError
from workbench.plots import browser_path, export, style, write_figures


def test_html_files_open_offline_and_share_one_library(tmp_path) -> None:
    files = write_figures(report(), tmp_path, png=False)
    pages = [file for file in files if file.name != "index.html"]
    assert {page.stem for page in pages} == {
        "cluster",
        "gantt-first_epoch_predicted",
        "gantt-first_epoch_measured",
        "memory-first_epoch_predicted",
        "memory-first_epoch_measured",
        "breakdown",
        "predicted_against_measured",
        "epoch_times",
        "curves",
    }
    assert (tmp_path / "plotly.min.js").stat().st_size > 1_000_000
    for page in pages:
        text = page.read_text()
        assert page.stat().st_size < 500_000
        assert re.findall(r'<script[^>]*src="([^"]+)"', text) == ["plotly.min.js"]


def test_a_dark_page_changes_only_greys_of_what_is_drawn() -> None:
    """A colour has a meaning, so it keeps its hue; every grey of the palette has a counterpart."""
    rules = [rule for rule in style.dark_css("#figure").splitlines() if "rgb(" in rule]
    drawn = [rule for rule in rules if not rule.startswith("#figure text")]
    changed = {tuple(map(int, found)) for rule in drawn for found in re.findall(r"rgb\((\d+), (\d+), (\d+)\)", rule)}
    assert all(len({*colour}) == 1 for colour in changed)
    greys = (style.BLACK, style.DARK_GREY, style.MID_GREY, style.LIGHT_GREY)
    assert {tuple(bytes.fromhex(grey[1:])) for grey in greys} <= changed


def test_index_shows_every_figure_with_a_caption(tmp_path) -> None:
    index, *pages = write_figures(report(), tmp_path, png=False)
    text = index.read_text()
    for page in pages:
        assert f"src='{page.name}'" in text
    assert "emulated, kernel links" in text
    assert "accuracy 0.800" in text
    assert text.count("<figcaption>") == len(pages)


def test_index_begins_with_the_result_and_warns_only_of_invalid_numbers(tmp_path) -> None:
    noted = replace(report(), notes=("Time dilation 2x.", "Refined."))
    text = write_figures(noted, tmp_path, png=False)[0].read_text()
    assert "<h1>PAC+ on pair (emulated, kernel links)</h1>" in text
    assert "<p class='headline'>Accuracy 0.8 on the test split" in text
    assert "class='warning'" not in text and "<summary>Notes (2)</summary>" in text
    shown = re.findall(r"<figure id='([^']+)'>", text)
    assert shown[:3] == ["predicted_against_measured", "epoch_times", "curves"] and shown[-1] == "cluster"
    assert re.findall(r"href='#([^']+)'", text) == shown
    captions = re.findall(r"<figcaption>(.*?) <a", text)
    assert all(re.match(r"[A-Z].*\.$", caption) for caption in captions)
    assert "class='warning'>(!) Host too busy" in write_figures(report(valid=False), tmp_path, png=False)[0].read_text()


def test_names_from_the_report_are_escaped(tmp_path) -> None:
    noted = replace(report(), notes=("<script>alert(1)</script>",))
    assert "<script>alert" not in write_figures(noted, tmp_path, png=False)[0].read_text()


def test_invalid_run_is_marked_on_its_measured_figures_only(tmp_path) -> None:
    drawn = {name: figure for name, _, figure in export.figures(report(valid=False))}
    assert "Host too busy" in drawn["gantt-first_epoch_measured"].layout.title.subtitle.text
    assert "busy" not in drawn["gantt-first_epoch_predicted"].layout.title.subtitle.text
    assert "Host too busy" in write_figures(report(valid=False), tmp_path, png=False)[0].read_text()


def test_simulated_report_draws_no_empty_figures() -> None:
    names = {name for name, _, _ in export.figures(report(executed=False))}
    assert names == {
        "cluster",
        "gantt-first_epoch_predicted",
        "memory-first_epoch_predicted",
        "breakdown",
        "epoch_times",
    }


def test_without_a_browser_png_is_skipped_with_a_note(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(export, "browser_path", lambda: None)
    files = write_figures(report(), tmp_path)
    assert not [file for file in files if file.suffix == ".png"]
    assert "No Chromium was found" in files[0].read_text()
    with pytest.raises(RuntimeSetupError, match="Install Chromium"):
        write_figures(report(), tmp_path, png=True)


def test_a_browser_that_dies_is_no_error(tmp_path, monkeypatch) -> None:
    import kaleido

    def dies(*args, **kwargs):
        raise OSError("the browser closed")

    monkeypatch.setattr(export, "browser_path", lambda: "/usr/bin/chromium")
    monkeypatch.setattr(kaleido, "write_fig_from_object_sync", dies)
    assert "the browser closed" in write_figures(report(), tmp_path)[0].read_text()


@pytest.mark.browser
@pytest.mark.skipif(browser_path() is None, reason="no Chromium on this machine")
def test_png_files_are_pictures(tmp_path) -> None:
    figure = next(export.figures(report())).figure
    files, why_none = export.write_pngs([export.Captioned("cluster", "", figure)], tmp_path, "auto")
    assert why_none == ""
    assert files[0].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("num_files", [0, 1, 3])
def test_a_disk_that_becomes_full_keeps_what_was_there_and_nothing_else(tmp_path, monkeypatch, num_files: int) -> None:
    written = []

    def refuse(path, text) -> None:
        if len(written) == num_files:
            raise WriteError(f"Writing '{path}' was asked for.", "No space left on device.", "Free some space.")
        written.append(path)
        path.write_text(text)

    monkeypatch.setattr(export, "write_text", refuse)
    with pytest.raises(WriteError):
        write_figures(report(), tmp_path / "new" / "figures", png=False)
    assert not list(tmp_path.iterdir())
    written.clear()
    (tmp_path / "index.html").write_text("mine")
    with pytest.raises(WriteError):
        write_figures(report(), tmp_path, png=False)
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]
