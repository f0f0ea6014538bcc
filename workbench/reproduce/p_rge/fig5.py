"""Fig. 5: padding in random batches, counted from the tokens of the tasks' prompts (P-RGE, section 3.1, appendix C)."""

from __future__ import annotations

from workbench.core.errors import MissingDataError, WorkbenchError
from workbench.models.loading import load_tokenizer
from workbench.plots.export import Captioned
from workbench.reproduce.drawing import lines
from workbench.reproduce.p_rge.task_times import padded_lengths
from workbench.reproduce.p_rge.testbed import PAPER, load_constants
from workbench.reproduce.result import Check, Comparison, Number, Result, Settings, Table
from workbench.reproduce.values import lookup, paper_values
from workbench.tasks.prompts import PAPER_SAMPLES, PROMPT_TASKS, PaddingRow, encode_prompts, load_prompt_task, padding_statistics

TOKENIZER = "SmolLM2-135M"
BATCHES = (1, 2, 4, 8, 16)
LONGEST = 2048
TITLES = {"sst2": "SST-2", "rte": "RTE", "mrpc": "MRPC", "qqp": "QQP", "qnli": "QNLI", "wnli": "WNLI", "boolq": "BoolQ", "wsc": "WSC",
          "wic": "WiC", "multirc": "MultiRC", "copa": "COPA", "winogrande": "WinoGrande", "squad": "SQuAD"}  # fmt: skip


def statistics(settings: Settings) -> dict[str, list[PaddingRow]]:
    """Return each task's padding at BATCHES, of 1,000 training prompts: the embedded task's, and of those that the data folder holds."""
    tokenizer = load_tokenizer(TOKENIZER)
    found = {}
    for name in PROMPT_TASKS:
        folder = None if name == "sentiment" else settings.data
        if name != "sentiment" and folder is None:
            continue
        try:
            task = load_prompt_task(name, data=folder, **PAPER_SAMPLES)
        except MissingDataError:
            continue
        except WorkbenchError as error:
            settings.progress(f"{name}: {error}")
            continue
        encoded = encode_prompts(task.train, task.prompt, tokenizer, is_causal=True, max_length=LONGEST)
        found[name] = padding_statistics(encoded.lengths, BATCHES)
    return found


def run(settings: Settings) -> Result:
    """Count it."""
    found = statistics(settings)
    comparisons = tuple(
        Comparison(labels=(TITLES.get(name, name), str(row.batch_size)), paper=None, ours=100 * row.share, unit="%", deviation_in="points")
        for name, rows in found.items()
        for row in rows
        if row.batch_size > 1
    )
    by_task = {name: {row.batch_size: row.share for row in rows} for name, rows in found.items()}
    rising = [name for name, shares in by_task.items() if shares[16] > shares[4] > shares[1]]
    return Result(
        item="fig5",
        title="Fig. 5: share of padding in random batches",
        paper_section="C",
        source="counted",
        label_columns=("task", "batch size"),
        comparisons=comparisons,
        tables=(_implied(found),),
        checks=(
            Check(
                claim="more padding with 16 samples than with 4, and none with 1, in every task",
                holds=len(rising) == len(by_task) and all(abs(shares[1]) < 1e-9 for shares in by_task.values()),
                found=f"{len(rising)} of {len(by_task)} tasks: "
                + ", ".join(f"{name} {100 * shares[4]:.0f} and {100 * shares[16]:.0f} %" for name, shares in by_task.items()),
            ),
        ),
        explanation=(
            "The figure prints no numbers.  Ours are exact expectations over all batches of 1,000 training prompts as Table 8 has them, in"
            f" the tokens of {TOKENIZER}; `--data FOLDER` adds every task whose official files the folder holds.",
            "Tables 15 and 16 imply padded lengths too (see there): the second table sets them beside those of the data.  Where launches"
            " bound a step (Table 15's short tasks) they imply upper bounds only.",
        ),
        series={TITLES.get(name, name): tuple((float(row.batch_size), 100 * row.share) for row in rows) for name, rows in found.items()},
    )


def _implied(found: dict[str, list[PaddingRow]]) -> Table:
    constants = load_constants()
    printed = {task for table in ("table15", "table16") for _, task in lookup(paper_values(PAPER, table))}
    rows: list[tuple[Number, ...]] = []
    for name, own in found.items():
        title = TITLES.get(name, name)
        for table in ("table15", "table16"):
            lengths = padded_lengths(constants, table)
            if title in printed and (title, 1) in lengths:
                ours = {row.batch_size: row.padded_length for row in own}
                each = [(ours[batch], lengths[title, 16 // batch]) for batch in (16, 4, 1)]
                rows.append((title, table, *(value for pair in each for value in pair)))
    return Table(
        title="Mean padded length (tokens) at E = 16, 4 and 1: of the data, and what the paper's minutes imply",
        columns=("task", "from", "E = 16", "implied", "E = 4", "implied", "E = 1", "implied"),
        rows=tuple(rows),
        note="SST-2's differ by a constant 13 tokens: a step costs somewhat more than its tokens.",
    )


def draw(result: Result) -> list[Captioned]:
    """Return the share of padding against the batch size."""
    figure = lines(
        result,
        result.series,
        title=result.title,
        subtitle="a batch is padded to its longest sample",
        x_title="samples in a batch",
        y_title="padding, % of all tokens",
        logarithmic_x=True,
    )
    figure.update_xaxes(tickmode="array", tickvals=list(BATCHES))
    return [Captioned("fig5", "Share of padding against the batch size, by task.", figure)]
