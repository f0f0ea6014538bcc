"""Serial adapters (RingAda, Eq. 1): where they stand, what they compute, and that stages of them are the whole."""

from __future__ import annotations

import pytest
import torch

from workbench.models.loading import load_stack
from workbench.models.lora import SerialAdapter
from workbench.models.stack import LayerStack
from workbench.models.techniques import TechniqueStage

from .helpers import technique_config, technique_part

FAMILIES = ("tiny-bert", "tiny-distilbert", "tiny-gpt2", "tiny-llama", "tiny-opt", "tiny-vit", "tiny-t5", "tiny-bart")


def build(stack: LayerStack) -> TechniqueStage:
    """Return a whole model with adapters that do something."""
    model = technique_part(stack, technique_config(stack, "serial"))
    with torch.no_grad():
        for parameter in model.adapters.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def test_an_adapter_is_equation_1() -> None:
    adapter, hidden = SerialAdapter(6, 3), torch.randn(2, 5, 6)
    down, up = adapter.down.weight.T, adapter.up.weight.T  # (n, m) and (m, n)
    assert (down.shape, up.shape) == ((6, 3), (3, 6))
    torch.testing.assert_close(adapter(hidden), hidden + torch.relu(hidden @ down) @ up)
    assert len(list(adapter.parameters())) == 2


@pytest.mark.parametrize("name", FAMILIES)
def test_each_layer_ends_with_its_adapter(name: str) -> None:
    """A layer's tap is its adapter's output: of the layer's own output, behind the last "add & layer norm"."""
    torch.manual_seed(0)
    stack = load_stack(name)
    model = build(stack)
    ids, mask, _ = model.backbone.make_inputs(2, 17 if name == "tiny-vit" else 7)
    plain: list[torch.Tensor] = []
    for index, layer in enumerate(model.backbone.layers.values()):

        def note(module: object, inputs: object, output: object, index: int = index) -> None:
            plain.append(output[0] if isinstance(output, tuple) else output)  # type: ignore[arg-type]

        layer.register_forward_hook(note, prepend=True)
    with torch.no_grad():
        _, taps = model.backbone(ids, mask)
    adapted = [adapter(own) for own, adapter in zip(plain, model.adapters.values(), strict=True)]
    behind = [any(torch.equal(tap, one) for tap in taps) for one in adapted]
    has_final = sum(module is not None for module in (model.backbone.final, model.backbone.encoder_final))
    assert len(plain) == stack.num_layers
    assert sum(behind) == stack.num_layers - has_final  # a final norm follows the last adapter


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_of_a_stage_are_the_whole(name: str) -> None:
    torch.manual_seed(0)
    stack = load_stack(name)
    model = build(stack)
    ids, mask, _ = model.backbone.make_inputs(3, 17 if name == "tiny-vit" else 9)
    mask[0, -2:] = 0
    with torch.no_grad():
        reference, taps = model.backbone(ids, mask)
        hidden = model.backbone.embed(ids, mask)
        for start, stop in ((0, 1), (1, 4), (4, 6)):
            hidden, own = model.backbone.part(start, stop)(hidden, mask)
    torch.testing.assert_close(hidden, reference)
    torch.testing.assert_close(own[-1], taps[-1])


def test_the_trained_share_of_bert_base_is_near_2_percent_at_a_bottleneck_of_119() -> None:
    """Section II-A says nearly 2 %; MAD-X's task adapters (16 times narrower, 48) are .8 % of BERT-base's 110
    million."""
    per_unit = 12 * 2 * 768
    assert 119 * per_unit / 110e6 == pytest.approx(0.02, rel=0.01)
    assert 48 * per_unit / 110e6 == pytest.approx(0.008, rel=0.01)
