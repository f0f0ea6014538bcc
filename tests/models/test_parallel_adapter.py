"""A parallel adapter computes Fig. 6, splits anywhere, and sends no gradient into the backbone."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from workbench.core.errors import ConfigError
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.evaluation import attach_head, calibrate, set_statistics
from workbench.models.families import FAMILIES
from workbench.models.loading import load_stack
from workbench.models.optimization import make_optimizer
from workbench.models.parallel_adapter import ParallelAdapter, ParallelAdapterStage, task_loss
from workbench.models.side_layers import TapProjection

from .helpers import TARGET_LENGTH, batch_for, small_config
from .plain_training import reference_loss

SPLITS = ([6], [3, 3], [2, 2, 1, 1], [1, 3, 2])


@pytest.fixture(scope="module", params=FAMILIES)
def stack(request):
    return load_stack(f"tiny-{request.param}")


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


WORDS = "sequence_to_sequence"


@pytest.mark.parametrize(
    ("stack", "split", "kind"),
    [
        *product(("bert", "t5"), SPLITS, ("classification",)),
        *((name, SPLITS[-1], "classification") for name in FAMILIES if name not in ("bert", "t5")),
        *product(("t5", "bart"), ([3, 3], [2, 2, 2], [4, 1, 1]), (WORDS,)),
    ],
    indirect=["stack"],
    ids=str,
)
def test_stages_give_the_whole_adapters_loss_and_gradients(stack, split, kind):
    """Backbone and side network cut into stages, each stage's micro-batches cut into pieces, gradients handed over by
    hand."""
    batch, config = batch_for(stack), small_config(stack, kind=kind)
    if kind == WORDS:
        labels = torch.randint(4, 1400, (8, TARGET_LENGTH), generator=torch.Generator().manual_seed(3))
        labels[::2, 2:] = -100
        batch = replace(batch, labels=labels)
    training = ParallelAdapter(config).train()
    attach_head(stack, training)
    statistics = calibrate(stack, [batch])
    set_statistics(training, statistics)
    expected = reference_loss(stack, training, batch, epoch=1)
    expected.backward()
    bounds = [(sum(split[:index]), sum(split[: index + 1])) for index in range(len(split))]
    stages = [ParallelAdapterStage(config, *bound).train() for bound in bounds]
    for stage in stages:
        set_statistics(stage, statistics)
    attach_head(stack, stages[-1])
    backbones = [stack.stage(*bound) for bound in bounds]
    loss = torch.zeros(())
    for first, end in ((0, 3), (3, 8)):  # two unequal micro-batches
        piece = batch.rows(first, end)
        hidden, side, saved = piece.input_ids, None, []
        for backbone, stage in zip(backbones, stages, strict=True):
            hidden, taps = backbone(hidden, piece.attention_mask, piece.decoder_ids)
            side_input = None if side is None else side.detach().requires_grad_()
            side = stage(side_input, taps, piece.attention_mask)
            saved.append((side_input, side))
        logits = stages[-1].head(side, taps[-1], piece.attention_mask, piece.sample_ids, epoch=1)
        part = task_loss(logits, piece.labels, config.kind, reduction="sum") / len(batch.labels)
        loss += part.detach()
        part.backward()
        gradient = saved[-1][0].grad if saved[-1][0] is not None else None
        for side_input, side_output in reversed(saved[:-1]):
            side_output.backward(gradient)
            gradient = None if side_input is None else side_input.grad
    close(loss, expected.detach())
    assert kind != WORDS or stack.language_model_head.weight.grad is None
    results = {name: parameter.grad for stage in stages for name, parameter in stage.named_parameters()}
    wanted = {name: parameter.grad for name, parameter in training.named_parameters()}
    assert results.keys() == wanted.keys()
    for name in wanted:
        # Relative to the largest entry (small ones are differences of large ones); lambda's sums thousands of terms
        # that cancel.
        scale = wanted[name].abs().max().item()
        assert (results[name] - wanted[name]).abs().max().item() <= 1e-5 * scale + 5e-8, name


def test_no_gradient_and_no_graph_through_the_backbone(stack):
    batch, adapter = batch_for(stack), ParallelAdapter(small_config(stack))
    _, taps = stack(batch.input_ids, batch.attention_mask, batch.decoder_ids)
    assert all(tap.grad_fn is None and not tap.requires_grad for tap in taps)
    adapter.predict(taps, batch.attention_mask, batch.sample_ids).sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.abs().sum() > 0
        for parameter in adapter.parameters()
        if parameter.ndim > 1
    )
    assert all(parameter.grad is None for parameter in stack.parameters())


def test_padding_changes_nothing(stack):
    batch, adapter = batch_for(stack), ParallelAdapter(small_config(stack)).eval()
    _, taps = stack(batch.input_ids, batch.attention_mask, batch.decoder_ids)
    together = adapter.predict(taps, batch.attention_mask, batch.sample_ids)
    for row, length in enumerate(batch.attention_mask.sum(dim=1).tolist()):
        mask = batch.attention_mask[row : row + 1, :length]
        piece = batch.rows(row, row + 1)
        _, alone = stack(piece.input_ids[:, :length], mask, piece.decoder_ids)
        torch.testing.assert_close(
            adapter.predict(alone, mask, batch.sample_ids[:1]), together[row : row + 1], rtol=1e-4, atol=1e-6
        )


def test_the_equations_of_figure_6():
    config = ParallelAdapterConfig(hidden_size=16, num_layers=2, reduction=2, dropout=0.0, seed=1)
    adapter = ParallelAdapter(config)
    assert all(layer.mix.item() == 0.5 for layer in adapter.layers.values())
    taps = [torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    layer = adapter.layers["0"]
    with torch.no_grad():
        # With all branches silenced, an adapter gives its input: lambda W_down b_1 + (1 - lambda) a_0.
        layer.mix.fill_(0.3)
        layer.attention_output.weight.zero_()
        layer.contract.weight.zero_()
        side = adapter.first(taps[0])
        expected = 0.3 * (taps[1] @ layer.down.weight.T + layer.down.bias) + 0.7 * side
        torch.testing.assert_close(layer(side, taps[1], None), expected)
        # The head reads W_up a_L + b_L, averaged over the tokens.
        mask, last = torch.tensor([[1, 1, 0], [1, 1, 1]]), adapter.last
        fused = last.up(last.norm(side)) + taps[2]
        pooled = torch.stack([fused[0, :2].mean(dim=0), fused[1].mean(dim=0)])
        torch.testing.assert_close(adapter.head(side, taps[2], mask, torch.arange(2), 0), last.output(pooled))


def test_standardisation_is_folded_into_the_projection():
    projection = TapProjection(8, 4)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (projection.weight, projection.bias, projection.mean):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        projection.inverse_std.copy_(torch.rand(8, generator=generator) + 0.1)
    tap = torch.randn(2, 3, 8, generator=generator)
    standardised = (tap - projection.mean) * projection.inverse_std
    close(projection(tap), standardised @ projection.weight.T + projection.bias)


def test_parameters_belong_to_one_stage_and_decay_is_for_matrices():
    config = ParallelAdapterConfig(hidden_size=32, num_layers=4)
    reference = ParallelAdapter(config).state_dict()
    parts = [ParallelAdapterStage(config, *bounds).state_dict() for bounds in ((0, 1), (1, 3), (3, 4))]
    assert sum(len(part) for part in parts) == len(reference)
    for part in parts:
        for name, tensor in part.items():
            assert torch.equal(tensor, reference[name]), name
    decayed, free = make_optimizer(ParallelAdapter(config), 0.01).param_groups
    assert {parameter.ndim for parameter in decayed["params"]} == {2} and free["weight_decay"] == 0.0


def test_minilm_has_the_published_number_of_trainable_parameters():
    adapter = ParallelAdapter(ParallelAdapterConfig(hidden_size=384, num_layers=6))
    assert sum(parameter.numel() for parameter in adapter.parameters()) == pytest.approx(319_000, rel=0.01)
    assert adapter.config.heads == 3


def test_a_regression_learns_standardised_labels_and_answers_in_their_own_units():
    """Its loss and gradients are those of labels of mean 0 and deviation 1."""
    torch.manual_seed(0)  # float32 rounds some gradients of other draws by more than the tolerance
    shape = {"hidden_size": 32, "num_layers": 1, "kind": "regression", "num_outputs": 1, "dropout": 0.0}
    plain = ParallelAdapter(ParallelAdapterConfig(**shape)).train()
    scaled = ParallelAdapter(ParallelAdapterConfig(**shape, label_mean=3.0, label_std=0.5)).train()
    scaled.load_state_dict(plain.state_dict())
    taps, mask, labels = [torch.randn(3, 2, 32), torch.randn(3, 2, 32)], torch.ones(3, 2), torch.tensor([3.5, 2.0, 3.1])
    ours, theirs = (adapter.predict(taps, mask, torch.arange(3)) for adapter in (scaled, plain))
    close(ours, 0.5 * theirs + 3.0)
    losses = task_loss(ours, labels, "regression", label_std=0.5), task_loss(theirs, (labels - 3.0) / 0.5, "regression")
    close(*losses)
    close(losses[1], ((theirs[:, 0] - (labels - 3.0) / 0.5) ** 2).mean())
    for loss in losses:
        loss.backward()
    for mine, other in zip(scaled.parameters(), plain.parameters(), strict=True):
        close(mine.grad, other.grad)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label_std": 2.0}, "only a regression"),
        ({"kind": "regression", "num_outputs": 1, "label_std": 0.0}, "above 0"),
        ({"reduction": 7}, "multiple of 7"),
        ({"dropout": 1.0}, "dropout"),
        ({"num_heads": 5}, "5 heads"),
        ({"kind": "regression"}, "Regression"),
    ],
)
def test_impossible_shapes(changes, message):
    with pytest.raises(ConfigError, match=message):
        ParallelAdapterConfig(hidden_size=32, num_layers=2, **changes)


def test_a_stage_checks_its_inputs():
    stage = ParallelAdapterStage(ParallelAdapterConfig(hidden_size=32, num_layers=2), 1, 2)
    with pytest.raises(ValueError, match="no side input"):
        stage(None, [torch.zeros(1, 2, 32)], torch.ones(1, 2))
