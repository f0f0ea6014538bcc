"""Seconds of a step on an A100, a Jetson and a phone: Tables 1, 4, 5, 6, 13 and Fig. 6 (P-RGE, sections 3 and 4.3,
appendices A and F).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise, product

from workbench.methods.p_rge.analytic import FP16_BYTES, SWEEPS, Execution, pass_s, step_s
from workbench.methods.p_rge.published import Constants, Precision, load_constants
from workbench.profiler.descriptions import describe
from workbench_studies.papers.items import Item, Rows
from workbench_studies.papers.p_rge.counted import first_order_step_s, free_rows
from workbench_studies.papers.p_rge.testbed import GIB, LLAMA, MODELS, PAPER, TINY, deviations
from workbench_studies.papers.result import Cells, Number, Result, printed

MEZO, PRGE, SPEEDUP = "MeZO (LoRA-FA)", "P-RGE", "speedup"
QUERIES = 16
PRECISIONS: tuple[Precision, ...] = ("float16", "int8", "nf4")
LENGTHS, BATCHES = (64, 128, 256), (1, 8, 16)


def relative_times(constants: Constants) -> dict[tuple[str, str, str, Execution], float]:
    """Return the time of whole trainings relative to one query, for Table 1's rows and P-RGE's; q = 16, B = 16, 64
    tokens, Llama2-7B.
    """

    def seconds(queries: int, batch_size: int, execution: Execution) -> float:
        model, machine = describe(LLAMA), constants.a100()
        return step_s(model, machine, batch_size=batch_size, sequence_length=64, queries=queries, execution=execution)

    batch = constants.batch_size
    single_s = seconds(1, batch, "sequential")
    executions: tuple[Execution, ...] = ("sequential", "outer", "both")
    return {
        ("1", "B", "T", "sequential"): 1.0,
        ("q", "B", "T/q", "sequential"): 1 / QUERIES * seconds(QUERIES, batch, "sequential") / single_s,
        **{
            ("q", "B/q", "T", execution): seconds(QUERIES, batch // QUERIES, execution) / single_s
            for execution in executions
        },
    }


def table1(item: Item) -> Result:
    """State which of the trade-offs take longer than one query; Table 2 examines their benefit."""
    times = relative_times(load_constants())

    def ours(queries: str, batch: str, steps: str, quantity: str) -> Number:
        if quantity != "wall-clock time":
            return None
        return "yes" if times[queries, batch, steps, "sequential"] <= 1 else "no"

    comparisons, parallel = item.compare(ours), times["q", "B/q", "T", "both"]
    return item.result(
        comparisons,
        tables={"times": [(*labels, value) for labels, value in times.items()]},
        holds={"verdicts": all(comparison.agrees is not False for comparison in comparisons)},
        rows=", ".join(
            f"{' '.join(labels[:3])} {value:.2f}" for labels, value in times.items() if labels[3] == "sequential"
        ),
        parallel=parallel,
        outer=times["q", "B/q", "T", "outer"],
    )


def jetson_s(constants: Constants, model: str, method: str, length: str, batch: str) -> float:
    """Return a step's seconds on the Jetson with NF4 weights, or MeZO's time relative to it."""
    if method == SPEEDUP:
        return jetson_s(constants, model, MEZO, length, batch) / jetson_s(constants, model, PRGE, length, batch)
    return step_s(
        describe(model),
        constants.jetson(),
        batch_size=int(batch),
        sequence_length=int(length),
        execution="inner" if method == PRGE else "sequential",
        weight_bytes=constants.weight_bytes("nf4"),
    )


def pairwise_gains(cells: Cells) -> list[tuple[float, float]]:
    """Return Table 4's speedups of each batch size and of the next larger one, by model and length."""
    rows: dict[tuple[str, str], list[float]] = {}
    for (model, method, length, _), value in cells.items():
        if method == SPEEDUP:
            rows.setdefault((model, length), []).append(value)
    return [pair for values in rows.values() for pair in pairwise(values)]


