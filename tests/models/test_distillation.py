"""Distilled initial weights: the student comes nearer to the backbone, by the seed alone, and a stage takes its
part."""

import pytest
import torch

from workbench.core.errors import ConfigError
from workbench.models.distillation import _Student, distill, distillation_fingerprint, distilled, load_distilled
from workbench.models.loading import load_stack
from workbench.models.parallel_adapter import ParallelAdapter, ParallelAdapterStage

from .helpers import small_batch, small_config

TEXTS = [small_batch(seed=seed) for seed in range(3)]


def batches(epoch):
    return TEXTS


@pytest.fixture(scope="module")
def taught():
    stack = load_stack("tiny-bert-2")
    return stack, distill(stack, small_config(stack), batches, num_epochs=1)


def losses(stack, state):
    """Return both losses of an adapter with this state on a batch that was not trained on."""
    adapter = ParallelAdapter(small_config(stack))
    load_distilled(adapter, state)
    batch = small_batch(seed=9)
    taps = stack(batch.input_ids, batch.attention_mask)[1]
    return [loss.item() for loss in _Student(adapter).losses(taps, batch.attention_mask)]


def test_the_student_comes_nearer_to_the_backbone(taught):
    stack, early = taught
    late = distill(stack, small_config(stack), batches, num_epochs=30)
    before, after = losses(stack, early), losses(stack, late)
    assert after[0] < 0.8 * before[0] < 1.5 and after[1] < 0.8 * before[1]


def test_the_state_is_a_function_of_the_arguments(taught):
    stack, state = taught
    again = distill(stack, small_config(stack), batches, num_epochs=1)
    assert all(torch.equal(state[name], again[name]) for name in state | again)
    other = distill(stack, small_config(stack, seed=4), batches, num_epochs=1)
    assert not torch.equal(state["layers.0.expand.weight"], other["layers.0.expand.weight"])
    assert not any(parameter.requires_grad for parameter in stack.parameters())


def test_projections_are_orthonormal_and_lambda_is_as_it_was(taught):
    _, state = taught
    down = state["layers.1.down.weight"]
    torch.testing.assert_close(down @ down.T, torch.eye(8), atol=1e-5, rtol=0)
    assert torch.equal(down, state["first.weight"]) and state["layers.0.mix"].item() == 0.5


def test_a_stage_takes_its_part_and_keeps_its_own_head(taught):
    stack, state = taught
    config = small_config(stack, num_outputs=5)
    reference, stage = ParallelAdapter(config), ParallelAdapterStage(config, 1, 2)
    head = reference.last.output.weight.clone()
    load_distilled(reference, state)
    load_distilled(stage, {name: tensor for name, tensor in state.items() if name.startswith(("layers.1.", "last."))})
    assert torch.equal(reference.last.output.weight, head) and torch.equal(stage.last.output.weight, head)
    assert torch.equal(stage.layers["1"].expand.weight, reference.layers["1"].expand.weight)
    with pytest.raises(ConfigError, match="not \\[16, 32\\]"):
        load_distilled(ParallelAdapter(small_config(stack, reduction=2)), state)


def test_an_encoder_decoder_is_taught_in_both_stacks():
    stack = load_stack("tiny-t5-2")
    config = small_config(stack, num_encoder_layers=1, target_length=1)
    early, late = (distill(stack, config, batches, num_epochs=epochs) for epochs in (1, 20))
    adapter = ParallelAdapter(config)
    taps = stack(TEXTS[0].input_ids, TEXTS[0].attention_mask)[1]
    results = []
    for state in (early, late):
        load_distilled(adapter, state)
        results.append(_Student(adapter).losses(taps, TEXTS[0].attention_mask)[0].item())
    assert results[1] < results[0]


def test_kept_states_are_found_again_and_damaged_ones_made_anew(taught, tmp_path):
    stack, state = taught
    texts = ["one", "two"]
    key = distillation_fingerprint("tiny-bert-2", "w", small_config(stack), texts)
    assert key != distillation_fingerprint("tiny-bert-2", "w", small_config(stack), ["onet", "wo"])
    assert key == distillation_fingerprint("tiny-bert-2", "w", small_config(stack, num_outputs=3, dropout=0.0), texts)
    results = []

    def make():
        results.append(1)
        return state

    for _ in range(2):
        assert torch.equal(distilled(tmp_path, key, make)["first.weight"], state["first.weight"])
    assert len(results) == 1
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert torch.equal(distilled(tmp_path, key, make)["first.weight"], state["first.weight"]) and len(results) == 2


def test_what_cannot_be_distilled_is_refused():
    stack = load_stack("tiny-bert-2")
    with pytest.raises(ConfigError, match="Use its own"):
        distill(stack, small_config(load_stack("tiny-bert-3")), batches)
    with pytest.raises(ConfigError, match="fewer than 2"):
        distill(stack, small_config(stack), lambda epoch: [small_batch(lengths=(5,))])
