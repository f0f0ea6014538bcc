"""Counted from sizes: memory and latency of a token (Table I), complexity of both schemes (Table II; Galaxy+, sections
II, III).
"""

from __future__ import annotations

from itertools import product

from workbench.core.cluster import MEGABIT_BYTES
from workbench.core.inference import InferencePlan
from workbench.core.names import FP32_BYTES
from workbench.core.schedule import SEND
from workbench.methods.galaxy_plus.costs import divided_kinds, layer_flops, stack_sizes, unit_flops, working_bytes
from workbench.methods.galaxy_plus.planners import needs
from workbench.methods.galaxy_plus.schedules import InferenceLayout, inference_costs, inference_schedule
from workbench_studies.papers.galaxy_plus.testbed import (
    GIB,
    MODELS,
    PAPER,
    Constants,
    cluster,
    load_constants,
    problem,
    profile,
)
from workbench_studies.papers.items import Item, Rows, worst
from workbench_studies.papers.result import OOM, Result, Row, printed

MEMORY, PI, A100 = "memory footprint", "latency per token on RPi-M", "latency per token on A100"
A100_FLOPS_PER_S = 19.5e12  # [datasheet] fp32
MODEL = "Bert-L"
COUNTS = (2, 4, 8)
TOKENS = 288  # divides by 8, as 16 heads and 4096 columns do
LAYERS = 3
COMPUTATION, COMMUNICATION = "computation of a device", "communication of a sequence"
RINGS = {1: 4, 2: 2}
"""Table II's values before LSH."""


def footprint_bytes(constants: Constants, model: str) -> float:
    """Return the bytes of a model's weights and of one sequence's activations in one layer, in fp32."""
    described = MODELS[model]
    return FP32_BYTES * described.params + max(map(working_bytes, stack_sizes(described))) * constants.length(model)


def token_s(model: str, *, flops_per_s: float, weight_bytes_per_s: float, layer_s: float = 0.0) -> float:
    """Return the seconds of one token through all layers: its weights are read once, and used once."""
    described = MODELS[model]
    weights = sum(map(described.layer_params, range(described.stack_layers)))
    return FP32_BYTES * weights / weight_bytes_per_s + 2 * weights / flops_per_s + described.stack_layers * layer_s


def cell(constants: Constants, model: str, quantity: str) -> float | str:
    """Return a model's GB, seconds on an RPi-M or OOM, or milliseconds on an A100."""
    needs, pi = footprint_bytes(constants, model), cluster(constants, "Env. A").devices[0]
    if quantity == MEMORY:
        return needs / GIB
    if quantity == PI:
        seconds = token_s(model, flops_per_s=pi.flops_per_s, weight_bytes_per_s=constants.pi_weight_bytes_per_s)
        return seconds if needs <= pi.memory_bytes else OOM
    rate, layer_s = constants.a100_weight_bytes_per_s, constants.a100_layer_s
    return 1e3 * token_s(model, flops_per_s=A100_FLOPS_PER_S, weight_bytes_per_s=rate, layer_s=layer_s)


def table1(item: Item) -> Result:
    """Count memory footprint and latency of a single token."""
    constants = load_constants()
    comparisons = item.compare(lambda *labels: cell(constants, *labels))
    verdicts = [comparison.agrees for comparison in comparisons if comparison.agrees is not None]
    on_pi, on_a100 = (float(cell(constants, "Bert-L", quantity)) for quantity in (PI, A100))
    ratio = 1e3 * on_pi / on_a100

    def score(changed: Constants) -> Row:
        return cell(changed, "Bert-L", PI), *(cell(changed, model, A100) for model in ("Bert-L", "ViT-Huge", "GPT2-L"))

    # DistilBert's printed 0.11 s and 0.3 ms.
    scaled = [
        value * (MODELS[model].params / MODELS["DistilBert"].params)
        for value, model in ((0.11, "Bert-L"), (0.3, "Bert-L"), (0.3, "ViT-Huge"), (0.3, "GPT2-L"))
    ]
    return item.result(
        comparisons,
        tables={
            "one_token_or_284": _one_token_or_284(constants),
            "sensitivity": item.sensitivity(constants, score, scaled),
        },
        holds={"oom": all(verdicts)},
        agreeing=sum(map(bool, verdicts)),
        count=len(verdicts),
        ratio=ratio,
    )


