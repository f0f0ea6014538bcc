"""Time and memory of Single, PipeAdapter and RingAda (RingAda, section IV, Table I)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from workbench.core.names import FP32_BYTES
from workbench.methods.ringada.published import (
    PARALLEL,
    PIPE,
    RING,
    SINGLE,
    Constants,
    average,
    layer_times,
    load_constants,
)
from workbench_studies.papers.items import Item, Rows
from workbench_studies.papers.result import Cells, Number, Result, Row, Settings
from workbench_studies.papers.ringada.testbed import seconds_after

TIME = "convergence time"
MICRO_BATCHES = (1, 2, 4, 8)


def weights_mb(constants: Constants, scheme: str) -> float:
    """Return the MB of float32 weights on an average device; for RingAda each has a copy of the embedding (section
    III-A).
    """
    model = constants.model
    embedding, blocks = model.embedding_params, sum(model.layer_params(layer) for layer in range(model.num_layers))
    num_weights = {
        SINGLE: embedding + blocks,
        PIPE: (embedding + blocks) / constants.devices,
        RING: embedding + blocks / constants.devices,
    }
    return FP32_BYTES * num_weights[scheme] / 1e6


def ours(constants: Constants, executed: Mapping[tuple[str, str], float], scheme: str, quantity: str) -> Number:
    """Return our value of a cell, None if nothing was executed.  executed: the scores."""
    if quantity == "memory":
        return weights_mb(constants, scheme)
    return seconds_after(constants, scheme)[-1] if quantity == TIME else executed.get((scheme, quantity))


def _deviations(paper: Cells, constants: Constants) -> list[float]:
    """Return how many per cent each scheme's time is above the paper's."""
    return [100 * (seconds_after(constants, scheme)[-1] / paper[scheme, TIME] - 1) for scheme in (SINGLE, PIPE, RING)]


def table1(item: Item, settings: Settings) -> Result:
    """Simulate the times, count the weights, and train for the scores, if the settings say so."""
    constants, paper = load_constants(), item.printed
    scores, means, model = list[Row](), dict[tuple[str, str], float](), ""
    if settings.trains:
        from workbench_studies.papers.ringada.executed import question_scores  # torch is slow to import

        scores, means, model = question_scores(settings)
    rows: list[Row] = []
    ratios, rings = dict[int, float](), dict[int, float]()
    for count in MICRO_BATCHES:
        single, pipe, ours_s = (average(constants, scheme, count) for scheme in (SINGLE, PIPE, RING))
        plan = layer_times(constants, RING, count)[1]
        ratios[count], rings[count] = single / ours_s, ours_s
        rows.append(
            (count, single, pipe, ours_s, pipe / ours_s, single / ours_s, "" if plan is None else plan.partition())
        )
    times = {scheme: seconds_after(constants, scheme)[-1] / constants.epochs for scheme in (SINGLE, PIPE, RING)}
    ring, parallel = (layer_times(constants, scheme, constants.micro_batches)[0] for scheme in (RING, PARALLEL))
    deviations = _deviations(paper, constants)
    trivial = [
        100 * (paper[SINGLE, TIME] / constants.devices / paper[scheme, TIME] - 1) for scheme in (SINGLE, PIPE, RING)
    ]
    stashing, memory = (1 + constants.backward) * constants.layers / constants.devices, paper[RING, "memory"]
    others = (average(constants, PIPE, constants.micro_batches), stashing, average(constants, SINGLE, 1))
    depths = [(depth, ring_s, *(other / ring_s for other in others), parallel[depth]) for depth, ring_s in ring.items()]
    sensitivity = item.sensitivity(constants, partial(_deviations, paper), trivial)
    tables: dict[str, Rows] = {"micro": rows, "depths": depths, "sensitivity": sensitivity}
    return item.result(
        item.compare(partial(ours, constants, means)),
        tables=tables | ({"scores": scores} if scores else {}),
        holds={"scores": means[RING, "F1"] < means[SINGLE, "F1"]} if scores else {},
        whole_pipe=average(constants, PIPE, 1),
        whole_single=average(constants, SINGLE, 1),
        model=model,
        f1="" if not scores else f"F1 {means[RING, 'F1']:.1f} and {means[SINGLE, 'F1']:.1f}",
        micro_batches=constants.micro_batches,
        single=times[SINGLE],
        pipe=times[PIPE],
        ring=times[RING],
        two=ratios[2],
        four=ratios[4],
        eight=ratios[8],
        low=-deviations[1],
        stashing=stashing,
        crossover=sum(ring_s < stashing for ring_s in ring.values()),
        beside=average(constants, PARALLEL, constants.micro_batches),
        least=rings[8],
        embedding=FP32_BYTES * constants.model.embedding_params / 1e6,
        whole=weights_mb(constants, SINGLE),
        needed=weights_mb(constants, RING),
        printed=memory,
    )
