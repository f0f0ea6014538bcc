"""Table 4: seconds of a step on a Jetson Orin Nano with NF4 weights, both signs apart or in one pass (P-RGE, section 4.3)."""

from __future__ import annotations

from dataclasses import replace

from workbench.plots.export import Captioned
from workbench.profiler.descriptions import describe
from workbench.profiler.zeroth_order import free_rows, step_s
from workbench.reproduce.drawing import line_panels
from workbench.reproduce.p_rge.sensitivity import sensitivity
from workbench.reproduce.p_rge.testbed import MODELS, PAPER, Constants, load_constants, median_deviation, worst
from workbench.reproduce.result import Check, Comparison, Number, Result, Settings, Table
from workbench.reproduce.values import lookup, paper_values

MEZO, PRGE, SPEEDUP = "MeZO (LoRA-FA)", "P-RGE", "speedup"
FITTED = {(model, MEZO, "64", batch) for model in MODELS for batch in ("1", "8")}
FLOOR_PERCENT, FLOOR_MEDIAN = 25.0, 8.0
VARIED = ("jetson_flops_per_s", "jetson_layer_s", "jetson_nf4_per_s", "jetson_memory_bytes_per_s")


def seconds(constants: Constants, model: str, method: str, sequence_length: int, batch_size: int) -> float:
    """Return a step's seconds."""
    return step_s(
        describe(model),
        constants.jetson(),
        batch_size=batch_size,
        sequence_length=sequence_length,
        execution="inner" if method == PRGE else "sequential",
        weight_bytes=constants.weight_bytes("nf4"),
    )


def compare(constants: Constants) -> tuple[Comparison, ...]:
    """Return every cell beside the paper's."""
    found = []
    for value in paper_values(PAPER, "table4"):
        labels = tuple(value.labels.values())
        model, method, length, batch = labels[0], labels[1], int(labels[2]), int(labels[3])
        ours = (
            seconds(constants, model, MEZO, length, batch) / seconds(constants, model, PRGE, length, batch)
            if method == SPEEDUP
            else seconds(constants, model, method, length, batch)
        )
        found.append(
            Comparison(labels=labels, paper=value.value, ours=ours, unit=value.unit, kind="fitted" if labels in FITTED else "predicted")
        )
    return tuple(found)


def run(settings: Settings) -> Result:
    """Simulate it."""
    constants = load_constants()
    comparisons = compare(constants)
    largest, where = worst(comparisons, ("predicted",))
    median = median_deviation(comparisons)
    falling = all(
        _ours(comparisons, model, "64", small) > _ours(comparisons, model, "64", large)
        for model in MODELS
        for small, large in (("1", "2"), ("2", "4"), ("4", "8"))
    )
    paper = lookup(paper_values(PAPER, "table4"))
    halves = tuple(_halved(one, paper) for one in comparisons)
    return Result(
        item="table4",
        title="Table 4: seconds of a step on a Jetson Orin Nano, NF4 weights",
        paper_section="4.3",
        source="simulated",
        label_columns=("model", "method", "sequence length", "batch size"),
        comparisons=comparisons,
        tables=(_where(constants), sensitivity(constants, compare, VARIED, trivial=("P-RGE takes half of MeZO's printed time", halves))),
        checks=(
            Check(
                claim=f"predicted cells within {FLOOR_PERCENT:.0f} %, their median within {FLOOR_MEDIAN:.0f} %",
                holds=largest <= FLOOR_PERCENT and median <= FLOOR_MEDIAN,
                found=f"{largest:.1f} % at {where}, median {median:.1f} %",
            ),
            Check(claim="the gain falls with the batch", holds=falling, found="at 64 tokens, both models"),
        ),
        explanation=(
            "A pass dequantizes every weight once (6.1 billion a second) and spends 6.8 ms a layer on preparing its products; its"
            " arithmetic runs at 3.4 TFLOP/s in fp16.  Four of MeZO's cells fix the three; all 16 of P-RGE's are predicted.",
            "Both signs in one pass save one dequantization, which is most of a small step: what Fig. 6 finds on the A100.",
            "The paper's numbers are one function of a pass's tokens: Llama2-7B's P-RGE at 64 x 2 is half of MeZO's at 64 x 4, to the"
            " digit.",
        ),
    )


def _ours(comparisons: tuple[Comparison, ...], model: str, length: str, batch: str) -> float:
    value = next(one.ours for one in comparisons if one.labels == (model, SPEEDUP, length, batch))
    assert isinstance(value, float)
    return value


def _halved(one: Comparison, paper: dict[tuple[str, ...], Number]) -> Comparison:
    mezo = paper[one.labels[0], MEZO, *one.labels[2:]]
    assert isinstance(mezo, float)
    return replace(one, ours={MEZO: mezo, PRGE: mezo / 2, SPEEDUP: 2.0}[one.labels[1]])


def _where(constants: Constants) -> Table:
    machine = constants.jetson()
    rows: list[tuple[Number, ...]] = []
    for model in MODELS:
        described = describe(model)
        empty = step_s(described, replace(machine, flops_per_s=1e18), batch_size=1, sequence_length=64, execution="both", weight_bytes=0.53)
        arithmetic = step_s(
            described,
            replace(machine, layer_s=0.0, dequantized_per_s=0.0),
            batch_size=1,
            sequence_length=64,
            execution="both",
            weight_bytes=0.53,
        )
        prepared = machine.layer_s * described.stack_layers
        equal = free_rows(described, replace(machine, layer_s=empty / described.stack_layers, is_asynchronous=True), sequence_length=64)
        rows.append((model, prepared, empty - prepared, arithmetic, equal * 64))
    return Table(
        title="Where P-RGE's step at 64 x 1 goes (s), and from how many tokens on the arithmetic is most of a pass",
        columns=("model", "preparing", "dequantizing, reading", "arithmetic of both signs", "tokens"),
        rows=tuple(rows),
    )


def draw(result: Result) -> list[Captioned]:
    """Return seconds against a batch's tokens for both models."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for one in result.comparisons:
        if one.labels[1] != SPEEDUP and isinstance(one.ours, float) and isinstance(one.paper, float):
            tokens = float(one.labels[2]) * float(one.labels[3])
            panel = panels.setdefault(one.labels[0], {})
            panel.setdefault(one.labels[1], []).append((tokens, one.ours))
            panel.setdefault(f"{one.labels[1]}, paper", []).append((tokens, one.paper))
    figure = line_panels(
        result,
        {model: {name: sorted(points) for name, points in panel.items()} for model, panel in panels.items()},
        title=result.title,
        subtitle="one dequantization for both signs",
        x_title="tokens in a batch",
        y_title="seconds of a step",
        dashes={name: "dot" for panel in panels.values() for name in panel if name.endswith("paper")},
        logarithmic=True,
        at=(64, 256, 1024),
    )
    figure.update_yaxes(tickvals=[0.5, 1, 2, 5, 10])
    return [Captioned("table4", "Seconds of a step on the Jetson against its tokens.", figure)]
