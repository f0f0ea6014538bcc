"""Every parameter of every lab: its usual values pass, and each odd value ends in one sentence that names it, before
anything is loaded."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest

from workbench.core.errors import WorkbenchError
from workbench_labs.exercises.cuts import equal_cut, every_cut, makespan_s, stage_seconds
from workbench_labs.parameters import LABS, check_parameters

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
NAN = float("nan")


@cache
def code_cells(lab: str) -> list[str]:
    return [
        cell.source
        for cell in nbformat.read(NOTEBOOKS / f"{lab}.ipynb", as_version=4).cells
        if cell.cell_type == "code"
    ]


def assigned(lab: str) -> set[str]:
    """Return the names that a lab's parameters cell sets."""
    names = [
        node
        for node in ast.walk(ast.parse(code_cells(lab)[0]))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    return {node.id for node in names}


def usual(lab: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    exec(code_cells(lab)[0], values)
    return values


@pytest.mark.parametrize("is_tiny", ["1", ""])
@pytest.mark.parametrize("lab", LABS)
def test_usual_values_pass_and_every_parameter_is_described(
    lab: str, is_tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_TINY", is_tiny)
    check_parameters(lab, usual(lab))
    assert set(LABS[lab].__struct_fields__) == assigned(lab)
    assert f'check_parameters("{lab}", globals())' in code_cells(lab)[1]


def test_every_lab_is_described() -> None:
    assert set(LABS) == {path.stem for path in NOTEBOOKS.glob("[0-9]*.ipynb")}


COMMON: dict[str, list[Any]] = {
    "model": ["tiny-brt", "", 3, None, ["tiny-bert"]],
    "cluster_name": ["lptop", "", 2, None],
    "task": ["sentimnt", 1, None],
    "fidelity": ["best", None, 1],
    "png": ["yes", None, 2],
    "output": [None, 7, "x" * 5000],
    "seed": [0.5, "0", None, 2**64],
    "train_samples": [0, -1, "all", 1.5, True, 10**12],
    "validation_samples": [0, -1, "all", NAN],
    "test_samples": [0, -1, "all"],
    "epochs": [0, -1, 10**9, 1.5, "2", None, NAN],
    "batch_size": [0, -4, 31, 10**9, 4.0, "32", None],
    "micro_batches": [0, -1, 5, 10**9, "4", None],
    "num_micro_batches": [0, -1, 1.5, "4", None, 10**9],
    "student": ["", "../x", "a b", 7, None, "x" * 40],
}
"""Odd values of the parameters that several labs have; 31 and 5: no multiples."""
ODD: dict[str, dict[str, list[Any]]] = {
    "00_quickstart": {"sweep_steps": [0, -1, 1.5, "6", None, 10**9]},
    "01_devices": {
        "measure_s": [0, -1, NAN, 1e9, "1", None],
        "message_bytes": [[], [1], [5, 5], [0, 10], [1.5, 10], 10, None, ["1", "2"], [1, 10**15]],
        "bandwidths": [[], 50, [0], [-5], [NAN], ["50"], [1e300], None, [[5]]],
        "most_s": [0, -1, NAN, "1", None, 1e9],
    },
    "03_beside_the_model": {
        "train_samples": [2, None],
        "validation_samples": [None],
        "test_samples": [None],
        "your_samples": [0, -1, "64", None, 10**9],
        "epochs": [1],
        "reduction": [0, -8, "many", 1.5, NAN, 10**9, None],
        "initial_ways": [[], ["zeros"], "zero", None, [0]],
        "target_score": [-1, 101, NAN, "72", None],
    },
    "05_slopes": {
        "queries": [0, -1, 1.5, "4", 10**9],
        "epsilon": [0, -1, NAN, 1e300, "small", None],
        "learning_rate": [0, -1, NAN, 1e300, "low"],
        "steps": [0, -1, 10**9, 1.5],
        "studied_queries": [0, -1, 10**9],
        "epsilons": [[], [0], [-1], [NAN], ["1"], 0.1, None],
        "repeats": [0, -1, 1.5, "5", 10**9],
    },
    "06_forward_only": {
        "queries": [0, -1, 1.5, "4", 10**9],
        "epsilon": [0, -1, NAN, 1e300, "small", None],
        "learning_rate": [0, -1, NAN, 1e300, "low"],
        "loss": ["hinge", "", None, 1],
        "steps": [0, -1, 10**9, 1.5],
        "train_samples": [None],
        "validation_samples": [None],
        "score_every": [0, -1, 0.5],
        "compared_queries": [[], [0], [3], 4, None, ["1"], [10**9]],
        "compared_steps": [0, -1, 10**9],
        "parts": [[0], [], [-1], [1.5], 4, None, [10**9], ["1"]],
        "measured_s": [0, -1, NAN],
        "engine_steps": [-1, 0.5, None, 10**9],
        "device_mb": [0, 1.5, -1, NAN, "1000", 1e300],
        "spread_queries": [0, -1, 10**9],
        "spread_steps": [0, -1, 1, 10**9],
    },
    "07_cut_a_layer": {
        "megabits": [0, -1, NAN, "4", None, 1e300],
        "product_ms": [0, -1, NAN, "25", None, 1e300],
        "paper_model": ["ViT-Hug", None],
        "paper_cluster": ["galaxy-env-z", None],
        "paper_tokens": [0, -1, NAN, 10**9],
        "cluster_name": ["phones"],
        "tokens": [0, -1, 10**9, "48"],
        "requests": [0, -1, 10**9, 1.5],
        "serving_cluster": ["pare", "", 2, None],
    },
    "08_break_it": {
        "tokens": [0, -1, 10**9, "48"],
        "stream_requests": [0, -1, 1.5, 10**9],
        "straggler": [9, 2, -1, "oak", None, 0.5],
        "slower": [1, 0, -1, NAN, 1e300, "twice"],
        "text_model": ["gpt", None],
        "new_tokens": [0, -1, "4", None, 10**9],
    },
    "09_data_that_stay": {
        "rule": ["dirichlet", "dirichlet:0", "dirichlet:nan", "sizes:1", "random", None, ""],
        "blocks": [[], [0, 3], [-1, 4], [3], 14, None, [1.5, 2], [10**9, 1]],
        "depth": [0, 99, -1, 15, 1.5, "3", None],
        "steps": [0, -1, 1.5, 10**9, "8"],
        "layer_ms": [0, -1, NAN, 10**9, "4", None],
    },
    "10_never_drain": {
        "stages": [0, 1, -1, 10**9, 2.5],
        "mini_batches": [0, -1, 10**9],
        "layer_ms": [0, -1, NAN, 10**9, "4", None],
        "learning_rate": [NAN, -1, 1e300, 0, "0.3", None],
        "profile_seed": [0.5, "3", None],
        "num_devices": [99, 0, 1, -1, 2.5, "3"],
        "training_devices": [99, 0, 1, -1, 4],
        "technique": ["lra", None, 3],
        "window": [-1, 1.5, None],
        "snapshot_every": [-1, 1.5, None],
        "fault_step": [0, -1, 1.5, None],
        "faults": ["leave", "leave:9@step1", "melt:1@step1", "leave:1@step0", None, 1],
    },
    "02_write_the_simulator": {
        "forward_s": [0, -1, NAN, 2, "1", None],
        "backward_s": [0, -1, NAN, 2, "1", None],
    },
    "04_cut_for_unequal_devices": {
        "paper_cluster": ["pac-env-z", None],
        "paper_model": ["BERT-Base", "T6", None],
        "group_cluster": ["lptop", "", None],
        "train_samples": [None],
        "sweep_steps": [0, -1, 10**9],
        "layer_ms": [[], [0, 1, 1, 1], [-1, 1, 1, 1], 5, None, [NAN] * 4, [1, 1, 1], [1] * 17, ["1"] * 4],
        "slowness": [[], [1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1], [0.5, 1, 1, 1], 2, None, [NAN] * 4],
    },
    "11_reproduction_clinic": {
        "paper": ["p-rge", "", None, 3],
        "item": ["", "Table 3", "../x", None, 3, "x" * 40],
    },
    "12_kit_day": {
        "max_length": [0, -1, 1.5, "64", None],
        "steps": [0, -1, 1.5, None, 10**9],
        "loss": ["kill:9@step3", "kil:1@step3", 3, None],
    },
}
CASES = [
    pytest.param(lab, name, value, id=f"{lab[:2]}-{name}-{str(value)[:20]!a}")
    for lab in LABS
    for name in LABS[lab].__struct_fields__
    for value in COMMON.get(name, []) + ODD[lab].get(name, [])
    if not (
        lab in ("05_slopes", "06_forward_only", "10_never_drain") and name == "batch_size" and value == 31
    )  # they have no micro-batches
]


@pytest.mark.parametrize(("lab", "name", "value"), CASES)
def test_an_odd_value_is_one_sentence(lab: str, name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_TINY", "1")
    with pytest.raises(WorkbenchError) as raised:
        check_parameters(lab, usual(lab) | {name: value})
    sentence, given = str(raised.value), value if isinstance(value, list) else [value]
    assert "\n" not in sentence and len(sentence) < 1000
    assert name in sentence or any(repr(one) in sentence for one in given)


@pytest.mark.parametrize("lab", LABS)
def test_every_parameter_has_odd_values(lab: str) -> None:
    assert not [name for name in LABS[lab].__struct_fields__ if not COMMON.get(name, []) + ODD[lab].get(name, [])]


@pytest.mark.parametrize(
    ("lab", "name", "value", "phrases"),
    [
        ("06_forward_only", "parts", [0], ["parts[0] = 0", ">= 1"]),
        ("07_cut_a_layer", "cluster_name", "phones", ["'phones'", "has 3 devices", "2, 4 or 8"]),
        ("09_data_that_stay", "depth", 99, ["depth = 99", "14 blocks"]),
        ("10_never_drain", "learning_rate", NAN, ["learning_rate = nan", "0.05"]),
        ("10_never_drain", "training_devices", 4, ["training_devices = 4", "num_devices = 3"]),
        ("08_break_it", "new_tokens", 0, ["new_tokens = 0", ">= 1"]),
        ("03_beside_the_model", "reduction", "many", ["reduction", "many", "int"]),
        ("00_quickstart", "epochs", 0, ["epochs = 0", "at least 1"]),
    ],
)
def test_the_sentence_names_parameter_value_and_range(lab: str, name: str, value: Any, phrases: list[str]) -> None:
    with pytest.raises(WorkbenchError) as raised:
        check_parameters(lab, usual(lab) | {name: value})
    assert [phrase for phrase in phrases if phrase not in str(raised.value)] == [], str(raised.value)


def test_values_of_other_libraries_and_a_missing_one(tmp_path: Path) -> None:
    values = usual("06_forward_only")
    check_parameters("06_forward_only", values | {"output": tmp_path, "parts": (1, 2), "epsilon": 1})
    for odd in (object(), {1, 2}, np.arange(3), 1j):
        with pytest.raises(WorkbenchError, match="parts"):
            check_parameters("06_forward_only", values | {"parts": odd})
    with pytest.raises(WorkbenchError, match="parts"):
        check_parameters("06_forward_only", {name: value for name, value in values.items() if name != "parts"})


@pytest.mark.parametrize("is_tiny", ["1", ""])
def test_the_equal_cut_of_lab_04_is_clearly_slower_than_the_best(is_tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_TINY", is_tiny)
    values = usual("04_cut_for_unequal_devices")
    layer_s = [[factor * one / 1e3 for one in values["layer_ms"]] for factor in values["slowness"]]
    layers, size = len(values["layer_ms"]), len(layer_s)
    slowest = {counts: max(stage_seconds(counts, layer_s)) for counts in every_cut(layers, size)}
    least_s = min(slowest.values())
    [best] = [counts for counts, own_s in slowest.items() if own_s < least_s * 1.001]
    equal_s, best_s = (makespan_s(cut, layer_s, values["num_micro_batches"]) for cut in (equal_cut(layers, size), best))
    assert equal_s > 1.3 * best_s
