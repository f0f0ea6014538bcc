import csv
from dataclasses import replace

import pytest

from workbench.core.catalogue import data_folder
from workbench.core.errors import ConfigError, MissingDataError
from workbench_studies.papers import OOM, Check, Comparison, Item, Result, Settings, Table, find_item, items_of
from workbench_studies.papers.charts import Chart
from workbench_studies.papers.command import comparison_table, number_text, write
from workbench_studies.papers.drawing import draw
from workbench_studies.papers.items import PAPERS as REPRODUCED
from workbench_studies.papers.items import canonical
from workbench_studies.papers.result import as_quick_trial, paper_folder, paper_values, printed, shipped_result

PAPERS = ("confidant", "galaxy_plus", "pac_plus", "ringada")
TABLES = sorted(
    (paper, path.stem)
    for paper in PAPERS
    for folder in (paper_folder(paper), data_folder() / "papers" / paper)
    for path in folder.glob("*.csv")
)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("table5", "table5"),
        ("Table V", "table5"),
        ("TABLE VII", "table7"),
        ("Fig. 13", "fig13"),
        ("figure 3", "fig3"),
        ("fig.17", "fig17"),
        ("Fig. 18-executed", "fig18-executed"),
    ],
)
def test_items_are_found_by_the_names_that_people_give_them(written, name):
    assert canonical(written) == name
    assert find_item("pac_plus", written).name == name


def test_an_unknown_item_or_paper_is_answered_with_the_list():
    with pytest.raises(ConfigError, match=r"fig3, table1, table5.*Did you mean 'fig3'"):
        find_item("pac_plus", "Fig. 31")
    with pytest.raises(ConfigError, match="Known are pac_plus"):
        items_of("pac")


@pytest.mark.parametrize(("paper", "table"), TABLES)
def test_the_papers_values_load_with_unit_and_place(paper, table):
    values = paper_values(paper, table)
    assert len({tuple(value.labels.values()) for value in values}) == len(values) > 0, "two values have the same labels"
    for value in values:
        assert value.source
        is_words = paper != "pac_plus" or table == "motivation"
        assert is_words or isinstance(value.value, float) or value.value == OOM or value.value[0] == "["


@pytest.mark.parametrize("paper", REPRODUCED)
def test_every_file_of_printed_values_has_an_item(paper):
    folders = (paper_folder(paper), data_folder() / "papers" / paper)
    assert {path.stem for folder in folders for path in folder.glob("*.csv")} <= {item.name for item in items_of(paper)}


def test_table_5_has_all_its_cells_and_table_6_its_own_means():
    cells = printed("pac_plus", "table5")
    assert len(cells) == 10 * 12
    assert sum(value == OOM for value in cells.values()) == 60
    scores = printed("pac_plus", "table6")
    for model in ("T5-Base", "BART-Large", "T5-Large"):
        for task in ("MRPC", "STS-B", "SST-2", "QNLI"):
            mean = sum(scores[technique, model, task] for technique in ("full", "adapters", "lora")) / 3
            assert mean == pytest.approx(scores["mean of the three", model, task], abs=0.011)


def test_a_missing_or_malformed_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench_studies.papers.result.paper_folder", lambda paper: tmp_path)
    with pytest.raises(MissingDataError, match="table99"):
        paper_values("pac_plus", "table99")
    with (tmp_path / "table1.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["technique", "value", "unit", "source"], ["full", "1"]])
    with pytest.raises(MissingDataError, match="not of the form"):
        paper_values("pac_plus", "table1")


def test_deviations_are_per_cent_or_points_and_words_agree_or_differ():
    assert Comparison(labels=(), paper=2.0, ours=3.0).deviation == pytest.approx(50)
    assert Comparison(labels=(), paper=40.0, ours=43.0, deviation_in="points").deviation == pytest.approx(3)
    assert Comparison(labels=(), paper=OOM, ours=OOM).agrees is True
    assert Comparison(labels=(), paper=OOM, ours=1.5).agrees is False
    assert Comparison(labels=(), paper=None, ours=1.5).agrees is None
    assert Comparison(labels=(), paper=OOM, ours=1.5).deviation is None


@pytest.mark.parametrize(
    ("kind", "ours", "how"),
    [
        ("upper bound", 2.0, "refuted upper bound"),
        ("upper bound", 4.0, "upper bound"),
        ("lower bound", 4.0, "refuted lower bound"),
        ("lower bound", 3.0, "lower bound"),
        ("predicted", None, ""),
    ],
)
def test_a_bound_that_the_papers_value_breaks_is_called_refuted(kind, ours, how):
    assert Comparison(labels=(), paper=3.0, ours=ours, kind=kind).how == how


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.03516, "0.0352"), (12.0, "12"), (104.89, "104.9"), (OOM, OOM), (None, ""), (22980.4, "22980")],
)
def test_numbers_are_printed_short(value, text):
    assert number_text(value) == text


