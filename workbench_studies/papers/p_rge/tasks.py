"""Time of whole fine-tuning runs, task by task, and padding (P-RGE, section 4.2, appendices C and F.3): Tables 15 and
16, Fig. 4, Fig. 5.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from scipy.optimize import brentq

from workbench.core.errors import MissingDataError, WorkbenchError
from workbench.methods.common.result import model_encoder
from workbench.methods.p_rge.analytic import SWEEPS, Execution, step_s
from workbench.methods.p_rge.published import Constants, load_constants
from workbench.profiler.descriptions import describe
from workbench.tasks import load_task
from workbench.tasks.prompts import PAPER_SAMPLES, PROMPTS, PaddingRow, padding_statistics
from workbench_studies.papers.items import Item, Rows, median_deviation
from workbench_studies.papers.p_rge.testbed import LLAMA, PAPER, TINY, deviations
from workbench_studies.papers.result import Cells, Result, Settings, printed

MODEL_OF = {"table15": TINY, "table16": LLAMA}
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