def table4(item: Item) -> Result:
    """Compute both signs separately and in one pass on the Jetson."""
    constants, paper = load_constants(), item.printed
    comparisons = item.compare(partial(jetson_s, constants))
    ours = {labels: jetson_s(constants, *labels) for labels in paper}

    def half(model: str, method: str, length: str, batch: str) -> Number:
        mezo = paper[model, MEZO, length, batch]
        return {MEZO: mezo, PRGE: mezo / 2, SPEEDUP: 2.0}[method]

    machine, rows = constants.jetson(), []
    for model in map(describe, MODELS):
        seconds = partial(step_s, model, batch_size=1, sequence_length=64, execution="both", weight_bytes=0.53)
        empty = seconds(replace(machine, flops_per_s=1e18))
        arithmetic = seconds(replace(machine, layer_s=0.0, dequantized_per_s=0.0))
        prepared = machine.layer_s * model.stack_layers
        equal = free_rows(
            model, replace(machine, layer_s=empty / model.stack_layers, is_asynchronous=True), sequence_length=64
        )
        rows.append((model.name, prepared, empty - prepared, arithmetic, equal * 64))
    return item.result(
        comparisons,
        tables={"where": rows, "sensitivity": deviations(item, constants, jetson_s, half)},
        falls=sum(after < before for before, after in pairwise_gains(ours)),
        printed_falls=sum(after < before for before, after in pairwise_gains(paper)),
        steps=len(pairwise_gains(paper)),
    )


def phone(constants: Constants, quantity: str, length: str, batch: str) -> float:
    """Return the seconds or GB of a pass on the phone.  The batch counts both signs: the text compares 16 with the
    Jetson's 8.
    """
    model, rows, tokens = describe(TINY), int(batch), int(length)
    if quantity == "runtime":
        return pass_s(model, constants.oneplus(), rows=rows, sequence_length=tokens)
    return (
        FP16_BYTES * model.params + constants.oneplus_besides_bytes + constants.oneplus_token_bytes * rows * tokens
    ) / GIB


