"""The benchmark of P-RGE with a tiny model: what it compares, not how fast."""

import json
from importlib.util import find_spec

import pytest

from workbench.core.errors import ConfigError, RuntimeSetupError
from workbench.runtime.memory import measured_in_child
from workbench_studies.bench import frame, p_rge, p_rge_engine
from workbench_studies.bench.p_rge import batch_of, prompts


def test_rows_all_have_the_length_that_was_asked_for_and_end_in_the_prompt():
    batch = batch_of(prompts("tiny-llama", 24), 5)
    assert batch.input_ids.shape == (5, 24)
    assert bool(batch.attention_mask.all())
    assert batch.positions.tolist() == [[23]] * 5
    assert len({tuple(row) for row in batch.input_ids.tolist()}) == 5


def test_sides_take_turns_and_ratios_are_taken_round_by_round():
    seen = []
    seconds = frame.interleaved({name: lambda step, name=name: seen.append((name, step)) for name in ("a", "b")}, 2)
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("b", 2), ("a", 2)]
    assert [len(each) for each in seconds.values()] == [2, 2]
    point = p_rge._point("steps", 1, 1, ([4.0, 9.0, 8.0], [2.0, 3.0, 4.0]))
    assert (point["ratio"], point["ratio_min"], point["ratio_max"], point["against_ms"]) == (2.0, 2.0, 3.0, 8000.0)


def test_passes_are_batched_where_that_is_clearly_faster():
    assert p_rge._fastest({"sequential": 1.0, "both": 0.98}) == "sequential"
    assert p_rge._fastest({"sequential": 1.0, "inner": 0.96, "both": 0.94}) == "both"
    assert p_rge._fastest({"sequential": 1.0, "outer": 1.2}) == "sequential"


def test_where_a_round_takes_long_the_warm_up_counts(monkeypatch):
    monkeypatch.setattr(frame, "LONG_S", -1.0)
    seen = []
    seconds = frame.interleaved({name: lambda step, name=name: seen.append((name, step)) for name in ("a", "b")}, 5)
    assert seen == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert [len(each) for each in seconds.values()] == [2, 2]


@pytest.mark.slow
def test_peaks_are_those_of_processes_of_their_own_and_their_failures_are_told():
    inference, training = (
        measured_in_child(p_rge.side_peak_bytes, side, "tiny-llama", 32, 4, 4) for side in ("inference", "P-RGE")
    )
    assert 0 < inference < 200e6
    assert 0 < training < 2 * inference
    with pytest.raises(RuntimeSetupError, match=r"The memory of loads.*nosuch.* was to be measured.*JSONDecodeError"):
        measured_in_child(json.loads, "nosuch")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("executorch") is None, reason="executorch is not installed")
def test_the_engine_is_compared_with_the_same_steps_in_pytorch(monkeypatch):
    peaks = {}

    def measured(measure, side, *words):
        """Measure in this process, without importing torch again.  A peak here may be 0: memory that is free already is
        used again.
        """
        peaks[side] = measure(side, *words)
        return peaks[side]

    monkeypatch.setattr(p_rge_engine, "measured_in_child", measured)
    report = p_rge_engine.bench(lambda line: None, points=(("tiny-llama-1", 24, 2, 2, 4, "label_words"),))
    [point] = report["points"]
    assert (point["steps"], point["q"], point["E"]) == (4, 2, 2)
    assert 0 < point["largest_relative_deviation"] < 1e-4
    assert point["file_mb"] > 0.01
    assert point["ratio"] == pytest.approx(point["engine_ms"] / point["eager_ms"])
    assert (point["engine_peak_mb"], point["eager_peak_mb"]) == (peaks["engine"] / 1e6, peaks["eager"] / 1e6)


def test_points_of_the_grid_are_measured_and_an_unknown_section_is_answered():
    report = p_rge.bench(
        lambda line: None, only=("steps",), model="tiny-llama-2", length=24, grid=((1, 1), (2, 1)), rounds=1
    )
    assert [(point["q"], point["E"]) for point in report["points"]] == [(1, 1), (2, 1)]
    assert set(report["points"][0]["tried"]) == {"sequential_ms", "both_ms"}
    assert set(report["points"][1]["tried"]) == {"sequential_ms", "outer_ms", "inner_ms", "both_ms"}
    assert all(point["execution"] + "_ms" in point["tried"] and point["ratio"] > 0 for point in report["points"])
    for point in report["points"]:
        alone_ms = min(point["passes_together_ms"], point["passes_apart_ms"])
        assert point["bound"] == pytest.approx(point["against_ms"] / alone_ms)
    assert report["smallest_ratio"] == min(point["ratio"] for point in report["points"])
    copies = p_rge.bench(
        lambda line: None, only=("copies",), model="tiny-llama-2", length=24, grid=((1, 1), (2, 4)), rounds=1
    )
    assert [(point["q"], point["E"], point["against"]) for point in copies["points"]] == [
        (1, 1, "all copies kept"),
        (2, 1, "all copies kept"),
    ]
    stored = p_rge.bench(
        lambda line: None, only=("quantized",), model="tiny-llama-2", length=24, grid=((1, 1), (1, 2)), rounds=1
    )
    assert [(point["section"], point["weights"], point["E"]) for point in stored["points"]] == [
        (section, storage, batch)
        for storage in ("nf4", "int8")
        for section, batch in (("quantized", 1), ("quantized", 2), ("steps", 1))
    ]
    with pytest.raises(ConfigError, match=r"steps, copies, full, quantized, memory.*Did you mean 'memory'"):
        p_rge.bench(only=("memori",))
