"""Fig. 4: how many times faster P-RGE fine-tunes than MeZO, by task (P-RGE, section 4.2; Tables 15 and 16 have its numbers)."""

from __future__ import annotations

from dataclasses import replace

from workbench.plots.export import Captioned
from workbench.reproduce.drawing import paired_bars
from workbench.reproduce.p_rge.task_times import FULL, MODEL_OF, STANDARD, compare, speedups
from workbench.reproduce.p_rge.testbed import PAPER, load_constants, median_deviation
from workbench.reproduce.result import Check, Comparison, Result, Settings
from workbench.reproduce.values import lookup, paper_values

CLAIMS = {FULL: "end-to-end speedup over MeZO (full)", STANDARD: "end-to-end speedup over MeZO (LoRA-FA)"}


def run(settings: Settings) -> Result:
    """Divide Tables 15 and 16."""
    constants = load_constants()
    comparisons = []
    for table, model in MODEL_OF.items():
        cells = compare(constants, table)
        ours = {(one.labels[0], one.labels[1]): one.ours for one in cells}
        paper = {(one.labels[0], one.labels[1]): one.paper for one in cells}
        for over in (FULL, STANDARD):
            own, theirs = speedups(ours, over), speedups(paper, over)
            comparisons += [
                Comparison(labels=(model, over, task), paper=theirs[task], ours=own[task], unit="x", kind="predicted") for task in own
            ]
    claims = lookup(paper_values(PAPER, "claims"))
    checks = []
    for over, claim in CLAIMS.items():
        told = claims[(claim,)]
        assert isinstance(told, float)
        best = max(float(one.ours) for one in comparisons if one.labels[1] == over and isinstance(one.ours, float))
        printed = max(float(one.paper) for one in comparisons if one.labels[1] == over and isinstance(one.paper, float))
        checks.append(
            Check(
                claim=f"up to {told} over {over}, within 20 %",
                holds=abs(best / told - 1) <= 0.2,
                found=f"{best:.2f}; the printed tables give {printed:.2f}",
            )
        )
    return Result(
        item="fig4",
        title="Fig. 4: end-to-end speedup of P-RGE over MeZO",
        paper_section="4.2",
        source="simulated",
        label_columns=("model", "over", "task"),
        comparisons=tuple(comparisons),
        checks=tuple(checks),
        explanation=(
            "The better of q = 4 and q = 16, both parallelizations, 20,000 steps on both sides; the paper's column is computed from its"
            " Tables 15 and 16, the figure itself prints no numbers.",
            f"Median deviation {median_deviation(comparisons):.1f} %; Tables 15 and 16 say what is fitted.",
            "Over MeZO (full) short tasks gain most, since its sweeps are then most of its step; over MeZO (LoRA-FA) those whose batches"
            " are padded most gain most.",
        ),
    )


def draw(result: Result) -> list[Captioned]:
    """Return bars for each model."""
    drawn = []
    for model in MODEL_OF.values():
        chosen = [replace(one, labels=(f"over {one.labels[1]}", one.labels[2])) for one in result.comparisons if one.labels[0] == model]
        figure = paired_bars(result, chosen, title=f"{result.title}, {model}", subtitle="larger is better", unit="x", facet=0)
        drawn.append(Captioned(f"fig4-{model.split('-')[0].lower()}", f"Speedup of P-RGE by task, {model}.", figure))
    return drawn
