"""Table 1: what q queries cost at one budget, by the time model; what they gain is Table 2's question (P-RGE, section 3)."""

from __future__ import annotations

from workbench.plots.export import Captioned
from workbench.profiler.descriptions import describe
from workbench.profiler.zeroth_order import Execution, step_s
from workbench.reproduce.drawing import paired_bars
from workbench.reproduce.p_rge.testbed import LLAMA, PAPER, Constants, load_constants
from workbench.reproduce.result import Check, Comparison, Number, Result, Settings, Table
from workbench.reproduce.values import lookup, paper_values

QUERIES, LENGTH = 16, 64
TIME = "wall-clock time"
NO_LONGER = 1.05


def relative_times(constants: Constants) -> dict[tuple[str, str, str, Execution], float]:
    """Return whole trainings' time over that with one query, of the table's rows and of P-RGE's; q = 16, B = 16, 64 tokens, Llama2-7B."""
    batch = constants.batch_size

    def seconds(queries: int, batch_size: int, steps: float, execution: Execution) -> float:
        machine = constants.a100()
        each = step_s(describe(LLAMA), machine, batch_size=batch_size, sequence_length=LENGTH, queries=queries, execution=execution)
        return steps * each

    one = seconds(1, batch, 1.0, "sequential")
    return {
        ("1", "B", "T", "sequential"): 1.0,
        ("q", "B", "T/q", "sequential"): seconds(QUERIES, batch, 1 / QUERIES, "sequential") / one,
        ("q", "B/q", "T", "sequential"): seconds(QUERIES, batch // QUERIES, 1.0, "sequential") / one,
        ("q", "B/q", "T", "outer"): seconds(QUERIES, batch // QUERIES, 1.0, "outer") / one,
        ("q", "B/q", "T", "both"): seconds(QUERIES, batch // QUERIES, 1.0, "both") / one,
    }


def run(settings: Settings) -> Result:
    """Simulate it."""
    times = relative_times(load_constants())
    comparisons = []
    for labels, value in lookup(paper_values(PAPER, "table1")).items():
        query, batch, steps, quantity = labels
        ours = ("yes" if times[query, batch, steps, "sequential"] <= NO_LONGER else "no") if quantity == TIME else None
        note = "" if quantity == TIME else "a training's question: 'workbench reproduce p_rge table2' executes it"
        comparisons.append(Comparison(labels=labels, paper=value, ours=ours, kind="predicted", note=note))
    rows: list[tuple[Number, ...]] = [(*labels, value) for labels, value in times.items()]
    parallel = times["q", "B/q", "T", "both"]
    return Result(
        item="table1",
        title="Table 1: trade-offs of several queries at one budget",
        paper_section="3",
        source="simulated",
        label_columns=("queries", "batch size", "steps", "quantity"),
        comparisons=tuple(comparisons),
        tables=(
            Table(
                title=f"Time over that of one query: q = {QUERIES}, B = 16, {LENGTH} tokens, {LLAMA} on an A100",
                columns=("queries", "batch size", "steps", "execution", "time"),
                rows=tuple(rows),
            ),
        ),
        checks=(
            Check(
                claim="the paper's verdict on the time of every row",
                holds=all(one.agrees is not False for one in comparisons),
                found=", ".join(f"{' '.join(labels[:3])} {value:.2f}" for labels, value in times.items() if labels[3] == "sequential"),
            ),
            Check(
                claim="P-RGE makes the third row as fast as the first",
                holds=parallel <= NO_LONGER,
                found=f"{parallel:.2f} with both parallelizations, {times['q', 'B/q', 'T', 'outer']:.2f} with the outer",
            ),
        ),
        explanation=(
            "'yes': no longer than with one query.  The same samples pass through the model in every row; in the third each of 2q passes"
            " has one sample and is bound by launching its kernels, on small devices by reading weights.",
            "Steps after a loop of 8 ms; Table 13's constants.",
        ),
    )


def draw(result: Result) -> list[Captioned]:
    """Return bars of the times."""
    chosen = [
        Comparison(labels=(f"{row[0]} x {row[1]}, {row[2]} steps, {row[3]}",), paper=None, ours=row[4]) for row in result.tables[0].rows
    ]
    figure = paired_bars(result, chosen, title=result.title, subtitle=result.tables[0].title, unit="time over one query's")
    return [Captioned("table1", "Time of each trade-off over that of one query.", figure)]
