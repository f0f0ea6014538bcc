"""The parts of the inference benchmark: models, environments, plans; the planner's time, and the scaling of one
layer.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.core.catalogue import load_cluster
from workbench.core.cluster import MEGABIT_BYTES, Cluster, Link
from workbench.core.errors import PlanError
from workbench.core.inference import InferencePlan
from workbench.core.timeline import late_share_of
from workbench.methods.galaxy_plus import planners as galaxy_plus
from workbench.methods.galaxy_plus.costs import analytic_from, end_bytes, layer_flops, scaled_to, stack_sizes
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.methods.galaxy_plus.planners.equation9 import Equation9, cut_of
from workbench.methods.galaxy_plus.prices import SequencePrice, tune
from workbench.methods.galaxy_plus.profiles import measure_host
from workbench.methods.galaxy_plus.session import SessionSetup
from workbench.models.sharding import model_layout, open_weights
from workbench.models.tokenizer import tiny_tokenizer
from workbench.planners import Problem
from workbench.profiler.cache import cached
from workbench.profiler.descriptions import describe
from workbench.runtime.engines import EngineCluster
from workbench_studies.bench.frame import Figures, Progress, line_of
from workbench_studies.bench.inference_sides import Side, SidesJob, SidesResult, block_ends, run_sides

LENGTH = 284
VOCABULARY = 2000
CLUSTERS = {"homogeneous": "galaxy-env-a", "heterogeneous": "galaxy-env-b"}
MEMORY_BYTES = 8_000_000_000
"""Memory of every device: all baselines of the benchmark must fit."""
MESSAGE_S = 2e-4
"""Cost of a message in plans: gloo's 0.1 ms, and the same until the waiting thread runs."""
PLANNED_MODELS = ("BERT-Large", "GPT2-Large", "OPT-1.3B")
PLANNED_LAYERS, COPIES, PLANNER_ROUNDS = 48, 2, 5
MEMORY_TIMES = 3
"""Devices have this many times the memory of Env. B's: with two times, eight devices could not store 48 layers of every
model."""
TOKENS_EACH, TOKENS = 96, 384
SCALING_ROUNDS = 2


class BertSize(NamedTuple):
    """A BERT by its sizes."""

    hidden_size: int
    num_heads: int
    num_layers: int


SIZES = {
    "MiniLM": BertSize(384, 12, 6),
    "BERT-base": BertSize(768, 12, 12),
    "GPT2-L layer": BertSize(1280, 20, 3),
}
"""GPT2-L layer: a layer of that size, repeated, for the scaling of section IV-E."""


def save_model(size: BertSize, folder: Path) -> None:
    """Write a BERT of random weights as a folder with safetensors."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        intermediate_size=4 * size.hidden_size,
        max_position_embeddings=512,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    tiny_tokenizer(is_causal=False).backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"sep_token": "[SEP]", "pad_token": "[PAD]"}), encoding="utf-8"
    )


def host_profile(folder: Path, size: BertSize, longest: int) -> tuple[InferenceProfile, str]:
    """Return the costs of the model's operations on one core of this host (measured once and stored), and their
    source.
    """
    key = {
        "inference": 2,
        "bench": "BERT of random weights",
        "hidden": size.hidden_size,
        "heads": size.num_heads,
        "longest": longest,
    }

    def measure() -> InferenceProfile:
        layout = model_layout(str(folder))
        with closing(open_weights(str(folder), layout=layout)) as source:
            return measure_host(layout, source, longest=longest, output="hidden")

    measured, note = cached(key, measure, InferenceProfile)
    stacks = tuple(replace(shape, num_layers=size.num_layers) for shape in measured.stacks)
    return replace(measured, stacks=stacks), note


def emulated_cluster(name: str, mbit_per_s: float, host_flops_per_s: float, dilation: float = 1.0) -> Cluster:
    """Return the catalogue's environment with links of a bandwidth; a device's GEMM rate is the catalogue's.

    host_flops_per_s: one core's rate in GEMMs on this host.  dilation: devices and links are this many times slower, so
    everything takes this many times as long, in the same proportions; a shared or small host then keeps up.
    """
    cluster = load_cluster(CLUSTERS[name])
    link = Link(bytes_per_s=mbit_per_s * MEGABIT_BYTES / dilation)
    devices = tuple(
        replace(
            device,
            flops_per_s=device.flops_per_s / dilation,
            link=link,
            memory_bytes=MEMORY_BYTES,
            host_share=device.flops_per_s / dilation / host_flops_per_s,
        )
        for device in cluster.devices
    )
    return replace(cluster, name=f"{name}, {mbit_per_s:g} Mbit/s", devices=devices)


def random_ids(tokens: int) -> Tensor:
    """Return token ids (1, tokens), the same each time."""
    chance = random.Random(0)
    return torch.tensor([[chance.randrange(4, VOCABULARY) for _ in range(tokens)]])


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchModel:
    """A model on disk, and its costs on this host."""

    name: str
    folder: Path
    host: InferenceProfile

    def setup(self, cluster: Cluster) -> SessionSetup:
        """Return the setup for every rank."""
        return SessionSetup(model=str(self.folder), cluster=cluster, host=self.host, timeout_s=120.0)

    def prices(self, cluster: Cluster, length: int) -> SequencePrice:
        """Return the cost function of plans on the emulated devices."""
        return SequencePrice(Problem(scaled_to(self.host, cluster), cluster, sequence_length=length), MESSAGE_S)

    def plan(self, cluster: Cluster, length: int = LENGTH, *, ranks: Sequence[int] | None = None) -> InferencePlan:
        """Return Galaxy+'s plan with its best tiles."""
        price = self.prices(cluster, length)
        problem = replace(price.problem, ranks=ranks)
        return tune(problem, galaxy_plus.plans(problem), price)


