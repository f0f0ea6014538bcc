"""Published weights: tokens, logits and greedy texts are those of transformers, whole, in stages and in shards.

golden/pretrained.json was written by transformers alone, from the packages' GGUF files (`gguf_file=`, float32): of each
text the ids, the five largest logits of the next token, and 16 greedy tokens.  Our SmolLM2 has float16 weights.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.sharding.builders import Case, generate, hybrid, run_plan, shards_of
from tests.plans import inference_plan
from workbench.core.errors import MissingDataError
from workbench.models.generation import Sampling
from workbench.models.hub import locate
from workbench.models.loading import load_language_model_head, load_model, load_stage, load_tokenizer
from workbench.models.sharding import model_layout
from workbench.models.text import CachedModel, LocalWriter
from workbench.models.tokenizer import TextTokenizer

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "pretrained.json").read_text(encoding="utf-8"))
TOLERANCE = {"SmolLM2-135M": 0.05, "gemma-3-270m": 0.001}


@pytest.fixture(scope="module", params=sorted(GOLDEN))
def name(request: pytest.FixtureRequest) -> str:
    """A model that was fetched."""
    try:
        locate(request.param)
    except MissingDataError as error:
        pytest.skip(str(error))
    return str(request.param)


def assert_golden(name: str, logits: Any, row: dict[str, Any]) -> None:
    results = {token: float(logits[int(token)]) for token in row["top"]}
    assert results == pytest.approx(row["top"], abs=TOLERANCE[name])
    assert int(logits.argmax()) == row["written_ids"][0]


def test_tokens_logits_and_texts(name: str) -> None:
    tokenizer, model = load_tokenizer(name), load_model(name)
    assert isinstance(tokenizer, TextTokenizer)
    writer = LocalWriter(name, CachedModel(model))
    for row in GOLDEN[name]:
        assert tokenizer.prompt(row["text"]) == row["ids"]
        assert list(writer.write(row["ids"], 16, Sampling())) == row["written_ids"]
        assert tokenizer.decode(row["written_ids"]) == row["written"]
        with torch.inference_mode():
            assert_golden(name, model(torch.tensor([row["ids"]])).logits[0, -1], row)


def test_in_stages(name: str) -> None:
    layers = len(load_model(name).base_model.layers)
    cuts = (0, 1, layers // 2, layers)
    stages = [load_stage(name, start, stop) for start, stop in pairwise(cuts)]
    head = load_language_model_head(name)
    for row in GOLDEN[name]:
        hidden: Any = torch.tensor([row["ids"]])
        mask = torch.ones_like(hidden)
        with torch.inference_mode():
            for stage in stages:
                hidden = stage(hidden, mask)[0]
            assert_golden(name, head(hidden[:, -1:])[0, -1], row)


def test_in_shards(name: str) -> None:
    model = load_model(name)
    row = GOLDEN[name][0]
    ids = torch.tensor([row["ids"]])
    case = Case(model=model, layout=model_layout(model), ids=ids, decoder_ids=None)
    [stack] = case.layout.stacks
    units, columns = (stack.num_units - 1, 1), (stack.columns // 3, stack.columns - stack.columns // 3)
    for plan in (
        hybrid(case, units, columns, (0.4, 0.6), (1, 2)),
        inference_plan("tensor", method="megatron_lm", units=units, columns=columns),
    ):
        shards = shards_of(case, plan)
        assert_golden(name, run_plan(plan, shards, ids, what="last")[0], row)
        assert generate(plan, shards, ids, 16)[0].tolist() == row["written_ids"]
