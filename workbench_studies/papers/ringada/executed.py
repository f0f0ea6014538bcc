"""Loss by epochs and accuracy by time of the three schemes and of FedAvg, trained at small size (RingAda, section IV,
Fig. 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from workbench.methods.ringada.published import FEDERATED, PIPE, RING, SINGLE, depth_of, load_constants
from workbench.models.configuration import model_facts
from workbench.trainings.rings import Curve, Training, train_in_turn
from workbench_studies.papers.items import Item, Rows
from workbench_studies.papers.result import Number, Result, Row, Series, Settings, spread
from workbench_studies.papers.ringada.testbed import seconds_after

SYNCHRONOUS = "PipeAdapter, synchronous"
"""It trains as Single does, in PipeAdapter's time."""


def curve_of(training: Training, settings: Settings, item: str, scheme: str, seed: int) -> Curve:
    """Return the stored training of the same settings, or train now."""
    curve = training.outcome(settings.workdir, item, scheme, seed, Curve, lambda: _train(training, scheme, seed))
    test = ", ".join(f"{name} {value:.1f} %" for name, value in curve.test.items())
    settings.progress(f"{scheme}, seed {seed}: loss {curve.losses[-1]:.3f}, test {test}")
    return curve


def fig3(item: Item, settings: Settings) -> Result:
    """Train with all adapters, with all and stashed weights, with one more at a time from the top, and by federated
    averaging of all adapters.
    """
    constants, paper = load_constants(), item.printed
    training = Training(steps=round(constants.epochs))
    training = training.quick() if settings.quick else training
    steps, points, ends_of_points = training.steps, training.points, training.ends
    clock = {scheme: seconds_after(constants, scheme) for scheme in (SINGLE, PIPE, RING, FEDERATED)}
    curves = {
        scheme: [curve_of(training, settings, "fig3", scheme, seed) for seed in settings.seeds] for scheme in clock
    }
    times = {scheme: [passed[step - 1] for step in ends_of_points] for scheme, passed in clock.items()}
    series: Series = {}
    loss, score = dict[str, list[float]](), dict[str, list[float]]()
    for scheme in clock:
        loss[scheme] = [fmean(values) for values in zip(*(curve.losses for curve in curves[scheme]), strict=True)]
        score[scheme] = [fmean(values) for values in zip(*(curve.scores for curve in curves[scheme]), strict=True)]
        series[f"loss, {scheme}"] = tuple(zip(map(float, ends_of_points), loss[scheme], strict=True))
        series[f"accuracy, {scheme}"] = tuple(zip(times[scheme], score[scheme], strict=True))
    target = score[RING][-1]
    reached = {
        scheme: next((time for time, value in series[f"accuracy, {scheme}"] if value >= target), None)
        for scheme in clock
    }
    rows: list[Row] = []
    for scheme in clock:
        tests = [curve.test["accuracy"] for curve in curves[scheme]]
        rows.append(
            (scheme, loss[scheme][0], loss[scheme][-1], score[scheme][-1], fmean(tests), spread(tests), reached[scheme])
        )
    gaps = [
        [ring - single for ring, single in zip(ring_curve.losses, other.losses, strict=True)]
        for ring_curve, other in zip(curves[RING], curves[SINGLE], strict=True)
    ]
    middle, ends_at = (
        [fmean(gap[part]) for gap in gaps] for part in (slice(points // 4, points // 2), slice(-points // 4, None))
    )
    narrowed = [before - after for before, after in zip(middle, ends_at, strict=True)]
    ends = {scheme: fmean(curve.test["accuracy"] for curve in curves[scheme]) for scheme in clock}
    soonest = min((time, scheme) for scheme, time in reached.items() if time is not None and scheme != FEDERATED)
    return item.result(
        [item.cell(labels, value, clock[labels[0]][-1], "s") for labels, value in paper.items()],
        tables={
            "ends": rows,
            "equal": equal_terms(curves | {SYNCHRONOUS: curves[SINGLE]}, times | {SYNCHRONOUS: times[PIPE]}),
        },
        holds={
            "narrows": fmean(narrowed) > (spread(narrowed) or 0.0),
            "below": ends[RING] < ends[SINGLE],
            "sooner": soonest[1] == RING,
        },
        series=series,
        early=fmean(middle),
        late=fmean(ends_at),
        equal_s=min(passed[-1] for passed in times.values()),
        stashing=(1 + constants.backward) * constants.layers / constants.devices * constants.layer_s * constants.epochs,
        single=ends[SINGLE],
        ring=ends[RING],
        target=target,
        reached=", ".join(
            f"{scheme} {'never' if time is None else f'{time:.0f} s'}" for scheme, time in reached.items()
        ),
        seeds=len(settings.seeds),
        model=training.model,
        steps=steps,
        local=steps // points // constants.devices,
    )


def equal_terms(curves: Mapping[str, Sequence[Curve]], times: Mapping[str, Sequence[float]]) -> Rows:
    """Return for each scheme the seconds until its loss is RingAda's last one, and its validation score after the time
    in which the first scheme ends.

    curves: one for each seed, by scheme.  times: the seconds at each point of a curve.  Both values are means over the
    seeds, the score with its deviation; None for a loss that not all seeds reach, and before a scheme's first point.
    """
    end_s = min(passed[-1] for passed in times.values()) * (1 + 1e-9)  # sums of the same seconds differ by rounding
    rows: list[Row] = []
    for scheme, trained in curves.items():
        reached = [
            next((time for time, loss in zip(times[scheme], own.losses, strict=True) if loss <= ring.losses[-1]), None)
            for own, ring in zip(trained, curves[RING], strict=True)
        ]
        everywhere = [time for time in reached if time is not None]
        count = sum(time <= end_s for time in times[scheme])
        scores = [own.scores[count - 1] for own in trained] if count else []
        rows.append(
            (
                scheme,
                fmean(everywhere) if len(everywhere) == len(reached) else None,
                fmean(scores) if scores else None,
                spread(scores) if scores else None,
            )
        )
    return rows


def question_scores(settings: Settings) -> tuple[list[Row], dict[tuple[str, str], float], str]:
    """Train on questions: the embedded ones, or SQuAD's files in the settings' data folder.

    Returns a row for each scheme, each scheme's means by F1 and EM, per cent, and the model in words.
    """
    training = Training(task="questions", limits=(None, 100, 400), steps=120, points=1, batch_size=16)
    if settings.data is not None and any(settings.data.glob("*.json")):
        training = replace(
            training, task="question_answering", data=settings.data.resolve(), limits=(2000, 100, 400), max_length=192
        )
    training = training.quick() if settings.quick else training
    rows, means = list[Row](), dict[tuple[str, str], float]()
    for scheme in (SINGLE, PIPE, RING):
        curves, row = [curve_of(training, settings, "table1", scheme, seed) for seed in settings.seeds], list[Number]()
        for name, metric in (("F1", "answer_f1"), ("EM", "exact_match")):
            values = [curve.test[metric] for curve in curves]
            row += [fmean(values), spread(values)]
            means[scheme, name] = fmean(values)
        rows.append(
            (scheme, training.task, training.steps, len(curves), fmean(curve.losses[-1] for curve in curves), *row)
        )
    return rows, means, f"{training.model}{' (quick trial)' * settings.quick}"


def _train(training: Training, scheme: str, seed: int) -> Curve:
    """Train; at every step the fraction of trained layers is that of the paper's twelve.

    PipeAdapter computes with stashed weights: each device's layers are as many updates behind as devices follow it.
    """
    constants, steps, is_federated = load_constants(), training.steps, scheme == FEDERATED

    def trained(step: int, num_layers: int, history: Sequence[float]) -> int:
        return -(-depth_of(constants, scheme, step * round(constants.epochs) // steps) * num_layers // constants.layers)

    num_layers = model_facts(training.model).num_layers

    def behind(layer: int) -> int:
        return constants.devices - 1 - layer * constants.devices // num_layers

    return train_in_turn(
        training,
        seed,
        trained,
        devices=constants.devices if is_federated else 1,
        is_federated=is_federated,
        delay=behind if scheme == PIPE else None,
    )
