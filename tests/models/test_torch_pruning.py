"""Initial weights by Torch-Pruning: what it keeps is the backbone's, and what it cannot do is said."""

import importlib.util
import sys

import pytest
import torch

from workbench.core.errors import ConfigError
from workbench.models.initialization import copy_torch_pruned, layer_weights
from workbench.models.loading import load_stack
from workbench.models.parallel_adapter import ParallelAdapter

from .helpers import small_batch, small_config

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("torch_pruning") is None, reason="the extra 'pruning' is not installed"
)


@needs_package
def test_every_weight_is_one_of_the_backbones():
    stack = load_stack("tiny-bert-2")
    before = {key: value.clone() for key, value in stack.state_dict().items()}
    adapter = ParallelAdapter(small_config(stack))
    copy_torch_pruned(adapter, stack)
    hidden = adapter.first.weight.argmax(dim=1)
    assert len(hidden.unique()) == 8 and torch.equal(adapter.layers["1"].down.weight, adapter.first.weight)
    for index in range(2):
        side, weights = adapter.layers[str(index)], layer_weights(stack, index)
        size = (32 / 8) ** 0.5
        query, key, value = (side.query_key_value.weight / size).chunk(3)
        for found, role in ((query, "query"), (key, "key"), (value, "value")):
            assert _is_selection(found, weights[role][:, hidden], dim=0)
        assert _is_selection(side.attention_output.weight / size, weights["output"][hidden], dim=1)
        kept = min(len(side.expand.weight), len(weights["up"]))
        assert _is_selection(side.expand.weight[:kept] / size, weights["up"][:, hidden], dim=0)
    assert all(torch.equal(value, before[key]) for key, value in stack.state_dict().items())
    assert not any(parameter.requires_grad for parameter in stack.parameters())


@needs_package
def test_it_predicts_and_is_a_function_of_the_backbone():
    stack, batch = load_stack("tiny-bert-2"), small_batch()
    adapters = [ParallelAdapter(small_config(stack)) for _ in range(2)]
    for adapter in adapters:
        copy_torch_pruned(adapter, stack)
    taps = stack(batch.input_ids, batch.attention_mask)[1]
    one, other = (adapter.eval().predict(taps, batch.attention_mask, batch.sample_ids) for adapter in adapters)
    assert torch.equal(one, other) and bool(one.isfinite().all())


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_another_family_is_pointed_to_our_own_pruning(family):
    stack = load_stack(f"tiny-{family}-2")
    with pytest.raises(ConfigError, match=rf"'{family}'.*Choose the initialization 'pruned'"):
        copy_torch_pruned(ParallelAdapter(small_config(stack)), stack)


def test_the_missing_package_is_named(monkeypatch):
    stack = load_stack("tiny-bert-2")
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(ConfigError, match="extra 'pruning'"):
        copy_torch_pruned(ParallelAdapter(small_config(stack)), stack)


def _is_selection(found, whole, *, dim):
    """Return whether `found` is made of distinct rows (dim 0) or columns (1) of `whole`."""
    found, whole = (found, whole) if dim == 0 else (found.T, whole.T)
    distances = torch.cdist(found.detach().double(), whole.double())
    return bool((distances.min(dim=1).values < 1e-5).all()) and len(distances.argmin(dim=1).unique()) == len(found)
