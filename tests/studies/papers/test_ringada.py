"""RingAda's table on the real computation."""

from __future__ import annotations

from pathlib import Path

import pytest
from computed import computed

from workbench.core.serial import from_json, to_json
from workbench.methods.ringada.published import average, layer_times, load_constants
from workbench.trainings.rings import Curve, Training
from workbench_studies.papers import Result, Settings, find_item
from workbench_studies.papers.ringada.executed import equal_terms, question_scores
from workbench_studies.papers.ringada.testbed import seconds_after
from workbench_studies.papers.ringada.training import ours, weights_mb

CONSTANTS = load_constants()


def test_table_1_has_three_kinds_of_cells() -> None:
    result = computed("ringada", "table1")
    cells = {comparison.labels: comparison for comparison in result.comparisons}
    assert len(cells) == 15 and {cell.kind for cell in cells.values() if cell.ours is not None} == {
        "fitted",
        "lower bound",
        "predicted",
    }
    assert abs(cells["Single", "convergence time"].deviation or 0) < 0.01  # the constant is what it is fitted to
    assert abs(cells["RingAda", "convergence time"].deviation or 0) < 5
    assert all(
        cell.ours is None for labels, cell in cells.items() if labels[1] in ("F1", "EM", "epochs to convergence")
    )


def test_sizes_and_times() -> None:
    assert weights_mb(CONSTANTS, "Single") == pytest.approx(711, rel=0.01)  # mBERT has 178 million parameters
    assert CONSTANTS.layer_s == pytest.approx(5103.60 / 800 / 24, rel=1e-4)
    assert average(CONSTANTS, "PipeAdapter", 8) == pytest.approx(8.25)  # (8 + 4 - 1) / 8 times 6
    by_depth, _ = layer_times(CONSTANTS, "RingAda", 1)
    assert list(by_depth) == list(range(1, 13)) and by_depth[12] == pytest.approx(
        24
    )  # all are trained: one mini-batch after the other
    assert list(by_depth.values()) == sorted(by_depth.values())  # fewer trained layers never take longer
    of_schemes = [
        average(CONSTANTS, scheme, CONSTANTS.micro_batches) for scheme in ("RingAda", "PipeAdapter", "Single")
    ]
    assert of_schemes == sorted(of_schemes)
    assert average(CONSTANTS, "PipeAdapter", 1) == pytest.approx(average(CONSTANTS, "Single", 1))
    assert not computed("ringada", "table1").checks  # so the order is a finding
    times = seconds_after(CONSTANTS, "RingAda")
    assert len(times) == 800 and times[39] == pytest.approx(
        40 * CONSTANTS.layer_s * layer_times(CONSTANTS, "RingAda", 4)[0][1]
    )


def test_figure_3_trains_quickly_at_a_tiny_size_and_is_drawn(tmp_path: Path) -> None:
    item = find_item("ringada", "Fig. 3")
    result = item.run(Settings(quick=True, seeds=(0,), workdir=tmp_path))
    assert result.source == "executed" and len(result.comparisons) == 3
    assert result.quick and not result.checks and result.title.startswith("Quick trial: ")
    losses = {result.series[f"loss, {scheme}"] for scheme in ("Single", "PipeAdapter", "RingAda")}
    assert len(losses) == 3  # stashed weights are not Single's
    for scheme in ("Single", "PipeAdapter", "RingAda", "FedAvg"):
        assert len(result.series[f"accuracy, {scheme}"]) == 4
    assert len(list((tmp_path / "fig3").iterdir())) == 4  # trainings are kept
    assert item.run(Settings(quick=True, seeds=(0,), workdir=tmp_path)) == result
    assert [figure.name for figure in item.draw(from_json(to_json(result), Result))] == ["fig3a", "fig3b"]


def test_schemes_are_compared_at_the_same_loss_and_after_the_same_time() -> None:
    def curves(losses: tuple[float, ...]) -> list[Curve]:
        return [Curve(losses=losses, scores=(60.0, 70.0 + seed), test={}) for seed in (0, 1, 2)]

    ring, soonest = curves((0.5, 0.3)), curves((0.4, 0.35))
    times = {"RingAda": (4.0, 8.0), "Single": (12.0, 24.0), "FedAvg": (3.0, 6.0), "early": (2.0, 6.0)}
    rows = equal_terms(
        {"RingAda": ring, "Single": curves((0.3, 0.1)), "FedAvg": soonest, "early": curves((0.3, 0.2))}, times
    )
    assert rows == [
        ("RingAda", 8.0, 60.0, 0.0),
        ("Single", 12.0, None, None),
        ("FedAvg", None, 71.0, 1.0),
        ("early", 2.0, 71.0, 1.0),
    ]


def test_table_1_s_scores_are_trained_where_it_is_named_and_kept_by_their_settings(tmp_path: Path) -> None:
    settings = Settings(quick=True, seeds=(0,), workdir=tmp_path)
    rows, means, model = question_scores(settings)
    assert model == "tiny-bert-2 (quick trial)"
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "table1").iterdir()}
    assert len(kept) == 3 and question_scores(settings) == (rows, means, model)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "table1").iterdir()} == kept
    assert [row[:4] for row in rows] == [
        (scheme, "questions", 32, 1) for scheme in ("Single", "PipeAdapter", "RingAda")
    ]
    assert len({row[4] for row in rows}) == 3
    constants = load_constants()
    assert (
        ours(constants, means, "PipeAdapter", "F1") == means["PipeAdapter", "F1"] == rows[1][5]
        and ours(constants, {}, "Single", "F1") is None
    )
    assert Training(steps=8).digest != Training(steps=8, learning_rate=2e-3).digest
