"""Table 7's faults under the runtime's own protocol, in virtual time: its coordinator detects them, plans again and
repeats what is lost (Confidant, section 5.4).
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from workbench import experiment
from workbench.core.job import Job
from workbench.core.report import Recovery
from workbench.methods.training.state_costs import IN_MEMORY, keeping_s, trained_homes
from workbench_studies.papers.confidant.faults import QUITTING, TRAINING, Phones
from workbench_studies.papers.confidant.testbed import PAPER
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Result, Row, printed, read_constants

MODEL = "shape:mbert"
"""Twelve blocks of BERT-Base's sizes; costs are those of Table 7's phones, so that its vocabulary does not matter."""
WINDOW, SMALL_WINDOW = 32, 4
"""Mini-batches of a window: the default, and about as many as are in flight in Table 7."""
WINDOWS, BEGUN = 6, 2.5
"""Number of windows, and how many of them have passed when the fault occurs."""
RUNS = (
    ("kill", "full", WINDOW),
    ("kill", "full", SMALL_WINDOW),
    ("kill", "lora", SMALL_WINDOW),
    ("freeze", "full", SMALL_WINDOW),
    ("leave", "full", SMALL_WINDOW),
    ("leave", "lora", SMALL_WINDOW),
)
KINDS = {"kill": "the process ends", "freeze": "the device falls silent", "leave": "leaves on notice"}


def recovery(kind: str, technique: Any, window: int) -> tuple[Recovery, float]:
    """Simulate a fault of Table 7's second phone in the middle of a window, and return its cost, and the seconds of
    a snapshot.

    Snapshots are in the next device's memory after every window.
    """
    constants = read_constants(PAPER, dict[str, Any], "table7")
    phones, batch = Phones(**constants, technique=technique), constants["batch"]
    plan = phones.plan(*range(TRAINING))
    fills_s = phones.trained_s(plan, window) - window * phones.pace_s(plan)
    since_s = fills_s + BEGUN * window * phones.pace_s(plan)
    samples = WINDOWS * window * batch
    with TemporaryDirectory() as folder:
        texts = Path(folder) / "texts.jsonl"  # all as long as Table 7's
        row = {"text": "word " * constants["tokens"]}
        texts.write_text("\n".join(json.dumps(row | {"label": number % 2}) for number in range(2 * samples)))
        job = Job(
            method=PAPER,
            model=MODEL,
            task="classification",
            data=str(texts),
            batch_size=batch,
            micro_batches=1,
            max_length=constants["tokens"],
            epochs=1,
            train_samples=samples,
            validation_samples=1,
            test_samples=1,
            options={"devices": TRAINING, "window": window, "technique": technique},
            faults=f"{kind}:{QUITTING}@{since_s:.3f}s",
            snapshot_every=1,
            snapshot_to="neighbour",
        )
        report = experiment.run(job, phones.cluster, "simulate", chosen_plan=plan, costs=phones.profile)
    [cost] = report.recoveries
    return cost, keeping_s(phones.cluster, phones.profile, trained_homes(plan), IN_MEMORY)


def protocol(item: Item) -> Result:
    """Simulate the faults, and put them next to the paper's parts."""
    paper = {labels: value / 1e3 for labels, value in printed(PAPER, "table7").items()}

    def printed_row(kind: str, first: str, moved: str) -> Row:
        parts = (paper[kind, first], None, paper[kind, moved], paper[kind, "Retrain"], paper[kind, "Recovery"])
        return f"the paper, {kind}", None, None, *parts

    rows = [
        printed_row("passive", "Detection", "Weight redistribution"),
        printed_row("proactive", "Search", "Substitution"),
    ]
    costs = {run: recovery(*run) for run in RUNS}
    for (kind, technique, window), (cost, _) in costs.items():
        moved_s = cost.resumed_s - cost.step_s
        waits_s = 0.0 if kind == "leave" else cost.planned_s  # on notice all train on until the window ends
        noticed_s = 0.0 if kind == "leave" else cost.noticed_s
        again_s = max(0.0, cost.stood_still_s - noticed_s - waits_s - moved_s)
        rows.append((KINDS[kind], technique, window, cost.noticed_s, waits_s, moved_s, again_s, cost.stood_still_s))
    moved, again = (
        {run: float(row[column] or 0.0) for run, row in zip(RUNS, rows[2:], strict=True)} for column in (5, 6)
    )
    killed, short, small, _, leaves, _ = RUNS
    return item.result(
        tables={"parts": rows},
        window=WINDOW,
        small=SMALL_WINDOW,
        again=again[killed],
        again_small=again[short],
        retrain=paper["passive", "Retrain"],
        still=costs[killed][0].stood_still_s,
        still_small=costs[short][0].stood_still_s,
        moved=moved[killed],
        on_notice=costs[leaves][0].stood_still_s,
        keeping=costs[killed][1],
        still_lora=costs[small][0].stood_still_s,
        recovery=paper["passive", "Recovery"],
    )
