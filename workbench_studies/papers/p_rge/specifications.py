"""The paper's prompts, settings and devices next to ours (P-RGE, Tables 8, 9 and 14), and its results with FO-Adam, to
which we compare nothing (Tables 10 and 11).
"""

from __future__ import annotations

from collections.abc import Iterable

from workbench.methods.p_rge.options import PRGEOptions
from workbench.tasks.wording import PROMPTS
from workbench_studies.papers.device_titles import title_number
from workbench_studies.papers.items import Item, each_cell
from workbench_studies.papers.p_rge.executed import rows_of, trials
from workbench_studies.papers.result import Number, Result, Settings

DEVICES = {"NVIDIA Jetson Orin Nano": "jetson-orin-nano", "OnePlus 12": "oneplus-12"}
KINDS = {"classification": "cls.", "multiple_choice": "mch.", "question_answering": "QA"}
EXPERIMENTS = {
    "FO (Full)": ("FO-SGD", "full"),
    "FO (LoRA-FA)": ("FO-SGD", "lora_fa"),
    "MeZO (Full)": ("MeZO", "full"),
    "P-RGE": ("P-RGE", "lora_fa"),
}
FULL_STEPS = 100
"""Fewer are the row that takes a larger batch instead."""
TASKS = {"SST-2": "sst2", "WinoGrande": "winogrande"}
"""Our names of tasks that differ from the paper's in more than case."""


@each_cell
def table8(task: str, quantity: str) -> Number:
    """Return the kind of a task's prompt."""
    prompt = PROMPTS.get(TASKS.get(task, task.lower()))
    return None if prompt is None else KINDS[prompt.kind]


def _grid(values: Iterable[float]) -> Number:
    """Return one value as a number, several as words."""
    each = sorted(set(values))
    return float(each[0]) if len(each) == 1 else ", ".join(f"{value:g}" for value in each)


def table9(item: Item, settings: Settings) -> Result:
    """Compare the paper's grids with those of our executed tables, and its LoRA with a run's default."""
    options, tried = PRGEOptions(), trials()
    rows = rows_of("table2", settings) | rows_of("table2-references", settings)

    def ours(model: str, experiment: str, quantity: str) -> Number:
        if experiment == "LoRA":
            return float(getattr(options, quantity))
        method, technique = EXPERIMENTS[experiment]
        trials = [trial for trial in rows.values() if (trial.method, trial.technique) == (method, technique)]
        grids: dict[str, Iterable[float]] = {
            "learning rate": tried["rates"][f"{method}, {technique}"],
            "batch size": [trial.queries * trial.batch_size for trial in trials if trial.steps >= FULL_STEPS],
            "q": [trial.queries for trial in trials],
            "epsilon": [trial.epsilon for trial in trials],
        }
        return _grid(grids[quantity])

    return item.result(item.compare(ours))


@each_cell
def table10(*labels: str) -> None:
    """Compare nothing with the paper's scores with FO-Adam; `table2-references` trains two of them on other data."""


table11 = table10


@each_cell
def table14(device: str, quantity: str) -> Number:
    """Return what the catalogue says of a device; of a phone it names no cores."""
    return title_number(DEVICES[device], quantity) if quantity in ("memory", "cores", "clock") else None