def _one_token_or_284(constants: Constants) -> Rows:
    """Table I's latency cannot be Table V's metric, 'the average per-token processing latency': the sum."""
    rows, paper = [], printed(PAPER, "table1")
    count = cluster(constants, "Env. A", constants.bandwidth_mbit_per_s).world_size
    nominal = constants.bandwidth_mbit_per_s * MEGABIT_BYTES
    for model in ("DistilBert", "Bert-L"):
        described, per_token = MODELS[model], paper[model, PI]
        sequence = per_token * constants.tokens
        flops = sum(
            sizes.num_layers * layer_flops(sizes, constants.tokens, constants.tokens)
            for sizes in stack_sizes(described)
        )
        reduce = 2 * described.num_layers * 1.5 * constants.tokens * described.hidden * FP32_BYTES / nominal
        rows.append((model, per_token, sequence, flops / sequence / 1e9, reduce, 1 + reduce / (sequence / count)))
    return rows


def volumes(constants: Constants, scheme: int, count: int) -> dict[str, float]:
    """Return each device's memory, computation and communication per layer, in units of Table II's formula: 1 is the
    table's value.

    Counted for the last device (the first also distributes the tokens and collects the answer), as the increase for one
    more layer.
    Communication is in units of (N - 1) / N of the formula, one device's part in a ring.
    """
    shorter, longer = (_counted(constants, scheme, count, layers) for layers in (LAYERS, LAYERS + 1))
    weights, flops, sent_bytes = (after - before for before, after in zip(shorter, longer, strict=True))
    [shape] = stack_sizes(MODELS[MODEL])
    held_bytes = shape.attention_bytes / count + shape.feed_forward_bytes / (count if scheme == 1 else 1)
    return {
        "model memory of a device": weights / held_bytes,
        COMPUTATION: flops / (layer_flops(shape, TOKENS) / count),
        COMMUNICATION: sent_bytes / (RINGS[scheme] * TOKENS * shape.hidden_bytes * (count - 1) / count),
    }


def _counted(constants: Constants, scheme: int, count: int, layers: int) -> tuple[float, float, float]:
    """Return the last device's weight bytes, the FLOPs that it computes and the bytes that it sends."""
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
    prices = inference_costs(costs, on, layout)
    sent_bytes = flops = 0.0
    for op in inference_schedule(layout).ops[count - 1]:
        if op.kind == SEND:
            sent_bytes += prices.spec(op.reads[0]).nbytes
        elif op.kind in divided_kinds(sizes):
            start, stop = layout.span(op)
            pairs = (stop - start) * (TOKENS if op.kind == "ATT" else 1)
            flops += unit_flops(sizes, op.kind) * pairs * layout.width(layout.blocks[op.stage], count - 1)
    need = needs(problem(constants, costs, on, TOKENS), plan)[count - 1]
    return need.attention_bytes + need.feed_forward_bytes, flops, sent_bytes


def table2(item: Item) -> Result:
    """Count memory, computation and communication of both schemes from the schedules."""
    constants, formulas = load_constants(), item.printed
    counted = {(scheme, count): volumes(constants, scheme, count) for scheme, count in product(RINGS, COUNTS)}
    comparisons = []
    for (scheme, count), quantities in counted.items():
        for quantity, value in quantities.items():
            part = f" x {count - 1}/{count}" if quantity == COMMUNICATION else ""
            unit = f"of {formulas[f'Scheme-{scheme}', quantity]}{part}"
            comparisons.append(item.cell((f"Scheme-{scheme}", quantity, f"N = {count}"), 1.0, value, unit))
    largest = worst(comparisons)[0]
    rings = {key: quantities[COMMUNICATION] * RINGS[key[0]] for key, quantities in counted.items()}
    saved = [1 - rings[2, count] / rings[1, count] for count in COUNTS]
    return item.result(
        comparisons,
        holds={"volumes": largest < 1e-6},
        series={
            f"Scheme-{scheme}": tuple((float(count), rings[scheme, count]) for count in COUNTS) for scheme in RINGS
        },
        largest=largest,
        saved=", ".join(f"{share:.0%}" for share in saved),
    )
