"""Table 5: seconds and memory of the dual-forwarding program on a OnePlus 12's NPU, TinyLlama-1.1B (P-RGE, section 4.3)."""

from __future__ import annotations

from dataclasses import replace

from workbench.plots.export import Captioned
from workbench.profiler.descriptions import describe
from workbench.profiler.zeroth_order import FP16_BYTES, pass_s
from workbench.reproduce.drawing import paired_bars
from workbench.reproduce.p_rge.sensitivity import sensitivity
from workbench.reproduce.p_rge.testbed import GIB, LLAMA, PAPER, TINY, Constants, load_constants, median_deviation, worst
from workbench.reproduce.result import Check, Comparison, Number, Result, Settings, Table
from workbench.reproduce.values import lookup, paper_values

FITTED = {*(("runtime", "64", batch) for batch in ("2", "4", "8", "16")), ("memory", "64", "2"), ("memory", "128", "16")}
FLOOR_PERCENT = 25.0
VARIED = ("oneplus_flops_per_s", "oneplus_memory_bytes_per_s", "oneplus_besides_bytes", "oneplus_token_bytes")


def compare(constants: Constants) -> tuple[Comparison, ...]:
    """Return every cell beside the paper's.  The batch counts both signs: the text compares 16 with the Jetson's 8."""
    model = describe(TINY)
    found = []
    for value in paper_values(PAPER, "table5"):
        labels = tuple(value.labels.values())
        length, rows = int(labels[1]), int(labels[2])
        if labels[0] == "runtime":
            ours = pass_s(model, constants.oneplus(), rows=rows, sequence_length=length)
        else:
            ours = (FP16_BYTES * model.params + constants.oneplus_besides_bytes + constants.oneplus_token_bytes * rows * length) / GIB
        found.append(
            Comparison(labels=labels, paper=value.value, ours=ours, unit=value.unit, kind="fitted" if labels in FITTED else "predicted")
        )
    return tuple(found)


def run(settings: Settings) -> Result:
    """Simulate it."""
    constants = load_constants()
    comparisons = compare(constants)
    largest, where = worst(comparisons, ("predicted",))
    paper = lookup(paper_values(PAPER, "table5"))
    smallest = tuple(replace(one, ours=paper[one.labels[0], "64", "2"]) for one in comparisons)
    return Result(
        item="table5",
        title="Table 5: the dual-forwarding program on a OnePlus 12's NPU, TinyLlama-1.1B in fp16",
        paper_section="4.3",
        source="simulated",
        label_columns=("quantity", "sequence length", "batch size"),
        comparisons=comparisons,
        tables=(_jetson(), sensitivity(constants, compare, VARIED, trivial=("as the smallest batch", smallest))),
        checks=(
            Check(
                claim=f"predicted cells within {FLOOR_PERCENT:.0f} %",
                holds=largest <= FLOOR_PERCENT,
                found=f"{largest:.1f} % at {where}, median {median_deviation(comparisons):.1f} %",
            ),
        ),
        explanation=(
            "Time is in proportion to the tokens from the smallest batch on (228 GFLOP/s; four cells fitted by one number): nothing is left"
            " for parallel passes to gain on this backend, which section 6 says of it too.  At 128 x 16 it is 20 % faster than that.",
            "Memory: the fp16 weights, 1.24 GB besides and 0.6 MB a token, fitted on the two corners.  A token costs more than twice what"
            " it costs on the A100.",
            "Section 4.3 sets the NPU's 15.73 s beside the Jetson's 8.60 s.  15.73 s are TinyLlama-1.1B's, 8.60 s Llama2-7B's in Table 4;"
            " with the same model the Jetson takes 2.00 s.",
        ),
    )


def _jetson() -> Table:
    phone, board = lookup(paper_values(PAPER, "table5")), lookup(paper_values(PAPER, "table4"))
    rows: list[tuple[Number, ...]] = []
    for length in ("64", "128"):
        for both in (2, 4, 8, 16):
            own = phone["runtime", length, str(both)]
            tiny, llama = (board[model, "P-RGE", length, str(both // 2)] for model in (TINY, LLAMA))
            assert isinstance(own, float)
            assert isinstance(tiny, float)
            rows.append((int(length), both, own, tiny, llama, own / tiny))
    return Table(
        title="The paper's phone beside its Jetson, rows of both signs (s/step)",
        columns=("sequence length", "rows", f"phone, {TINY}", f"Jetson, {TINY}", f"Jetson, {LLAMA}", "ratio, same model"),
        rows=tuple(rows),
    )


def draw(result: Result) -> list[Captioned]:
    """Return bars of both quantities."""
    drawn = []
    for quantity, unit in (("runtime", "s/step"), ("memory", "GB (2^30 bytes)")):
        chosen = [
            replace(one, labels=(f"{one.labels[1]} tokens", f"batch {one.labels[2]}"))
            for one in result.comparisons
            if one.labels[0] == quantity
        ]
        figure = paired_bars(result, chosen, title=f"{result.title}: {quantity}", subtitle="proportional to the tokens", unit=unit, facet=0)
        drawn.append(Captioned(f"table5-{quantity}", f"{quantity.capitalize()} on the phone.", figure))
    return drawn