def table5(item: Item) -> Result:
    """Compute the phone's NPU, and compare the paper's phone with its Jetson."""
    constants, paper, board = load_constants(), item.printed, printed(PAPER, "table4")
    comparisons = item.compare(partial(phone, constants))
    rows = []
    for length, both in product(("64", "128"), (2, 4, 8, 16)):
        runtime = paper["runtime", length, str(both)]
        tiny, llama = (board[model, PRGE, length, str(both // 2)] for model in MODELS)
        rows.append((int(length), both, runtime, tiny, llama, runtime / tiny))
    trivial = deviations(item, constants, phone, lambda quantity, *_: paper[quantity, "64", "2"])
    return item.result(comparisons, tables={"jetson": rows, "sensitivity": trivial})


def full_s(constants: Constants, method: str, length: str, batch: str) -> float:
    """Return the seconds of a step over all parameters, by MeZO or first-order SGD."""
    model, rows, tokens = describe(LLAMA), int(batch), int(length)
    if method == "MeZO-SGD":
        return step_s(model, constants.appendix(), batch_size=rows, sequence_length=tokens, swept_params=model.params)
    return first_order_step_s(
        model, constants.appendix(), batch_size=rows, sequence_length=tokens, updated_params=model.params
    )


def table6(item: Item) -> Result:
    """Compute MeZO's four sweeps over all parameters against first-order SGD."""
    constants, paper, table13 = load_constants(), item.printed, printed(PAPER, "table13")
    comparisons = item.compare(partial(full_s, constants))
    smallest, most = (
        full_s(constants, "MeZO-SGD", *labels) / full_s(constants, "FO-SGD", *labels)
        for labels in (("64", "1"), ("256", "8"))
    )
    rises = [
        (where, 1e3 * ((cells[method, "256", "8"] - cells[method, "128", "8"]) / (8 * 128)))
        for where, cells, method in (
            ("Table 6, MeZO-SGD, 8 samples", paper, "MeZO-SGD"),
            ("Table 13, MeZO (LoRA-FA), 8 samples", table13, MEZO),
        )
    ]
    return item.result(
        comparisons,
        tables={
            "slopes": rises,
            "sensitivity": deviations(item, constants, full_s, lambda method, *_: paper[method, "64", "1"]),
        },
        sweeps=SWEEPS * describe(LLAMA).params * constants.sweep_s_per_param,
        smallest=smallest,
        most=most,
    )


def server_s(constants: Constants, method: str, length: str, batch: str) -> float:
    """Return the seconds of a step of Llama2-7B on the A100, the signs one after the other or in one pass."""
    execution: Execution = "sequential" if method == MEZO else "inner"
    return step_s(
        describe(LLAMA), constants.a100(), batch_size=int(batch), sequence_length=int(length), execution=execution
    )


def table13(item: Item) -> Result:
    """Compute both signs separately and in one pass on the A100."""
    constants, paper = load_constants(), item.printed
    comparisons = item.compare(partial(server_s, constants))
    ours = {labels: server_s(constants, *labels) for labels in paper}
    mine, theirs = (
        {
            labels[1:]: value / cells["P-RGE (inner)", *labels[1:]]
            for labels, value in cells.items()
            if labels[0] == MEZO
        }
        for cells in (ours, paper)
    )
    few, many = ("64", "1"), ("256", "16")
    trivial = deviations(
        item, constants, server_s, lambda _, length, batch: paper[MEZO, "256", "16"] * int(length) * int(batch) / 4096
    )
    return item.result(
        comparisons,
        tables={"sensitivity": trivial},
        few=mine[few],
        many=mine[many],
        paper_few=theirs[few],
        paper_many=theirs[many],
    )


def speedup(constants: Constants, model: str, precision: Precision, sequence_length: int, batch_size: int) -> float:
    """Return a sequential step's time over a step with both signs in one pass."""
    seconds = partial(
        step_s,
        describe(model),
        constants.a100(precision),
        batch_size=batch_size,
        sequence_length=sequence_length,
        weight_bytes=constants.weight_bytes(precision),
    )
    return seconds(execution="sequential") / seconds(execution="inner")


def fig6(item: Item) -> Result:
    """Compute one pass for both signs with fp16, INT8 and NF4 weights."""
    constants, claims = load_constants(), printed(PAPER, "claims")
    names = {"float16": "float16", "nf4": "NF4"}
    comparisons, best = [], dict.fromkeys(PRECISIONS, 0.0)
    values: dict[tuple[str, int, int], list[float]] = {}
    for model, precision, length, batch in product(MODELS, PRECISIONS, LENGTHS, BATCHES):
        ours = speedup(constants, model, precision, length, batch)
        best[precision] = max(best[precision], ours)
        values.setdefault((model, length, batch), []).append(ours)
        claimed = model == LLAMA and (length, batch) == (64, 1) and precision in names
        paper = claims[(f"speedup of inner-loop parallelization, {names[precision]}",)] if claimed else None
        comparisons.append(item.cell((model, precision, str(length), str(batch)), paper, ours))
    most, least = sum(nf4 >= max(plain, int8) for plain, int8, nf4 in values.values()), min(map(min, values.values()))
    return item.result(
        comparisons,
        tables={"rates": _rates(constants)},
        most=most,
        cells=len(values),
        best=", ".join(f"{name} {value:.2f}" for name, value in best.items()),
        least=least,
    )


def _rates(constants: Constants) -> Rows:
    rows = []
    for precision, model in product(PRECISIONS, MODELS):
        machine = constants.a100(precision)
        weight_bytes = constants.weight_bytes(precision)
        seconds = partial(step_s, describe(model), batch_size=1, sequence_length=64, weight_bytes=weight_bytes)
        apart, without = seconds(machine), seconds(replace(machine, dequantized_per_s=0.0))
        rows.append((precision, model, apart, without, machine.dequantized_per_s / 1e9 or None))
    return rows
