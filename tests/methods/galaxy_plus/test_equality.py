"""Distributed answers are the whole model's, on one process: every paradigm, kind of model, uneven split, one to four
devices."""

from __future__ import annotations

import pytest
import torch

from tests.methods.conftest import four_devices
from tests.methods.galaxy_plus.ranks import Case, Cases, answer_cases, plans_for, request_for
from workbench.methods.galaxy_plus.prepare import local_hidden, local_texts
from workbench.models.sharding import model_layout
from workbench.runtime.engines import EngineCluster

MODELS = ("tiny-bert-2", "tiny-vit-2", "tiny-llama-2", "tiny-t5-4")
WRITERS = ("tiny-llama-2", "tiny-t5-4")
"""Of each kind one; tests/models/sharding has every family, without devices."""
NEW_TOKENS = 6


def answers_of(engines: EngineCluster, cases: Cases) -> list[torch.Tensor]:
    """Return each case's answer, which the plan's first device has and no other."""
    by_rank = engines.run(answer_cases, [cases] * 4)
    for number, case in enumerate(cases.cases):
        assert [rank for rank, answers in enumerate(by_rank) if answers[number] is not None] == [case.plan.ranks[0]]
    return [by_rank[case.plan.ranks[0]][number] for number, case in enumerate(cases.cases)]


@pytest.mark.parametrize("model", MODELS)
def test_hidden_states_are_the_local_models(model: str, engines: EngineCluster) -> None:
    layout = model_layout(model)
    request, plans = request_for(layout), plans_for(layout)
    cases = tuple(Case(plan=plan, request=request) for plan in plans.values())
    answers = answers_of(engines, Cases(model=model, cluster=four_devices(), cases=cases))
    (right,) = local_hidden(model, [request])
    for name, answer in zip(plans, answers, strict=True):
        assert float((answer - right).abs().max() / right.abs().max()) < 1e-5, name
        assert torch.equal(answer.argmax(-1), right.argmax(-1)), name


@pytest.mark.parametrize("model", WRITERS)
def test_texts_are_the_local_models(model: str, engines: EngineCluster) -> None:
    layout = model_layout(model)
    request = request_for(layout)
    if layout.has_decoder:
        assert request.decoder_ids is not None
        request = request._replace(decoder_length=1, decoder_ids=request.decoder_ids[:, :1])
    plans = plans_for(layout)
    names = ("overlapped tiles", "scheme 2 on four", "two", "alone", "Megatron-LM", "EdgeShard")
    cases = tuple(Case(plan=plans[name], request=request, tokens=NEW_TOKENS) for name in names)
    (expected,) = local_texts(model, [request], NEW_TOKENS)
    answers = answers_of(engines, Cases(model=model, cluster=four_devices(), cases=cases))
    for name, answer in zip(names, answers, strict=True):
        assert answer.tolist() == expected.tolist(), name
