"""Peak memory of a step and of whole fine-tuning runs (P-RGE, section 4.2, appendices F.1 and F.3): Tables 3, 12,
17 and 18.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

from workbench.methods.p_rge.analytic import FP16_BYTES, step_s
from workbench.methods.p_rge.published import Constants, load_constants
from workbench.profiler.descriptions import describe
from workbench_studies.papers.items import Item, swapped, worst
from workbench_studies.papers.p_rge.counted import FirstOrder, first_order_memory, forward_memory
from workbench_studies.papers.p_rge.tasks import FULL, METHODS, STANDARD
from workbench_studies.papers.p_rge.testbed import GIB, LLAMA, MODELS, PAPER, TINY, deviations, memory_rule
from workbench_studies.papers.result import Cells, Number, Result, printed

MODEL_IN = {"table17": TINY, "table18": LLAMA}


def footprint(constants: Constants, model: str, method: str, sequence_length: int, batch_size: int) -> dict[str, float]:
    """Return bytes by part of a method of Table 3.  P-RGE: q = 1, both signs at once, as the table's numbers imply."""
    described, rule = describe(model), memory_rule(constants)
    if method.startswith("FO"):
        space: FirstOrder = "full" if method == "FO (full)" else "lora_fa"
        return first_order_memory(described, rule, space, rows=batch_size, sequence_length=sequence_length)
    signs = 2 if method == "P-RGE" else 1
    # The two signs of one query need no more than MeZO's B and noise: Tables 17 and 18 show no step between 'standard'
    # and 'inner' either.
    return forward_memory(described, rule, rows=signs * batch_size, sequence_length=sequence_length, copies=1)


def step_gb(constants: Constants, model: str, method: str, length: str, batch: str) -> float:
    """Return GB of a method of Table 3."""
    return sum(footprint(constants, model, method, int(length), int(batch)).values()) / GIB


def table3(item: Item) -> Result:
    """Count the memory of first-order, MeZO and P-RGE steps."""
    constants = load_constants()
    comparisons = item.compare(partial(step_gb, constants))
    (largest, where), (forward, forward_where) = worst(comparisons), worst(comparisons, ("computed",))

    def weights_alone(model: str, method: str, *_: str) -> Number:
        return (10 if method == "FO (full)" else 4 if "FO" in method else 2) * describe(model).params / GIB

    parts = [
        (model, method, part, nbytes / GIB)
        for model, method in product(MODELS, ("FO (full)", "FO (LoRA-FA)", "MeZO (LoRA-FA)", "P-RGE"))
        for part, nbytes in footprint(constants, model, method, 256, 16).items()
        if nbytes > 0.005 * GIB
    ]
    rows = []
    for model, length in product(MODELS, (64, 256)):
        sizes: dict[str, Any] = {"rows": 32, "sequence_length": length, "copies": 1}
        ungathered, gathered = (
            forward_memory(describe(model), memory_rule(constants), **sizes, targets=targets) for targets in (None, 1)
        )
        rows.append(
            (
                model,
                length,
                *(each["largest output"] / GIB for each in (ungathered, gathered)),
                sum(gathered.values()) / GIB,
            )
        )
    return item.result(
        comparisons,
        tables={"parts": parts, "gathered": rows, "sensitivity": deviations(item, constants, step_gb, weights_alone)},
        largest=largest,
        where=where,
        forward=forward,
        forward_where=forward_where,
    )


def outer(constants: Constants, quantity: str, length: str, queries: str, batch: str) -> float:
    """Return GB of one sign's pass of all queries of Llama2-7B, or a step's seconds."""
    count, rows, tokens = int(queries), int(batch), int(length)
    if quantity == "memory":
        parts = forward_memory(
            describe(LLAMA), memory_rule(constants), rows=count * rows, sequence_length=tokens, copies=count
        )
        return sum(parts.values()) / GIB
    return step_s(
        describe(LLAMA), constants.a100(), batch_size=rows, sequence_length=tokens, queries=count, execution="outer"
    )