def planning_point(progress: Progress) -> Figures:
    """Return the planner's seconds by Eq. 9 for each model with 48 layers, on Env. B's devices twice, and its gain over
    Algorithm 1.
    """
    catalogue_devices = load_cluster("galaxy-env-b").devices
    devices = [
        replace(device, name=f"{device.name}-{copy}", memory_bytes=MEMORY_TIMES * device.memory_bytes)
        for copy in range(COPIES)
        for device in catalogue_devices
    ]
    cluster = Cluster(name="Env. B twice", devices=tuple(devices))
    points: Figures = {}
    for name in PLANNED_MODELS:
        described = replace(describe(name), num_layers=PLANNED_LAYERS)
        first, last = end_bytes(described)
        profile = analytic_from(name, stack_sizes(described), cluster, first_bytes=first, last_bytes=last)
        problem = Problem(profile, cluster, sequence_length=LENGTH)
        seconds = []
        for _ in range(PLANNER_ROUNDS):
            begin_s = time.perf_counter()
            ours = galaxy_plus.plan(problem)
            seconds.append(time.perf_counter() - begin_s)
        try:
            price = Equation9(profile, cluster, galaxy_plus.lengths_of(problem))
            printed_s = price(cut_of(galaxy_plus.algorithm_1(problem), profile))
            gain = printed_s / price(cut_of(ours, profile))
        except PlanError:
            gain = None
        points[name] = {
            "s": median(seconds),
            "from, to": (round(min(seconds), 3), round(max(seconds), 3)),
            "algorithm 1 over ours": gain,
        }
        progress(f"Planner, {name}: {line_of(points[name])}")
    return {
        f"planner, {len(devices)} devices and {PLANNED_LAYERS} layers, longest median s": max(
            point["s"] for point in points.values()
        ),
        "planner": points,
    }


def scaling_points(model: BenchModel, cluster: Cluster, engines: EngineCluster, progress: Progress) -> Figures:
    """Return the share of linear scaling at 96 tokens a device, and the speed-up at 384 tokens, by number of devices.

    A layer's time is the time between the ends of two layers' last connections, on any device.  The parts before the
    first and after the last do not count, as in the paper.
    """
    sides = []
    for count in range(1, cluster.world_size + 1):
        for kind, tokens in (("weak", TOKENS_EACH * count), ("strong", TOKENS)):
            if count == cluster.world_size and kind == "weak" and tokens == TOKENS:
                continue  # the same as the strong scaling point
            plan = model.plan(cluster, tokens, ranks=range(count))
            sides.append(Side(name=f"{kind} {count}", plan=plan, ids=random_ids(tokens), rounds=SCALING_ROUNDS))
    job = SidesJob(setup=model.setup(cluster), sides=tuple(sides))
    results = engines.run(run_sides, [job] * cluster.world_size)
    layer_s = {side.name: _layer_s(results, side.name) for side in sides}
    last = cluster.world_size
    layer_s.setdefault(f"weak {last}", layer_s[f"strong {last}"])
    shape = model.host.stacks[0]
    rate = {count: layer_flops(shape, TOKENS_EACH * count) / layer_s[f"weak {count}"] for count in range(1, last + 1)}
    weak = {count: rate[count] / (count * rate[1]) for count in rate}
    strong = {count: layer_s["strong 1"] / layer_s[f"strong {count}"] for count in rate}
    points = {
        f"weak scaling, {last} devices, share of linear": weak[last],
        f"strong scaling, {last} devices, speed-up": strong[last],
        "weak scaling": weak,
        "strong scaling": strong,
        "scaling overrun share": late_share_of((result.late_s, result.paced_s) for result in results),
    }
    progress(line_of(points))
    return points


def _layer_s(results: Sequence[SidesResult], name: str) -> float:
    """Return the median seconds between the ends of layers, on the last device, of the last round."""
    ends = [block_ends(result.spans[name]) for result in results]
    numbers = sorted(
        {number for ends_of_rank in ends for number in ends_of_rank if number % 2}
    )  # two blocks to a layer
    return median(
        b - a for a, b in pairwise(max(ends_of_rank.get(number, 0.0) for ends_of_rank in ends) for number in numbers)
    )
