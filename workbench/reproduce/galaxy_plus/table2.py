"""Table II: memory, computation and communication of both schemes, counted from the schedules (Galaxy+, section III-B)."""

from __future__ import annotations

from workbench.core.inference import InferencePlan
from workbench.core.schedule import SEND
from workbench.planners.galaxy_plus import inference_needs
from workbench.plots.export import Captioned
from workbench.profiler.inference import stack_sizes
from workbench.reproduce.drawing import lines
from workbench.reproduce.galaxy_plus.testbed import MODELS, PAPER, Constants, cluster, load_constants, profile
from workbench.reproduce.result import Check, Comparison, Result, Settings
from workbench.reproduce.values import paper_values
from workbench.schedules.inference import InferenceCosts, InferenceLayout, inference_schedule

MODEL = "Bert-L"
COUNTS = (2, 4, 8)
TOKENS = 288  # divides by 8, as 16 heads and 4096 columns do
LAYERS = 3
MEMORY, COMPUTATION, COMMUNICATION = "model memory of a device", "computation of a device", "communication of a sequence"
RINGS = {1: 4, 2: 2}
"""What the table has before LSH."""


def volumes(constants: Constants, scheme: int, count: int) -> dict[str, float]:
    """Return what one device holds, computes and sends for each layer, in units of Table II's formula: 1 is what the table says.

    Counted for the last device (the first deals out the tokens and collects the answer as well), as what one layer more adds.
    Communication is in units of (N - 1) / N of the formula, one device's part in a ring.
    """
    shorter, longer = (_counted(constants, scheme, count, layers) for layers in (LAYERS, LAYERS + 1))
    weights, flops, sent = (after - before for before, after in zip(shorter, longer, strict=True))
    [sizes] = stack_sizes(MODELS[MODEL])
    shape = sizes.shape
    held = shape.attention_bytes / count + shape.feed_forward_bytes / (count if scheme == 1 else 1)
    return {
        MEMORY: weights / held,
        COMPUTATION: flops / (sizes.layer_flops(TOKENS) / count),
        COMMUNICATION: sent / (RINGS[scheme] * TOKENS * shape.hidden_bytes * (count - 1) / count),
    }


def _counted(constants: Constants, scheme: int, count: int, layers: int) -> tuple[float, float, float]:
    """Return the weights that the last device holds in bytes, the FLOPs that it computes and the bytes that it sends."""
    on = cluster(constants, "Env. A", count=count)
    costs = profile(constants, MODEL, "Env. A", count, layers)
    [shape] = costs.stacks
    [sizes] = stack_sizes(MODELS[MODEL])
    plan = InferencePlan(
        method=f"scheme {scheme}",
        paradigm="hybrid",
        ranks=tuple(range(count)),
        units=(shape.num_units // count,) * count,
        columns=(shape.columns // count,) * count,
        shares=(1.0,) * count,
        schemes=(scheme,) * layers,
        overlap=True,
        length=TOKENS,
    )
    layout = InferenceLayout.build(plan, costs.stacks, TOKENS)
    prices = InferenceCosts(costs, on, layout)
    sent = flops = 0.0
    for op in inference_schedule(layout).ops[count - 1]:
        if op.kind == SEND:
            sent += prices.spec(op.reads[0]).nbytes
        elif op.kind in sizes.kinds:
            start, stop = layout.span(op)
            pairs = (stop - start) * (TOKENS if op.kind == "ATT" else 1)
            flops += sizes.unit_flops(op.kind) * pairs * layout.width(layout.blocks[op.stage], count - 1)
    need = inference_needs(plan, costs, length=TOKENS, memory=constants.memory_rule)[count - 1]
    return need.attention_bytes + need.feed_forward_bytes, flops, sent


def run(settings: Settings) -> Result:
    """Count it."""
    constants = load_constants()
    found = {(scheme, count): volumes(constants, scheme, count) for scheme in RINGS for count in COUNTS}
    words = {(value.labels["scheme"], value.labels["quantity"]): value.value for value in paper_values(PAPER, "table2")}
    comparisons = []
    for (scheme, count), made in found.items():
        for quantity, value in made.items():
            part = f" x {count - 1}/{count}" if quantity == COMMUNICATION else ""
            unit = f"of {words[f'Scheme-{scheme}', quantity]}{part}"
            comparisons.append(Comparison(labels=(f"Scheme-{scheme}", quantity, f"N = {count}"), paper=1.0, ours=value, unit=unit))
    worst = max(abs(one.deviation or 0.0) for one in comparisons)
    sent = {key: made[COMMUNICATION] * RINGS[key[0]] for key, made in found.items()}
    saved = [1 - sent[2, count] / sent[1, count] for count in COUNTS]
    return Result(
        item="table2",
        title=f"Table II: complexity of the schemes, counted from the schedules of {MODEL}",
        paper_section="III-B",
        source="counted",
        label_columns=("scheme", "quantity", "devices"),
        comparisons=tuple(comparisons),
        checks=(
            Check(claim="all volumes of a layer are the table's", holds=worst < 1e-6, found=f"within {worst:.2g} %"),
            Check(
                claim="Scheme-2 halves the communication",
                holds=all(abs(share - 0.5) < 1e-9 for share in saved),
                found=", ".join(f"{share:.0%}" for share in saved),
            ),
        ),
        explanation=(
            "The formulas leave out the ring's factor: a device sends (N - 1) / N of 4SH numbers for each layer of scheme 1 and of 2SH"
            " for one of scheme 2; two devices together send just that.",
            "Counted from the operations of the schedules that are simulated and executed here, as what one layer more adds; the tokens'"
            " way out to the devices and the answer's way back are not in the table.",
        ),
        series={f"Scheme-{scheme}": tuple((float(count), sent[scheme, count]) for count in COUNTS) for scheme in RINGS},
    )


def draw(result: Result) -> list[Captioned]:
    """Return the communication of both schemes."""
    figure = lines(
        result,
        result.series,
        title="Table II: communication of both schemes",
        subtitle="sent by one device for each layer; the table says 4 and 2",
        x_title="devices",
        y_title="times SH (N - 1) / N numbers",
    )
    return [Captioned("table2", "Communication of a device and layer against the number of devices.", figure)]
