"""`workbench bench galaxy_plus`: single-shot inference by Galaxy+ and its baselines on four emulated devices,
interleaved (section IV).

Devices have the speed of the catalogue's Raspberry Pis of Galaxy+'s environments A and B, by the GEMM rate of a core of
this host; links have kernel fidelity if available.  Galaxy+'s own plan is tuned by simulation; the baselines run their
planners' plans unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.run_folder import scratch_folder
from workbench.core.timeline import late_share_of
from workbench.methods.galaxy_plus.planners import INFERENCE_SYSTEMS
from workbench.methods.galaxy_plus.prices import SequencePrice, choose_tiles
from workbench.profiler.host import gemm_rate
from workbench.profiler.timing import torch_threads
from workbench.runtime.engines import EngineCluster
from workbench_studies.bench.frame import Figures, Progress, line_of, require_words
from workbench_studies.bench.inference_parts import (
    CLUSTERS,
    LENGTH,
    SIZES,
    BenchModel,
    emulated_cluster,
    host_profile,
    planning_point,
    random_ids,
    save_model,
    scaling_points,
)
from workbench_studies.bench.inference_sides import DTENSOR, Side, SidesJob, SidesResult, overlap_point, run_sides

MODELS = ("MiniLM", "BERT-base")
SCALED = "GPT2-L layer"
MBIT_PER_S = (125, 250, 500, 1000)
ROUNDS, FEW_ROUNDS = 3, 1
SLOW_SIDES = ("edgeshard", "local")
"""Timed only FEW_ROUNDS times: these sides use one device after the other, take long, and vary little because they send
little."""
BUSY_SHARE = 0.05
"""Maximum late share of the time; a point above it is invalid, because the host is too busy."""
DILATION = 2.0
"""Devices and links are emulated this many times slower, and times are divided by it, because two cores do not keep up
with four such devices otherwise.  Ratios do not change, except that the runtime's overhead per message counts half.
"""
LARGEST_GAP = 1e-4
BASELINES = ("galaxy", "megatron_lm", "sequence_parallel", *SLOW_SIDES, DTENSOR)
PARTS = ("latency", "overlap", "scaling", "planner")
KINDS: tuple[tuple[Any, ...], ...] = (MODELS, tuple(CLUSTERS), MBIT_PER_S, PARTS)
WORDS = tuple(str(entry).lower() for kind in KINDS for entry in kind)
SHOWN = ("ranks", "units", "columns", "tile_tokens", "both_ways")
"""Attributes of Galaxy+'s plan in a point."""


class Selection(NamedTuple):
    """The points to measure."""

    models: tuple[str, ...]
    clusters: tuple[str, ...]
    mbit_per_s: tuple[int, ...]
    parts: tuple[str, ...]

    @classmethod
    def of(cls, words: Sequence[str]) -> Selection:
        """Return the points that words name; a kind without a word is measured completely.  Raises ConfigError for an
        unknown word.
        """
        lowered = [word.lower() for word in words]
        require_words(lowered, WORDS)
        return cls(*(tuple(entry for entry in kind if str(entry).lower() in lowered) or tuple(kind) for kind in KINDS))


def bench(progress: Progress = print, only: Sequence[str] = ()) -> Figures:
    """Return the latency of every baseline over Galaxy+'s, how much of the shorter side overlap hides, the scaling, the
    planner's time.

    only: words that restrict the points (see Selection): models, clusters, bandwidths, 'latency', 'overlap', 'scaling',
    'planner'.
    """
    selection = Selection.of(only)
    planning = planning_point(progress) if "planner" in selection.parts else {}
    if selection.parts == ("planner",):
        return {
            "label": "real: seconds of this machine",
            "what": "our planner by Eq. 9",
            **planning,
        }
    with scratch_folder() as folder, torch_threads(1):
        models = list(_models(selection, folder, progress))
        host_flops_per_s = max(
            gemm_rate(seconds=0.4) for _ in range(5)
        )  # other load on a shared host only lowers the rate
        progress(f"One core of this host: {host_flops_per_s / 1e9:.0f} GFLOP/s")
        points: list[Figures] = []
        scaling: Figures = {}
        fidelity = ""
        for name in selection.clusters:
            for mbit in selection.mbit_per_s:
                cluster = emulated_cluster(name, mbit, host_flops_per_s, DILATION)
                with EngineCluster.start(cluster) as engines:
                    fidelity = engines.fidelity
                    for model in models:
                        if model.name == SCALED:
                            if name == "homogeneous" and mbit == max(MBIT_PER_S):
                                scaling = scaling_points(model, cluster, engines, progress)
                            continue
                        points.append(_point(model, name, mbit, cluster, engines, selection))
                        progress(line_of(points[-1]))
    return _result(points, scaling | planning, fidelity)


