"""Initial weights: the four ways of section IV-C, and what pruning keeps."""

import pytest
import torch

from workbench.core.errors import ConfigError
from workbench.models.families import FAMILIES
from workbench.models.initialization import hidden_importance, initialize, layer_weights, top
from workbench.models.loading import load_stack
from workbench.models.parallel_adapter import ParallelAdapter, ParallelAdapterStage, task_loss

from .helpers import batch_for, small_batch, small_config


def test_fan_in_and_gaussian_have_their_deviations():
    stack = load_stack("tiny-bert")
    adapter = ParallelAdapter(small_config(stack, reduction=1, feed_forward_factor=16))
    weight = adapter.layers["2"].contract.weight
    initialize(adapter, "fan_in")
    assert weight.std().item() == pytest.approx((16 * 32) ** -0.5, rel=0.05)
    initialize(adapter, "gaussian")
    assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert adapter.layers["0"].mix.item() == 0.5 and adapter.layers["0"].attention_norm.weight.eq(1).all()


@pytest.mark.parametrize("how", ["zero", "all_zero"])
def test_zero_silences_the_side_branches(how):
    stack, batch = load_stack("tiny-llama"), small_batch()
    adapter = ParallelAdapter(small_config(stack))
    initialize(adapter, how)
    _, taps = stack(batch.input_ids, batch.attention_mask)
    layer, side = adapter.layers["1"], torch.randn(8, 11, 8)
    torch.testing.assert_close(layer(side, taps[2], None), torch.lerp(side, layer.down(taps[2]), layer.mix))


@pytest.mark.parametrize("family", ["bert", "llama", "t5"])
@pytest.mark.parametrize("how", ["fan_in", "gaussian", "zero", "all_zero", "pruned"])
def test_every_weight_learns_but_those_between_two_zeros(how, family):
    """After three steps of AdamW without decay: all_zero's branches have not moved, of the others every matrix has."""
    stack = load_stack(f"tiny-{family}")
    batch, adapter = batch_for(stack), ParallelAdapter(small_config(stack))
    initialize(adapter, how, stack=stack)
    before = {name: parameter.detach().clone() for name, parameter in adapter.named_parameters()}
    with torch.no_grad():
        _, taps = stack(batch.input_ids, batch.attention_mask, batch.decoder_ids)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2, weight_decay=0.0)
    for epoch in range(3):
        logits = adapter.train().predict(taps, batch.attention_mask, batch.sample_ids, epoch)
        task_loss(logits, batch.labels, adapter.config.kind).backward()
        optimizer.step()
        optimizer.zero_grad()
    still = {name for name, parameter in adapter.named_parameters() if torch.equal(parameter, before[name])}
    if how != "all_zero":
        assert not {name for name in still if name.endswith("weight")}
    elif family != "t5":
        branches = (
            "attention_norm.",
            "query_key_value.",
            "attention_output.weight",
            "feed_forward_norm.",
            "expand.",
            "contract.weight",
        )
        assert still == {
            name for name in before if name.startswith("layers.") and any(part in name for part in branches)
        }
        assert len(still) == 10 * adapter.config.num_layers
    else:
        assert {"first.weight", "layers.0.down.weight"} <= still, (
            "nothing of the encoder reaches a decoder whose cross-attention is zero"
        )


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
    for projection in (adapter.first, adapter.layers["5"].down, *adapter.decoder_first.values()):
        torch.testing.assert_close(projection(tap), tap[..., hidden])
    # Every row of W_up's input channel goes back to where it came from.
    assert adapter.last.up.weight.nonzero().tolist() == [
        [index, column] for column, index in enumerate(hidden.tolist())
    ]
    rows = adapter.layers["3"].expand.weight / 2  # sqrt(32 / 8)
    source = parts[3]["up"][:, hidden]
    for row in rows[: min(len(rows), len(source))]:
        assert (source - row).abs().amax(dim=1).min() < 1e-6
    batch = batch_for(stack)
    _, taps = stack(batch.input_ids, batch.attention_mask, batch.decoder_ids)
    assert adapter.predict(taps, batch.attention_mask, batch.sample_ids).isfinite().all()


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_pruning_slices_cross_attention(family):
    stack = load_stack(f"tiny-{family}")
    adapter = ParallelAdapter(small_config(stack, num_heads=2))
    initialize(adapter, "pruned", stack=stack)
    weights = layer_weights(stack, 4)
    hidden = top(sum(hidden_importance(layer_weights(stack, index)) for index in range(6)), 8)
    cross = adapter.layers["4"].cross
    # T5's attention does not divide by the root of the head size (here 4), the side network's does.
    factor = 2 * (2 if family == "t5" else 1)
    for rows, role in ((cross.query.weight / factor, "cross_query"), (cross.key_value.weight[:8] / 2, "cross_key")):
        source = weights[role][:, hidden]
        assert all((source - row).abs().amax(dim=1).min() < 1e-6 for row in rows)
    assert cross.output.weight.abs().sum() > 0 and adapter.layers["2"].cross is None


def test_the_first_words_of_a_sequence_are_nearly_the_backbones():
    stack = load_stack("tiny-t5")
    batch = batch_for(stack)
    adapter = ParallelAdapter(small_config(stack, kind="sequence_to_sequence")).eval()
    adapter.attach(stack.language_model_head)
    states, taps = stack(batch.input_ids, batch.attention_mask, batch.decoder_ids)
    own = stack.language_model_head(states)
    logits = adapter.predict(taps, batch.attention_mask, batch.sample_ids)
    assert (logits - own).std() < 0.2 * own.std()


def test_what_cannot_be_initialized():
    stack = load_stack("tiny-bert-2")
    adapter = ParallelAdapter(small_config(stack))
    with pytest.raises(ConfigError, match="Known are"):
        initialize(adapter, "distilled")
    with pytest.raises(ConfigError, match="stack="):
        initialize(adapter, "pruned")
    with pytest.raises(ConfigError, match="own backbone"):
        initialize(adapter, "pruned", stack=load_stack("tiny-bert-3"))
