"""When Parallel Adapters are on a par with LoRA: widths on every task, remedies for pairs, another backbone (PAC+,
section VI-B).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workbench.core.serial import read_toml
from workbench.tasks.task import Task
from workbench.trainings import techniques as runs
from workbench.trainings.inputs import task_of
from workbench_studies.papers.items import Item
from workbench_studies.papers.pac_plus.differences import ensemble
from workbench_studies.papers.pac_plus.executed import (
    EMBEDDED,
    OURS,
    TITLES,
    less,
    outcomes_of,
    paper_means,
    tasks_of,
    tested,
    training,
)  # fmt: skip
from workbench_studies.papers.pac_plus.testbed import PAPER
from workbench_studies.papers.result import Number, Result, Row, Settings, paper_folder

_COMPARED = read_toml(paper_folder(PAPER) / "trainings.toml")
WIDTHS, REMEDIES, FEWER_TAPS, SMOLLM2 = (_COMPARED[name] for name in ("widths", "remedies", "fewer_taps", "smollm2"))
PAIRS, QUICK_DECODER = ("stsb", "mrpc"), "tiny-llama-2"
PAPERS_VARIANT = "r = 8"
"""The paper's width (section VI-A); what else is tried is ours."""


def parity(item: Item, settings: Settings) -> Result:
    """Train Parallel Adapters of each width and LoRA on each task with each seed; an ensemble is the mean of the seeds'
    logits.
    """
    tasks = dict.fromkeys((EMBEDDED, *tasks_of(settings)))
    return against_lora(item, settings, {name: WIDTHS | REMEDIES if name == EMBEDDED else WIDTHS for name in tasks})


def parity_remedies(item: Item, settings: Settings) -> Result:
    """Train Parallel Adapters in other ways, and LoRA, on pairs of sentences, with each seed."""
    return against_lora(item, settings, dict.fromkeys(PAIRS, REMEDIES | FEWER_TAPS))


def parity_smollm2(item: Item, settings: Settings) -> Result:
    """Train Parallel Adapters and LoRA on a decoder, on pairs of sentences, with each seed."""
    shared = {key: value for key, value in SMOLLM2.items() if key != "variants"}
    changes = {"model": QUICK_DECODER} if settings.quick else shared | {"samples": tuple(SMOLLM2["samples"])}
    result = against_lora(item, settings, dict.fromkeys(PAIRS, SMOLLM2["variants"]), **changes)
    frequent = frequent_score(task_of(training(settings, "mrpc", **changes), settings.data))
    return replace(result, findings=(*result.findings, item.finding("frequent", score=frequent)))


def frequent_score(task: Task) -> float:
    """Return the test score of the training split's most frequent answer, always given."""
    return runs.score_answers(task, [statistics.mode(task.train.labels)] * len(task.test.labels), task.test.labels)


def against_lora(
    item: Item, settings: Settings, variants_by_task: Mapping[str, Mapping[str, dict[str, Any]]], **changes: Any
) -> Result:
    """Return the result of LoRA and variants of Parallel Adapters.

    variants_by_task: each variant's changes of the settings.  changes: to the comparison's settings, of all trainings.
    """
    comparisons, checks, findings, paper = [], [], list[str](), paper_means("table6")
    rows: list[Row] = []
    for name, variants in variants_by_task.items():
        plans = {variant: training(settings, name, **changes | variants[variant]) for variant in variants}
        outcomes_by_key = outcomes_of(settings, {"LoRA": training(settings, name, "lora", **changes)} | plans)
        lora, title = outcomes_by_key["LoRA"], TITLES[name]
        task = task_of(lora[0].training, settings.data)
        for variant, outcomes in outcomes_by_key.items():
            texts: tuple[Number, Number] = (None, None)
            together = ensemble(outcomes)
            if variant != "LoRA":
                single, joined = (
                    less(settings, outcomes, lora),
                    less(settings, [replace(outcomes[0], test_outputs=together)], lora),
                )
                texts = (single.text, joined.text)
                theirs = (
                    paper[OURS, title] - paper["lora", title]
                    if (OURS, title) in paper and variant == PAPERS_VARIANT
                    else None
                )
                comparisons.append(item.cell((variant, title), theirs, single.points))
                if variant == PAPERS_VARIANT:
                    judged = {"what": f"{variant} on {title}", "difference": single.text, "p": single.p_value}
                    checks.append(item.check("parity", single.high >= 0, **judged))
                    sides, difference = f"{variant}, {len(outcomes)} seeds together, against single LoRA", joined
                else:
                    sides, difference = variant, single
                findings.append(
                    item.finding(
                        "variant",
                        what=f"{sides} on {title}",
                        difference=difference.text,
                        p=difference.p_value,
                        verdict="contradicted" if difference.high < 0 else "not contradicted",
                    )
                )
            validation = statistics.fmean(outcome.validation_score for outcome in outcomes)
            joint = runs.score(task, together, task.test.labels)
            rows.append(
                (title, variant, outcomes[0].trainable_parameters, validation, *tested(outcomes), joint, *texts)
            )
    return item.result(comparisons, tables={"variants": rows}, checks=checks, findings=findings)