def _models(selection: Selection, folder: Path, progress: Progress) -> Iterator[BenchModel]:
    model_names = [*selection.models] if {"latency", "overlap"} & set(selection.parts) else []
    scales = (
        "scaling" in selection.parts and "homogeneous" in selection.clusters and max(MBIT_PER_S) in selection.mbit_per_s
    )
    for name in [*([SCALED] if scales else []), *(model_names or ["MiniLM"] * (not scales))]:
        path = folder / name.replace(" ", "-")
        save_model(SIZES[name], path)
        host, note = host_profile(path, SIZES[name], LENGTH if name != SCALED else 384)
        progress(f"{name}: {note}")
        yield BenchModel(name=name, folder=path, host=host)


def _point(
    model: BenchModel, name: str, mbit: int, cluster: Cluster, engines: EngineCluster, selection: Selection
) -> Figures:
    """Measure one model on one cluster: every side's latency, and the blocks of scheme 1 separately."""
    price = model.prices(cluster, LENGTH)
    ids, ours = random_ids(LENGTH), model.plan(cluster)
    sides = [Side(name="galaxy_plus", plan=ours, ids=ids, rounds=ROUNDS if "latency" in selection.parts else 0)]
    if "latency" in selection.parts:
        for system in BASELINES[:-1]:
            plan = INFERENCE_SYSTEMS[system](price.problem)
            sides.append(Side(name=system, plan=plan, ids=ids, rounds=FEW_ROUNDS if system in SLOW_SIDES else ROUNDS))
        if engines.fidelity == "kernel":  # only the kernel can slow down torch's own messages
            sides.append(Side(name=DTENSOR, plan=None, ids=ids, rounds=ROUNDS))
    split = choose_tiles(replace(ours, overlap=True, schemes=(1,) * len(ours.schemes)), price)
    overlap = split if "overlap" in selection.parts else None
    results = engines.run(
        run_sides, [SidesJob(setup=model.setup(cluster), sides=tuple(sides), overlap=overlap)] * cluster.world_size
    )
    where = {"model": model.name, "cluster": name, "mbit_per_s": mbit}
    latencies = _latencies(results, sides, price) if "latency" in selection.parts else {}
    return where | latencies | (overlap_point(split, price, results, dilation=DILATION) if overlap else {})


def _latencies(results: Sequence[SidesResult], sides: Sequence[Side], price: SequencePrice) -> Figures:
    seconds = {side.name: next(r.seconds[side.name] for r in results if side.name in r.seconds) for side in sides}
    outputs = {side.name: next(r.outputs[side.name] for r in results if side.name in r.outputs) for side in sides}
    expected = outputs["local"]
    gap = max(float((output - expected).abs().max() / expected.abs().max()) for output in outputs.values())
    if gap > LARGEST_GAP:
        raise AssertionError(f"the sides do not compute the same: hidden states differ by {gap:.1e}")
    ours = sides[0].plan
    assert ours is not None
    usual_s = median(seconds["galaxy_plus"])
    point: Figures = {"galaxy_plus_s": usual_s / DILATION}
    for side in sides[1:]:
        pairs = list(zip(seconds[side.name], seconds["galaxy_plus"], strict=False))
        ratios = [theirs / (mine if len(pairs) > 1 else usual_s) for theirs, mine in pairs]
        point[side.name] = median(ratios)
        point[f"{side.name} from, to"] = (round(min(ratios), 3), round(max(ratios), 3))
    late = late_share_of((result.late_s, result.paced_s) for result in results)
    point |= {"overrun_share": late, "is_valid": late <= BUSY_SHARE}
    point["plan"] = {
        "predicted_s": price(ours) / DILATION,
        "predicted": {side.name: price(side.plan) / price(ours) for side in sides[1:] if side.plan is not None},
        "schemes": ours.configuration,
        "tokens": ours.tokens(LENGTH) if ours.shares else (),
        **{name: getattr(ours, name) for name in SHOWN},
        "gap": gap,
    }
    return point


def _result(points: list[Figures], others: Figures, fidelity: str) -> Figures:
    """Return the summary: the smallest ratio of each requested kind, and all points."""

    def least(names: Sequence[str], **where: Any) -> float | None:
        chosen = [point for point in points if all(point[key] == value for key, value in where.items())]
        return min((point[name] for point in chosen for name in names if name in point), default=None)

    summary = {
        "label": f"emulated, {fidelity} links; devices and links at 1/{DILATION:g} of their speed, times divided by "
        f"{DILATION:g}",
        "what": "latency of each baseline over Galaxy+'s, one sequence of 284 tokens, random weights; Raspberry Pis of "
        "Env. A and B",
        "M-LM over Galaxy+, homogeneous, 500 Mbit/s, least": least(
            ("megatron_lm",), cluster="homogeneous", mbit_per_s=500
        ),
        "M-LM over Galaxy+, heterogeneous, 500 Mbit/s, least": least(
            ("megatron_lm",), cluster="heterogeneous", mbit_per_s=500
        ),
        "DTensor over Galaxy+, least": least((DTENSOR,)),
        "any baseline over Galaxy+, least": least(BASELINES),
        "overlapped blocks over the longer of computation and communication, most": max(
            (point["overlap"] for point in points if "overlap" in point), default=None
        ),
        **others,
        "invalid points (host too busy)": sum(not point.get("is_valid", True) for point in points),
        "points": points,
    }
    return {key: value for key, value in summary.items() if value is not None}
