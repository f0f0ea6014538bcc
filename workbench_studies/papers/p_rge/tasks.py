"""Time and peak memory of whole fine-tuning runs, padding, and memory of a step (P-RGE, sections 3.1 and 4.2,
appendices F.1 and F.3).

Tables 15 and 16 with Fig. 4 are minutes, task by task, Fig. 5 is padding, Tables 3, 12, 17 and 18 are memory.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from typing import Any

from scipy.optimize import brentq

from workbench.core.errors import MissingDataError, WorkbenchError
from workbench.methods.common.result import model_encoder
from workbench.methods.p_rge.analytic import FP16_BYTES, SWEEPS, Execution, step_s
from workbench.methods.p_rge.published import Constants, load_constants
from workbench.profiler.descriptions import describe
from workbench.tasks import load_task
from workbench.tasks.prompts import PAPER_SAMPLES, PROMPTS, PaddingRow, padding_statistics
from workbench_studies.papers.items import Item, Rows, median_deviation, swapped, worst
from workbench_studies.papers.p_rge.counted import FirstOrder, first_order_memory, forward_memory
from workbench_studies.papers.p_rge.testbed import GIB, LLAMA, MODELS, PAPER, TINY, deviations, memory_rule
from workbench_studies.papers.result import Cells, Number, Result, Settings, printed

MODEL_OF = {"table15": TINY, "table16": LLAMA}
MODEL_IN = {"table17": TINY, "table18": LLAMA}
FULL, STANDARD = "MeZO (full)", "MeZO (LoRA-FA), standard"
METHODS: dict[str, tuple[int, Execution]] = {
    FULL: (1, "sequential"),
    STANDARD: (1, "sequential"),
    "MeZO (LoRA-FA), inner": (1, "inner"),
    "P-RGE (q=4), outer": (4, "outer"),
    "P-RGE (q=4), both": (4, "both"),
    "P-RGE (q=16), outer": (16, "outer"),
    "P-RGE (q=16), both": (16, "both"),
}
FITTED_ON = ("MeZO (LoRA-FA), inner", "P-RGE (q=4), both", "P-RGE (q=16), both")
"""The cells to which a task's mean padded length at E = 16, 4 and 1 is fitted."""
TOKENIZER = "SmolLM2-135M"
BATCHES = (1, 2, 4, 8, 16)
TITLES = {
    "sst2": "SST-2",
    "rte": "RTE",
    "mrpc": "MRPC",
    "qqp": "QQP",
    "qnli": "QNLI",
    "wnli": "WNLI",
    "boolq": "BoolQ",
    "wsc": "WSC",
    "wic": "WiC",
    "multirc": "MultiRC",
    "copa": "COPA",
    "winogrande": "WinoGrande",
    "squad": "SQuAD",
}


def minutes(constants: Constants, model: str, method: str, tokens: float) -> float:
    """Return the minutes of a run at a mean padded length."""
    described = describe(model)
    queries, execution = METHODS[method]
    seconds = step_s(
        described,
        constants.tasks(),
        batch_size=constants.batch_size / queries,
        sequence_length=tokens,
        queries=queries,
        execution=execution,
        swept_params=described.params if method == FULL else 0,
    )
    return constants.steps * seconds / 60


@cache
def padded_lengths(constants: Constants, table: str) -> dict[tuple[str, int], float]:
    """Return tokens of a padded row, by task and queries, as implied by the cells of FITTED_ON.

    A cell that kernel launches alone explain implies no length: the result is the longest length that they hide.
    """
    lengths = {}
    for (method, task), value in printed(PAPER, table).items():
        if method in FITTED_ON:
            minutes_at = partial(minutes, constants, MODEL_OF[table], method)
            target = max(value, minutes_at(1.0) * (1 + 1e-9))
            lengths[task, METHODS[method][0]] = float(
                brentq(
                    lambda tokens, minutes_at=minutes_at, target=target: minutes_at(tokens) - target,
                    1.0,
                    4096.0,
                    xtol=1e-6,
                )
            )
    return lengths


def run_minutes(table: str, constants: Constants, method: str, task: str) -> float:
    """Return the minutes of a run of a table."""
    return minutes(constants, MODEL_OF[table], method, padded_lengths(constants, table)[task, METHODS[method][0]])


def speedups(cells: Cells, over: str) -> dict[str, float]:
    """Return, by task, the speedup of the best of P-RGE's 'both' over a method."""
    tasks = dict.fromkeys(task for _, task in cells)
    return {task: cells[over, task] / min(cells[method, task] for method in FITTED_ON[1:]) for task in tasks}


