"""Beside Table 2: first-order references, MeZO over all parameters, fewer steps, the loss over the vocabulary; executed (section 4.1)."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from workbench.plots.export import Captioned
from workbench.reproduce.p_rge import executed_table2
from workbench.reproduce.p_rge.executed_runs import Trial
from workbench.reproduce.p_rge.executed_settings import FIRST_ORDER_BATCH, FIRST_ORDER_STEPS, SHORT_STEPS, run_searched, trial
from workbench.reproduce.result import Check, Result, Settings

NAME = "table2-references"
Q4 = executed_table2.Q4
VOCABULARY = f"{Q4}, loss over the vocabulary"
FEWER_STEPS = "MeZO (q=4, E=16, a quarter of the steps)"
ONE_SEED = (VOCABULARY, "MeZO (full)", "FO-SGD (LoRA-FA)", "FO-SGD (full)", "FO-Adam (LoRA-FA)", "FO-Adam (full)")
"""Trained with the first seed only."""


def rows(settings: Settings) -> dict[str, Trial]:
    """Return each row's trial; the first is Table 2's."""
    first_order: dict[str, Any] = {"batch_size": FIRST_ORDER_BATCH, "steps": FIRST_ORDER_STEPS}
    return {
        Q4: executed_table2.rows(settings)[Q4],
        VOCABULARY: trial(settings, "P-RGE", loss="vocabulary", queries=4, batch_size=4, steps=SHORT_STEPS),
        FEWER_STEPS: trial(settings, "P-RGE", queries=4, batch_size=16, steps=SHORT_STEPS // 4),
        "MeZO (full)": trial(settings, "MeZO", "full", queries=1, batch_size=16, steps=SHORT_STEPS),
        "FO-SGD (LoRA-FA)": trial(settings, "FO-SGD", **first_order),
        "FO-SGD (full)": trial(settings, "FO-SGD", "full", **first_order),
        "FO-Adam (LoRA-FA)": trial(settings, "FO-Adam", **first_order),
        "FO-Adam (full)": trial(settings, "FO-Adam", "full", **first_order),
    }


def run(settings: Settings) -> Result:
    """Execute it, or take what was executed before."""
    wanted = rows(settings)
    seeds = {name: settings.seeds[:1] if name in ONE_SEED else settings.seeds for name in wanted}
    outcomes = run_searched(settings, wanted, seeds, rate_of={FEWER_STEPS: Q4})
    scores = {name: [one.test_score for one in each] for name, each in outcomes.items()}
    batch, steps = fmean(scores[Q4]), fmean(scores[FEWER_STEPS])
    return Result(
        item=NAME,
        title="Beside Table 2: first-order, all parameters, fewer steps",
        paper_section="4.1",
        source="executed",
        label_columns=("method",),
        comparisons=executed_table2.comparisons(scores, ONE_SEED),
        tables=(executed_table2.seed_table(outcomes), executed_table2.validation_table(outcomes)),
        checks=(
            Check(
                claim="more queries at the price of batch (Table 1, row 3) do better than at the price of steps (row 2)",
                holds=batch > steps,
                found=f"{batch:.1f} % against {steps:.1f} %",
            ),
        ),
        explanation=(
            f"Model, sentences and splits are Table 2's.  First-order references take {FIRST_ORDER_STEPS} steps of {FIRST_ORDER_BATCH}, the"
            " paper 1,000 (FO-Adam: its Table 10).  All but P-RGE with q = 4 and the row of fewer steps run with the first seed only.",
            "Over the vocabulary: P-RGE's own loss (appendix D.2); all other rows are among the two label words.",
        ),
        series=executed_table2.curves(outcomes),
    )


def draw(result: Result) -> list[Captioned]:
    """Return validation accuracy against steps."""
    return executed_table2.draw(result, NAME)
