"""Initial weights: the four ways of section IV-C, and what pruning keeps."""

import pytest
import torch

from workbench.core.errors import ConfigError
from workbench.models.families import FAMILIES
from workbench.models.initialization import initialize
from workbench.models.loading import load_stack
from workbench.models.parallel_adapter import ParallelAdapter, ParallelAdapterStage
from workbench.models.pruning import hidden_importance, layer_weights, top

from .helpers import small_batch, small_config


def test_fan_in_and_gaussian_have_their_deviations():
    stack = load_stack("tiny-bert")
    adapter = ParallelAdapter(small_config(stack, reduction=1, feed_forward_factor=16))
    weight = adapter.layers["2"].contract.weight
    initialize(adapter, "fan_in")
    assert weight.std().item() == pytest.approx((16 * 32) ** -0.5, rel=0.05)
    initialize(adapter, "gaussian")
    assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert adapter.layers["0"].mix.item() == 0.5 and adapter.layers["0"].attention_norm.weight.eq(1).all()


def test_zero_silences_the_side_branches():
    stack, batch = load_stack("tiny-llama"), small_batch()
    adapter = ParallelAdapter(small_config(stack))
    initialize(adapter, "zero")
    _, taps = stack(batch.input_ids, batch.attention_mask)
    layer, side = adapter.layers["1"], torch.randn(8, 11, 8)
    torch.testing.assert_close(layer(side, taps[2], None), torch.lerp(side, layer.down(taps[2]), layer.mix))


def test_seed_changes_weights_and_a_stage_has_the_wholes():
    stack = load_stack("tiny-bert")
    one, other = (ParallelAdapter(small_config(stack, seed=seed)) for seed in (0, 1))
    assert not torch.equal(one.layers["0"].down.weight, other.layers["0"].down.weight)
    stage = ParallelAdapterStage(small_config(stack, seed=1), 4, 6)
    initialize(stage, "gaussian")
    initialize(other, "gaussian")
    assert torch.equal(stage.layers["4"].expand.weight, other.layers["4"].expand.weight)


@pytest.mark.parametrize("family", FAMILIES)
def test_pruning_slices_the_backbone(family):
    stack = load_stack(f"tiny-{family}")
    adapter = ParallelAdapter(small_config(stack))
    initialize(adapter, "pruned", stack=stack)
    parts = [layer_weights(stack, index) for index in range(6)]
    hidden = top(sum(hidden_importance(part) for part in parts), 8)
    tap = torch.randn(2, 3, 32)
    torch.testing.assert_close(adapter.first(tap), tap[..., hidden])
    torch.testing.assert_close(adapter.layers["5"].down(tap), tap[..., hidden])
    # Every row of W_up's input channel goes back to where it came from.
    assert adapter.last.up.weight.nonzero().tolist() == [[index, column] for column, index in enumerate(hidden.tolist())]
    rows = adapter.layers["3"].expand.weight / 2  # sqrt(32 / 8)
    source = parts[3]["up"][:, hidden]
    for row in rows[: min(len(rows), len(source))]:
        assert (source - row).abs().amax(dim=1).min() < 1e-6
    _, taps = stack(small_batch().input_ids, small_batch().attention_mask)
    assert adapter.predict(taps, small_batch().attention_mask, small_batch().sample_ids).isfinite().all()


def test_what_cannot_be_initialized():
    stack = load_stack("tiny-bert-2")
    adapter = ParallelAdapter(small_config(stack))
    with pytest.raises(ConfigError, match="Known are"):
        initialize(adapter, "distilled")
    with pytest.raises(ConfigError, match="stack="):
        initialize(adapter, "pruned")
    with pytest.raises(ConfigError, match="own backbone"):
        initialize(adapter, "pruned", stack=load_stack("tiny-bert-3"))