def table15(item: Item) -> Result:
    """Fit each task's lengths to the cells with both signs in one pass, and predict the others; Table 16 too."""
    constants, paper = load_constants(), item.printed
    comparisons = item.compare(partial(run_minutes, item.name, constants))
    lengths = padded_lengths(constants, item.name)
    our_speedup, theirs = (
        max(speedups(each, FULL).values())
        for each in ({comparison.labels: comparison.ours for comparison in comparisons}, paper)
    )
    tasks = list(dict.fromkeys(task for _, task in paper))
    padding = [
        (task, *(lengths[task, queries] for queries in (1, 4, 16)), 100 * (1 - lengths[task, 16] / lengths[task, 1]))
        for task in tasks
    ]
    sweeps = SWEEPS * describe(MODEL_OF[item.name]).params * constants.sweep_s_per_param
    pairs = [(task, paper[STANDARD, task], paper[FULL, task]) for task in tasks]
    trivial = deviations(item, constants, partial(run_minutes, item.name), lambda _, task: paper[STANDARD, task])
    return item.result(
        comparisons,
        tables={
            "lengths": padding,
            "sweeps": [
                (task, standard, full, (full - standard) * 60 / constants.steps, sweeps)
                for task, standard, full in pairs
            ],
            "sensitivity": trivial,
        },
        number=item.name.removeprefix("table"),
        model=MODEL_OF[item.name],
        own=our_speedup,
        theirs=theirs,
    )


table16 = table15


def fig4(item: Item) -> Result:
    """Divide the values of Tables 15 and 16."""
    constants, claims = load_constants(), printed(PAPER, "claims")
    comparisons = []
    for table, model in MODEL_OF.items():
        paper = printed(PAPER, table)
        ours = {labels: run_minutes(table, constants, *labels) for labels in paper}
        for over in (FULL, STANDARD):
            our_speedups, theirs = speedups(ours, over), speedups(paper, over)
            comparisons += [item.cell((model, over, task), theirs[task], our_speedups[task]) for task in our_speedups]
    words: dict[str, Any] = {"median": median_deviation(comparisons)}
    for name, over in (("full", FULL), ("standard", STANDARD)):
        claimed = claims[(f"end-to-end speedup over {over.removesuffix(', standard')}",)]
        best, most = (
            max(getattr(comparison, side) for comparison in comparisons if comparison.labels[1] == over)
            for side in ("ours", "paper")
        )
        words |= {f"{name}_told": claimed, f"{name}_best": best, f"{name}_printed": most}
    return item.result(comparisons, **words)


def statistics(settings: Settings) -> dict[str, list[PaddingRow]]:
    """Return each task's padding at BATCHES, of 1,000 training prompts: for the embedded task, and for those in the
    data folder.
    """
    padding = {}
    for name in PROMPTS:
        folder = None if name == "sentiment" else settings.data
        if name != "sentiment" and folder is None:
            continue
        try:
            task = load_task(name, data=folder, prompted=True, **PAPER_SAMPLES)
        except MissingDataError:
            continue
        except WorkbenchError as error:
            settings.progress(f"{name}: {error}")
            continue
        encoded = model_encoder(task.template, TOKENIZER, 2048).split(task.train.prompts)
        padding[name] = padding_statistics(encoded.lengths, BATCHES)
    return padding


def fig5(item: Item, settings: Settings) -> Result:
    """Count the padding in random batches from the tokens of the tasks' prompts."""
    padding = statistics(settings)
    shares = {name: {row.batch_size: row.share for row in rows} for name, rows in padding.items()}
    rising = [name for name, each in shares.items() if each[16] > each[4] > each[1]]
    title = {name: TITLES.get(name, name) for name in padding}
    cells = [
        ((title[name], str(batch)), share)
        for name, each in shares.items()
        for batch, share in each.items()
        if batch > 1
    ]
    return item.result(
        [item.cell(labels, None, 100 * share) for labels, share in cells],
        tables={"implied": _implied({title[name]: rows for name, rows in padding.items()})},
        series={
            title[name]: tuple((float(batch), 100 * share) for batch, share in each.items())
            for name, each in shares.items()
        },
        rising=f"{len(rising)} of {len(shares)}",
        shares=", ".join(f"{name} {100 * each[4]:.0f} and {100 * each[16]:.0f} %" for name, each in shares.items()),
    )


def _implied(padding: dict[str, list[PaddingRow]]) -> Rows:
    rows = []
    for title, padding_rows in padding.items():
        ours = {row.batch_size: row.padded_length for row in padding_rows}
        for table in MODEL_OF:
            lengths = padded_lengths(load_constants(), table)
            if (title, 1) in lengths:
                rows.append(
                    (
                        title,
                        table,
                        *(value for batch in (16, 4, 1) for value in (ours[batch], lengths[title, 16 // batch])),
                    )
                )
    return rows


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
        wrong += [f"{task}: {pair}" for pair in swapped(cells, 0.02)]
        count += len(swapped(((name, theirs, 0.0) for name, theirs, _ in cells), 0.02))
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