def test_results_and_figures_are_written_and_escaped(tmp_path):
    import plotly.graph_objects as go

    from workbench.plots.export import Captioned

    class Drawn(Item):
        __slots__ = ()

        def draw(self, result):
            return [Captioned("one", "a < b", go.Figure(go.Bar(x=[1], y=[2]), layout={"height": 200}))]

    result = Result(
        item="table1",
        title="A <title>",
        paper_section="II",
        source="computed",
        label_columns=("what",),
        comparisons=(Comparison(labels=("x",), paper=1.0, ours=1.1, unit="GB", note="why"),),
        tables=(Table(title="more", columns=("a",), rows=((1,),)),),
        checks=(Check(claim="c", holds=False, found="f"),),
        findings=("2 < 3",),
    )
    item = Drawn(paper="pac_plus", name="table1", title="t", source="computed", module="")
    files = write([(item, result)], tmp_path, title="all", png=False)
    assert [file.name for file in files] == ["index.html", "table1.json", "one.html"]
    page = files[0].read_text()
    assert "A &lt;title&gt;" in page and "FAILS:</b> C" in page and "<li>2 &lt; 3</li>" in page and "<title>all" in page
    assert "plotly.min.js" in (tmp_path / "one.html").read_text()
    without_paper = replace(result, paper_section="")
    page = write([(item, without_paper)], tmp_path, title="all", png=False)[0].read_text()
    assert "NOT AS WE EXPECTED:</b> C" in page  # an expectation of ours is no claim of a paper
    assert comparison_table(result).columns[-1] == "note"
    assert comparison_table(result, join_labels=True).columns == ("what", "paper", "ours", "unit", "deviation", "how")


def test_settings_have_three_seeds_unless_told():
    assert Settings().seeds == (0, 1, 2)


def test_a_quick_trial_is_marked_and_judges_nothing():
    measured = Comparison(
        labels=("F1",), paper=80.0, ours=2.0, unit="%", kind="measured", deviation_in="points", note="at full size"
    )
    computed = Comparison(labels=("time",), paper=10.0, ours=11.0)
    check = Check(claim="it is lower", holds=True, found="1.6 and 2.0")
    table = Table(title="Scores", columns=("F1",), rows=((2.0,),))
    result = Result(
        item="table1",
        title="Table I",
        paper_section="IV",
        source="simulated",
        comparisons=(measured, computed),
        checks=(check,),
        tables=(table,),
    )
    quick = as_quick_trial(result)
    assert quick.quick and quick.title == "Quick trial: Table I" and not quick.checks
    assert [(comparison.kind, comparison.deviation, comparison.agrees) for comparison in quick.comparisons] == [
        ("quick trial", None, None),
        ("computed", pytest.approx(10), None),
    ]
    assert "quick trial" in {row[-1] for row in comparison_table(quick).rows} and "tiny model" in quick.explanation[0]
    simulated = Result(
        item="fig1", title="Fig. 1", paper_section="IV", source="simulated", comparisons=(computed,), checks=(check,)
    )
    assert as_quick_trial(simulated) == simulated  # nothing was executed


def test_words_are_drawn_as_fields_that_agree_or_differ():
    chart = Chart(name="fig17", caption="", kind="words", unit="devices")
    cells = [
        Comparison(labels=(model, count), paper="[2]", ours=ours)
        for model, count, ours in (("A", "2", "[2]"), ("A", "4", "[1-1]"))
    ]
    result = Result(
        item="fig17",
        title="T",
        paper_section="V",
        source="simulated",
        label_columns=("model", "boards"),
        comparisons=tuple(cells),
    )
    [drawn] = draw([chart], result)
    same, different = drawn.figure.data
    assert (same.name, list(same.text)) == ("the same", ["paper [2]<br>ours [2]"])
    assert (different.name, list(different.text)) == ("different", ["<b>paper [2]<br>ours [1-1]</b>"])
    assert "1 of 2 are the same" in drawn.figure.layout.title.subtitle.text


def test_more_lines_than_colours_differ_in_their_dashes():
    [drawn] = find_item("p_rge", "table2-references").draw(shipped_result("p_rge", "table2-references"))
    looks = {(line.line.color, line.line.dash) for line in drawn.figure.data}
    assert len(looks) == len(drawn.figure.data) == 8 > len({colour for colour, _ in looks})