def table12(item: Item) -> Result:
    """Compute outer-loop parallelization at one total batch; its constants were fitted on Table 13."""
    constants, paper = load_constants(), item.printed
    comparisons = item.compare(partial(outer, constants))
    by_length: dict[str, list[float]] = {}
    for comparison in comparisons:
        if comparison.labels[0] == "runtime":
            by_length.setdefault(comparison.labels[1], []).append(float(comparison.paper or 0.0))
    differs = max(max(group) / min(group) - 1 for group in by_length.values())
    # The rows that each memory cell corresponds to by Table 3's rule, with one B.
    model = describe(LLAMA)
    parts = forward_memory(model, memory_rule(constants), rows=1, sequence_length=1)
    base = sum(parts.values()) - parts["largest output"]
    worth = [
        (
            int(length),
            int(queries),
            int(batch),
            value,
            (value * GIB - base) / (constants.logit_bytes * model.vocab * int(length)),
        )
        for (quantity, length, queries, batch), value in paper.items()
        if quantity == "memory"
    ]
    trivial = deviations(item, constants, outer, lambda quantity, length, *_: paper[quantity, length, "1", "16"])
    return item.result(
        comparisons,
        tables={"equivalent": worth, "sensitivity": trivial},
        printed_differs=differs,
    )


def longest_tokens(constants: Constants, table: str) -> dict[str, float]:
    """Return each task's tokens in a row of the largest batch, fitted to its standard MeZO cell."""
    model = describe(MODEL_IN[table])
    per_token = constants.logit_bytes * model.vocab * constants.batch_size
    parts = forward_memory(model, memory_rule(constants), rows=constants.batch_size, sequence_length=1)
    base = sum(parts.values()) - parts["largest output"]
    cells = printed(PAPER, table).items()
    return {task: max(1.0, (value * GIB - base) / per_token) for (method, task), value in cells if method == STANDARD}


def peak_bytes(constants: Constants, model: str, method: str, tokens: float) -> float:
    """Return the bytes of a method at a batch padded to `tokens`."""
    described = describe(model)
    if method == FULL:
        plain = forward_memory(
            described, memory_rule(constants), rows=constants.batch_size, sequence_length=tokens, adapted=False
        )
        return (
            sum(plain.values()) + FP16_BYTES * described.vocab * described.hidden
        )  # the noise of the largest parameter
    queries, execution = METHODS[method]
    signs = 2 if execution in ("inner", "both") else 1  # in one pass, whose rows are 16 times the signs
    copies = queries if signs == 1 else 2 * queries - 1  # for one query, both signs are as large as MeZO's B and noise
    rows = signs * constants.batch_size
    return sum(
        forward_memory(described, memory_rule(constants), rows=rows, sequence_length=tokens, copies=copies).values()
    )


def run_gb(table: str, constants: Constants, method: str, task: str) -> float:
    """Return GB of a whole run; the standard row is fitted, task by task."""
    return peak_bytes(constants, MODEL_IN[table], method, longest_tokens(constants, table)[task]) / GIB


def more_memory(cells: Cells) -> dict[tuple[str, int], float]:
    """Return by how many per cent P-RGE's peak memory grows if the signs run in one pass as well, by task and queries.

    cells: of Table 17 or 18.
    """
    more = {}
    for task, queries in product(dict.fromkeys(task for _, task in cells), (4, 16)):
        both, outer = (cells[f"P-RGE (q={queries}), {loops}", task] for loops in ("both", "outer"))
        more[task, queries] = 100 * (both / outer - 1)
    return more


def table17(item: Item) -> Result:
    """Fit each task's longest batch to its standard cell, and predict the six other methods; Table 18 too."""
    constants, paper = load_constants(), item.printed
    comparisons = item.compare(partial(run_gb, item.name, constants))
    wrong, count = list[str](), 0
    for task in dict.fromkeys(task for _, task in paper):
        cells = [
            (comparison.labels[0], comparison.paper, comparison.ours)
            for comparison in comparisons
            if comparison.labels[1] == task
        ]
        wrong += [f"{task}: {pair}" for pair in swapped(cells)]
        count += len(swapped((name, theirs, 0.0) for name, theirs, _ in cells))
    tiny, llama = (longest_tokens(constants, table) for table in MODEL_IN)
    tokens = [
        (task, tiny.get(task), llama.get(task), llama[task] / tiny[task] if task in tiny and task in llama else None)
        for task in dict.fromkeys([*tiny, *llama])
    ]
    of_tiny, of_llama = (max(more_memory(printed(PAPER, table)).values()) for table in MODEL_IN)
    trivial = deviations(item, constants, partial(run_gb, item.name), lambda _, task: paper[STANDARD, task])
    return item.result(
        comparisons,
        tables={"tokens": tokens, "sensitivity": trivial},
        number=item.name.removeprefix("table"),
        model=MODEL_IN[item.name],
        ordered=count - len(wrong),
        count=count,
        swapped=f": not {'; '.join(wrong)}" if wrong else "",
        of_tiny=of_tiny,
        of_llama=of_llama,
    )


table18 = table17
