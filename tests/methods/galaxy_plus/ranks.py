"""What the tests ask the engines to do: sessions on made-up requests, and the plans that they run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tests.plans import inference_plan
from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan
from workbench.core.proportions import proportional_parts
from workbench.methods.galaxy_plus.prepare import Request
from workbench.methods.galaxy_plus.serving.worker import serve_worker
from workbench.methods.galaxy_plus.session import InferenceSession, SessionSetup
from workbench.models.sharding import ModelLayout
from workbench.runtime.context import RankContext
from workbench.runtime.process_group import group

LENGTH, TARGET = 13, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request by one plan.  tokens: to generate, 0 for hidden states."""

    plan: InferencePlan
    request: Request
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cases:
    """What one session does, in order."""

    model: str
    cluster: Cluster
    cases: tuple[Case, ...]


def answer_cases(context: RankContext, asked: Cases) -> list[torch.Tensor | None]:
    """Return this rank's answers: a tensor where it is the plan's first device."""
    setup = SessionSetup(model=asked.model, cluster=asked.cluster)
    answers: list[torch.Tensor | None] = []
    with group(context, 20.0) as process_group, InferenceSession(context, setup, process_group) as session:
        for case in asked.cases:
            holding = session.load(case.plan)
            output, _ = session.respond(holding, case.request, case.tokens)
            answers.append(None if output is None else output.clone())
    return answers


def plans_for(layout: ModelLayout) -> dict[str, InferencePlan]:
    """Return plans of every paradigm on up to four devices: uneven, with devices that have no heads, no columns or no
    tokens."""
    stack, layers = layout.stacks[0], layout.num_layers
    one, two = (1,) * layers, (2,) * layers
    mixed = tuple(1 + number % 2 for number in range(layers))

    def split(
        weights: tuple[int, ...], columns: tuple[int, ...], shares: tuple[int, ...], **settings: object
    ) -> InferencePlan:
        plan = inference_plan(
            units=proportional_parts(stack.num_units, weights),
            columns=proportional_parts(stack.columns, columns),
            shares=tuple(map(float, shares)),
            schemes=one,
        )
        return replace(plan, **settings)

    uneven = split((2, 1, 1, 0), (1, 3, 0, 2), (3, 0, 2, 1))
    return {
        "scheme 1 on four": uneven,
        "scheme 2 on four": replace(uneven, schemes=two),
        "overlapped tiles": replace(uneven, schemes=mixed, overlap=True, tile_tokens=2),
        "both ways": replace(uneven, schemes=mixed, overlap=True, both_ways=True, tile_tokens=3),
        "scheme 2 overlapped": split((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1), schemes=two, overlap=True),
        "three in another order": split(
            (1, 2, 1), (2, 1, 1), (1, 1, 2), ranks=(3, 1, 0), schemes=mixed, overlap=True, tile_tokens=2
        ),
        "two": split((3, 1), (1, 3), (1, 2), ranks=(2, 0), overlap=True),
        "alone": split((1,), (1,), (1,), ranks=(1,), schemes=mixed),
        "Megatron-LM": replace(uneven, paradigm="tensor", shares=(), schemes=()),
        "sequence parallelism": replace(uneven, paradigm="sequence", units=(), columns=(), schemes=()),
        "EdgeShard": inference_plan("pipeline", ranks=(1, 3, 0), layers=proportional_parts(layers, (2, 1, 1))),
    }


def request_for(layout: ModelLayout) -> Request:
    """Return a made-up request."""
    generator = torch.Generator().manual_seed(0)
    if layout.family.reads_images:
        config = layout.config
        patches = (config.image_size // config.patch_size) ** 2
        shape = (1, patches + 1, config.num_channels * config.patch_size**2)
        return Request(length=patches + 1, ids=torch.randint(256, shape, generator=generator, dtype=torch.uint8))
    ids = torch.randint(5, 60, (1, LENGTH), generator=generator)
    if not layout.has_decoder:
        return Request(length=LENGTH, ids=ids)
    targets = torch.randint(5, 60, (1, TARGET), generator=generator)
    return Request(length=LENGTH, ids=ids, decoder_length=TARGET, decoder_ids=targets)


def serve_with_little(context: RankContext, setup: SessionSetup) -> None:
    """Answer with too little memory for all-MiniLM-L6-v2."""
    serve_worker(replace(context, device=replace(context.device, memory_bytes=15_000_000)), setup)
