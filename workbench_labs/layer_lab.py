"""Widgets and figures of the lab 'Cut a layer' that are more than one call (Galaxy+, sections III-B to III-D)."""

from __future__ import annotations

from dataclasses import replace

import plotly.graph_objects as go

from workbench.core.catalogue import load_cluster
from workbench.core.job import Fidelity, Job
from workbench.methods.galaxy_plus.prices import SequencePrice
from workbench.widgets import ClusterForm, JobForm, RunPanel, SchedulePlayer, passages_folder
from workbench_labs.inference_explorer import WAYS, InferenceExplorer, LayerCutter, SchemeEditor, plan_of_weights
from workbench_labs.inference_problem import PLANNERS, SequenceProblem, described_problem, one_layer, overlap_cells
from workbench_labs.plots.layer_cut import held_bytes
from workbench_labs.plots.overlapping import overlap

MEGABITS = (125, 250, 500, 1000)


def paper_problem(model: str, cluster_name: str, tokens: int) -> SequenceProblem:
    """Return a sequence to be divided as in the paper: its model and devices, with computed costs."""
    return described_problem(model, load_cluster(cluster_name), length=tokens)


def layer_cutter(problem: SequenceProblem) -> LayerCutter:
    """Return sliders and buttons that cut one layer of the problem's model."""
    return LayerCutter(problem.profile.stacks[0], problem.cluster, length=problem.sequence_length)


def copies_in_scheme_2(problem: SequenceProblem) -> float:
    """Return the bytes of a layer's weights on all devices in scheme 2, over those in scheme 1."""
    shape = problem.profile.stacks[0]
    plan = plan_of_weights([1] * problem.cluster.world_size, shape, scheme=WAYS["scheme 2"].scheme)
    first, second = (sum(sum(parts.values()) for parts in held_bytes(plan, shape, scheme=scheme)) for scheme in (1, 2))
    return second / first


def scheme_editor(problem: SequenceProblem) -> SchemeEditor:
    """Return a button for each layer's scheme, with all layers in scheme 1."""
    return SchemeEditor(problem, schemes=[1] * problem.profile.num_layers)


def ring_player(problem: SequenceProblem) -> SchedulePlayer:
    """Return a player for one layer's ring, tile by tile, in five ways."""
    layer = one_layer(problem)
    count = len(layer.profile.stacks)
    printed = replace(PLANNERS["Algorithm 1"](layer), schemes=(1,) * count, tile_tokens=0, both_ways=False)
    ways = {
        "not overlapped": replace(printed, overlap=False),
        "overlapped": replace(printed, overlap=True),
        "overlapped, both ways round": replace(printed, overlap=True, both_ways=True),
        "overlapped, tiles of 24 tokens": replace(printed, overlap=True, tile_tokens=24),
        "overlapped, scheme 2": replace(printed, overlap=True, schemes=(2,) * count),
    }
    price = SequencePrice(layer)
    return SchedulePlayer(
        {
            name: price.timeline(plan, title=f"One layer, {name}, {1e3 * price(plan):.1f} ms")
            for name, plan in ways.items()
        }
    )


def overlap_figure(problem: SequenceProblem) -> go.Figure:
    """Return how much communication one layer hides in scheme 1, at several bandwidths."""
    plan = replace(PLANNERS["Algorithm 1"](problem), schemes=(1,) * problem.profile.num_layers, overlap=True)
    return overlap(
        overlap_cells(problem, plan, MEGABITS),
        title="Is communication hidden?",
        label="simulated",
        what="one layer",
        subtitle=f"{problem.profile.model}, scheme 1",
    )


def explorer(problem: SequenceProblem) -> InferenceExplorer:
    """Return sliders for the devices, and what each planner makes of them."""
    return InferenceExplorer(problem)


def request_panel(model: str, cluster_name: str, *, tokens: int, requests: int, fidelity: Fidelity) -> RunPanel:
    """Return a panel that answers requests on emulated devices, and checks each answer against the whole model."""
    job = Job(
        method="galaxy_plus",
        model=model,
        task="sst2",
        data=passages_folder(count=requests, sentences=12),
        test_samples=requests,
        max_length=tokens,
    )
    cluster = ClusterForm(load_cluster(cluster_name), choice=False)
    return RunPanel(JobForm(job), cluster, fidelity=fidelity)
