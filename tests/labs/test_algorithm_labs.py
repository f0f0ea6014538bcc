from __future__ import annotations

import pytest
import torch

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
    stored_backbones,
)

CONFIG = ParallelAdapterConfig(hidden_size=32, num_layers=2, reduction=8)
MODEL = "tiny-bert-2"


@pytest.fixture(scope="module")
def split() -> TokenizedSplit:
    return tokenize(load_task("sentiment").limited(32, 16, 16).train, load_tokenizer(MODEL), max_length=32)


def test_only_techniques_inside_the_backbone_keep_its_activations(split: TokenizedSplit) -> None:
    costs = {
        one.technique: one for one in measure_techniques(MODEL, next(evaluation_batches(split, 16)), CONFIG, repeats=1)
    }
    assert costs["full"].trained > sum(one.numel() for one in load_stack(MODEL).parameters())  # and a head
    assert costs["lora"].saved_bytes > 2 * costs["parallel_adapters"].saved_bytes
    assert costs["parallel_adapters"].trained == sum(one.numel() for one in ParallelAdapter(CONFIG).parameters())
    assert all(one.forward_s > 0 and one.backward_s > 0 for one in costs.values())
    figure = cost_figure(list(costs.values()))
    assert list(figure.data[0].y) == [one.label for one in costs.values()]
    assert figure.data[1].x[0] == pytest.approx(1e3 * costs["full"].backward_s)


def test_fewer_bits_hold_less_and_err_more(split: TokenizedSplit) -> None:
    found = {
        one.storage: one
        for one in stored_backbones(MODEL, ParallelAdapter(CONFIG), lambda: list(evaluation_batches(split)))
    }
    assert (
        found["float32"].tap_error == 0
        and found["float32"].held_bytes > found["int8"].held_bytes > found["int4"].held_bytes
    )
    assert 0 < found["int8"].tap_error < found["int4"].tap_error


def test_block_errors_keep_within_equation_1() -> None:
    weight = torch.linspace(-1, 0.5, 64)
    errors = block_errors(weight, block_size=64)
    assert errors["int8"][1] <= 0.5 / 127 + 1e-7 and errors["int4"][1] <= 0.5 / 7 + 1e-7
    assert 0 < errors["int8"][0] < errors["int4"][0]


def test_cache_errors_grow_as_bytes_shrink() -> None:
    found = cache_errors(
        torch.randn(10, 64, generator=torch.Generator().manual_seed(0)), dtypes=("float32", "bfloat16", "int8")
    )
    assert [row for row, _ in found.values()] == [256, 128, 68]
    errors = [error for _, error in found.values()]
    assert errors[0] == 0 < errors[1] < errors[2] < 0.02
