"""P-RGE's computed tables, on the real computation."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from functools import partial

import pytest

from workbench.core.catalogue import data_folder, load_device
from workbench.methods.p_rge.published import load_constants
from workbench.profiler.descriptions import describe
from workbench_studies.papers import Settings, find_item
from workbench_studies.papers.items import median_deviation
from workbench_studies.papers.p_rge import memory, steps, tasks
from workbench_studies.papers.p_rge.counted import forward_memory
from workbench_studies.papers.p_rge.testbed import GIB, LLAMA, TINY, memory_rule
from workbench_studies.papers.result import paper_folder, paper_values, printed

CONSTANTS = load_constants()
CELLS = {
    "table2": 7 * 14,
    "table3": 72,
    "table4": 48,
    "table5": 16,
    "table6": 18,
    "table7": 4,
    "table8": 13,
    "table9": 24,
    "table10": 12,
    "table11": 18,
    "table12": 18,
    "table13": 18,
    "table14": 8,
    "table15": 42,
    "table16": 63,
    "table17": 42,
    "table18": 63,
    "table1": 6,
    "claims": 8,
}


def compared(name, ours, constants=CONSTANTS):
    return find_item("p_rge", name).compare(partial(ours, constants))


@pytest.mark.parametrize("table", sorted(path.stem for path in paper_folder("p_rge").glob("*.csv")))
def test_the_papers_values_were_read_whole_with_unit_and_place(table):
    values = paper_values("p_rge", table)
    assert len({tuple(value.labels.values()) for value in values}) == len(values) == CELLS[table], (
        "a cell is missing, or two have the same labels"
    )
    assert all(value.source for value in values)


def test_printed_speedups_agree_with_printed_times():
    cells = printed("p_rge", "table4")
    for (model, method, length, batch), value in cells.items():
        if method == "speedup":
            assert value == pytest.approx(
                cells[model, "MeZO (LoRA-FA)", length, batch] / cells[model, "P-RGE", length, batch], abs=0.02
            )


def test_each_constant_says_what_fixed_it():
    lines = (data_folder() / "papers/p_rge/constants.toml").read_text(encoding="utf-8").splitlines()
    kinds = re.compile(r"\[(fitted|counted|datasheet|paper|assumed)\]|a scale|bytes = 1\.0")
    for field in fields(CONSTANTS):
        at = next(index for index, line in enumerate(lines) if line.startswith(f"{field.name} ="))
        above = at
        while above and not lines[above].startswith("["):  # the words stand on the line or above its group
            above -= 1
        assert any(kinds.search(line) for line in lines[above + 1 : at + 1]), field.name


def test_table_3_every_cell_within_10_percent_and_the_rows_that_nothing_was_fitted_on_within_3():
    comparisons = compared("table3", memory.step_gb)
    assert len(comparisons) == 72
    assert max(abs(comparison.deviation) for comparison in comparisons) < 10
    assert max(abs(comparison.deviation) for comparison in comparisons if comparison.kind == "computed") < 3
    assert [comparison.labels for comparison in comparisons if comparison.kind == "fitted"] == [
        (TINY, "FO (full)", "64", "1"),
        (TINY, "FO (full)", "256", "16"),
    ]
    # The largest output is the logits: without them the rows would not rise by more than a layer's scratch.
    gathered = forward_memory(describe(LLAMA), memory_rule(CONSTANTS), rows=32, sequence_length=256, targets=1)
    reference = forward_memory(describe(LLAMA), memory_rule(CONSTANTS), rows=32, sequence_length=256)
    assert reference["largest output"] == 8 * 32000 * 32 * 256 > 2 * gathered["largest output"]
    assert sum(reference.values()) / GIB == pytest.approx(14.53, abs=0.05)


@pytest.mark.parametrize("table", ["table17", "table18"])
def test_tables_17_and_18_follow_from_one_number_a_task(table):
    comparisons = compared(table, partial(memory.run_gb, table))
    assert {comparison.labels[0] for comparison in comparisons if comparison.kind == "fitted"} == {tasks.STANDARD}
    assert median_deviation(comparisons) < 1
    assert max(abs(comparison.deviation) for comparison in comparisons) < 10


def test_the_texts_33_percent_of_memory_are_table_18s():
    claims = printed("p_rge", "claims")
    largest = {table: max(memory.more_memory(printed("p_rge", table)).values()) for table in memory.MODEL_IN}
    assert round(largest["table18"]) == claims["more memory by inner-loop parallelization, Llama2-7B",]
    assert largest["table17"] > 36  # so the text's Llama2-7B is no slip


def test_the_constants_fit_their_own_cells():
    def deviations(comparisons):
        return [abs(comparison.deviation) for comparison in comparisons if comparison.kind == "fitted"]

    assert max(deviations(compared("table13", steps.server_s))) < 1
    assert max(deviations(compared("table4", steps.jetson_s))) < 3
    assert steps.speedup(CONSTANTS, LLAMA, "nf4", 64, 1) == pytest.approx(1.97, abs=0.01)
    assert steps.speedup(CONSTANTS, LLAMA, "float16", 64, 1) == pytest.approx(1.79, abs=0.01)
    slower = replace(CONSTANTS, a100_flops_per_s=CONSTANTS.a100_flops_per_s / 2)
    assert max(deviations(compared("table13", steps.server_s, slower))) > 50
    assert load_device("oneplus-12").flops_per_s == pytest.approx(CONSTANTS.oneplus_flops_per_s, rel=0.01)


def test_padding_is_counted_for_what_a_folder_holds(tmp_path):
    folder = tmp_path / "SST-2"
    folder.mkdir()
    rows = "".join(f"{'very ' * (index % 7)}good film {index}\t{index % 2}\n" for index in range(60))
    for name in ("train", "dev"):
        (folder / f"{name}.tsv").write_text(f"sentence\tlabel\n{rows}", encoding="utf-8")
    result = tasks.statistics(Settings(data=tmp_path))
    assert set(result) == {"sentiment", "sst2"}
    assert [row.batch_size for row in result["sst2"]] == list(tasks.BATCHES)
    assert result["sst2"][0].share == pytest.approx(0.0, abs=1e-9)
    assert result["sst2"][-1].share > 0.2
