from __future__ import annotations

import re

import pytest
import torch

from tests.labs.solutions import defined, sources
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.loading import load_stack, load_tokenizer
from workbench.models.parallel_adapter import ParallelAdapter
from workbench.tasks import load_task
from workbench.tasks.tokenize import TokenizedSplit, evaluation_batches, tokenize
from workbench_labs.precision import (
    block_errors,
    cache_errors,
    cost_figure,
    measure_techniques,
)
from workbench_labs.side_network import (
    Sentences,
    cache_test_table,
    gradients_table,
    storage_table,
    with_and_without_cache,
)

CONFIG = ParallelAdapterConfig(hidden_size=32, num_layers=2, reduction=8)
MODEL = "tiny-bert-2"


def unwritten(*_: object) -> None:
    raise NotImplementedError


@pytest.fixture(scope="module")
def split() -> TokenizedSplit:
    return tokenize(load_task("sentiment").limited(32, 16, 16).train, load_tokenizer(MODEL), max_length=32)


def test_only_techniques_inside_the_backbone_keep_its_activations(split: TokenizedSplit) -> None:
    costs = {
        cost.technique: cost
        for cost in measure_techniques(MODEL, next(evaluation_batches(split, 16)), CONFIG, repeats=1)
    }
    assert costs["full"].trained > sum(parameter.numel() for parameter in load_stack(MODEL).parameters())  # and a head
    assert costs["lora"].saved_bytes > 2 * costs["parallel_adapters"].saved_bytes
    assert costs["parallel_adapters"].trained == sum(
        parameter.numel() for parameter in ParallelAdapter(CONFIG).parameters()
    )
    assert all(cost.forward_s > 0 and cost.backward_s > 0 for cost in costs.values())
    figure = cost_figure(list(costs.values()))
    assert list(figure.data[0].y) == [cost.label for cost in costs.values()]
    assert figure.data[1].x[0] == pytest.approx(1e3 * costs["full"].backward_s)


def test_a_students_functions_train_beside_a_model_as_autograd_would(split: TokenizedSplit) -> None:
    """No gradient reaches the backbone, and a cache of float32 changes no loss."""
    sentences = Sentences(stack=load_stack(MODEL), split=split, every=2)
    functions = (defined(sources("03")[name])[name] for name in ("side_layer", "side_gradient"))
    layer, gradient = functions
    table = gradients_table(sentences, layer, gradient)
    assert [row[2] for row in table.rows] == ["0", table.rows[1][1]]
    assert gradients_table(sentences, unwritten, unwritten).rows == table.rows
    assert re.search(r"autograd: \de-(0[4-9]|1\d) of", table.note)
    plain, exact, *rounded = with_and_without_cache(sentences, layer, gradient, epochs=2).values()
    assert exact.losses == plain.losses and all(one.losses != plain.losses for one in rounded)
    for one in rounded:
        assert one.losses == pytest.approx(plain.losses, rel=0.01)


def test_real_caches_go_stale_when_the_backbone_changes(split: TokenizedSplit) -> None:
    sentences = Sentences(stack=load_stack(MODEL), split=split)
    table = cache_test_table(sentences, MODEL, unwritten)
    stale = dict(table.rows)
    assert stale["nothing: computed again"] == stale["stored in bfloat16"] == "0 of 3"
    assert stale["one file cut off"] == "1 of 3" and stale["weights trained a little since then"] == "3 of 3"
    values = [float(row[1]) for row in storage_table(sentences, sentences, MODEL, epochs=1).rows]
    assert values[0] > values[1] >= values[2]


def test_block_errors_keep_within_equation_1() -> None:
    weight = torch.linspace(-1, 0.5, 64)
    errors = block_errors(weight, block_size=64)
    assert errors["int8"][1] <= 0.5 / 127 + 1e-7 and errors["int4"][1] <= 0.5 / 7 + 1e-7
    assert 0 < errors["int8"][0] < errors["int4"][0]


def test_cache_errors_grow_as_bytes_shrink() -> None:
    result = cache_errors(
        torch.randn(10, 64, generator=torch.Generator().manual_seed(0)), dtypes=("float32", "bfloat16", "int8")
    )
    assert [row for row, _ in result.values()] == [256, 128, 68]
    errors = [error for _, error in result.values()]
    assert errors[0] == 0 < errors[1] < errors[2] < 0.02
