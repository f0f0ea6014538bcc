"""Heads and feed-forward columns computed apart give the layer's output and gradients (Confidant, section 3.3)."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch

from tests.models.helpers import technique_config, technique_part
from workbench.core.errors import ConfigError
from workbench.models.layer_inputs import call_layer
from workbench.models.loading import load_stack
from workbench.models.sharding.block import rotary_of, turned
from workbench.models.sharding.trained import TrainedLayer, column_groups, require_divisible


@pytest.mark.parametrize(
    ("name", "technique", "heads", "columns"),
    [
        ("tiny-bert", "full", (0, 3, 4), (0, 1, 32)),
        ("tiny-gpt2", "full", (0, 1, 4), (0, 32)),
        ("tiny-gpt2", "lora", (0, 1, 2, 4), (0, 20, 32)),
        ("tiny-llama", "full", (0, 1, 2), (0, 5, 31, 32)),  # two groups of two heads that share keys and values
        ("tiny-llama", "lora", (0, 1, 2), (0, 32)),
        ("tiny-bert", "adapters", (0, 2, 4), (0, 9, 32)),
        ("tiny-distilbert", "lora", (0, 2, 4), (0, 9, 32)),
        ("tiny-vit", "full", (0, 1, 4), (0, 30, 32)),
        ("tiny-opt", "serial", (0, 2, 4), (0, 9, 32)),
        ("tiny-phi3", "lora", (0, 1, 2), (0, 9, 32)),  # queries, keys and values in one matrix, gate and up in one
        ("tiny-granite", "adapters", (0, 1, 2), (0, 9, 32)),
        ("tiny-olmo2", "lora", (0, 1), (0, 9, 32)),  # norms over all heads
        ("tiny-gemma3_text", "lora", (0, 1, 2), (0, 9, 32)),
    ],
)
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("kind", ["cpu"] + ["cuda"] * torch.cuda.is_available())
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch's, in the first backward pass on a thread
def test_a_layer_in_parts(
    name: str, technique: str, heads: tuple[int, ...], columns: tuple[int, ...], padded: bool, kind: str
) -> None:
    """Output, gradient of the input and of each trained parameter, to 1e-5; every part goes back on its own.

    kind: where all parts but the first compute.
    """
    torch.manual_seed(0)
    stack = load_stack(name)
    reference = technique_part(stack, technique_config(stack, technique), 1, 2)
    with torch.no_grad():
        for parameter in reference.parameters():  # no LoRA that begins at zero
            parameter.add_(0.05 * torch.randn_like(parameter))
    divided = copy.deepcopy(reference)
    backbone, layer = reference.backbone, TrainedLayer(divided, 1)
    assert (heads[-1], columns[-1]) == (layer.num_groups, layer.num_columns)

    hidden, gradient = torch.randn(3, 6, stack.hidden_size, requires_grad=True), torch.randn(3, 6, stack.hidden_size)
    mask = torch.ones(3, 6, dtype=torch.int64)
    if padded:
        mask[1, 4:] = 0
    contexts = backbone.contexts(mask, hidden)
    expected = call_layer(backbone.layers["1"], hidden, contexts[backbone.patterns[1]])
    expected.backward(gradient)

    source = hidden.detach().requires_grad_()
    attended = [layer.heads(source.to(kind if part[0] else "cpu"), contexts, *part).cpu() for part in pairwise(heads)]
    middle = layer.join_heads(source, torch.stack(attended).sum(dim=0))
    fed = [layer.columns(middle.to(kind if part[0] else "cpu"), *part).cpu() for part in pairwise(columns)]
    output = layer.join_columns(middle, torch.stack(fed).sum(dim=0))
    output.backward(gradient)
    real = mask.bool()
    torch.testing.assert_close(output[real], expected[real], rtol=1e-5, atol=1e-5)
    if not padded:  # what padding computes is nobody's business, and goes back nowhere in a run
        torch.testing.assert_close(source.grad, hidden.grad, rtol=1e-5, atol=1e-5)
        actual = divided.trained()
        assert actual and all(name.startswith("head.") or one.grad is not None for name, one in actual.items())
        for name_of, one in reference.trained().items():
            scale = max(1.0, float(one.grad.abs().max()))  # small entries are differences of large terms
            torch.testing.assert_close(actual[name_of].grad, one.grad, rtol=1e-5, atol=2e-5 * scale)


def test_only_the_channels_that_have_angles_turn() -> None:
    """Half of the head turns, as in transformers' own function; the rest of it stays."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    queries, keys = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    angles = torch.randn(1, 5, 2).repeat(1, 1, 2)
    expected = apply_rotary_pos_emb(queries[..., :4], keys[..., :4], angles.cos(), angles.sin())
    for heads, own in zip((queries, keys), expected, strict=True):
        actual = turned(heads, rotary_of(angles.cos(), angles.sin()))
        torch.testing.assert_close(actual, torch.cat([own, heads[..., 4:]], dim=-1))
        assert turned(heads, None) is heads


def test_columns_move_in_equal_groups() -> None:
    assert [column_groups(columns) for columns in (3072, 1536, 11008, 64, 47)] == [48, 48, 43, 32, 47]


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ConfigError, match="It is an encoder-decoder"):
        require_divisible("tiny-t5", is_single_stack=False, storage="float32", technique="lora")
    with pytest.raises(ConfigError, match="read the same input"):
        require_divisible("tiny-gpt_neox", is_single_stack=True, is_parallel=True, storage="float32", technique="lora")
    with pytest.raises(ConfigError, match="stored as int8"):
        require_divisible("tiny-bert", is_single_stack=True, storage="int8", technique="lora")
    with pytest.raises(ConfigError, match="next to the layers"):
        require_divisible("tiny-bert", is_single_stack=True, storage="float32", technique="parallel")
