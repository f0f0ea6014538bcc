"""Without padding: the same losses and logits from fewer tokens."""

import pytest
import torch

from workbench.methods.p_rge.packing import computed_length, packs_of
from workbench.methods.p_rge.zeroth_order import Prge, TrainableConfig, ZerothOrderConfig, load_causal_model

from .prompts import perturb, prompts

CONFIG = TrainableConfig(rank=4, alpha=8, num_outputs=3)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma3_text", "gpt_neox"])
@pytest.mark.parametrize(
    ("lengths", "packs"),
    [
        ((23, 5, 9, 14), (2, 28)),
        ((8, 24), (1, 32)),
        ((120, 16, 100, 30, 110, 14), (3, 134)),
        ((90, 20, 10, 90), (2, 110)),
    ],
)
def test_losses_and_logits_are_those_of_padded_rows(family, lengths, packs):
    model, batch = load_causal_model(f"tiny-{family}-2", CONFIG, dtype=torch.float64), prompts(lengths=lengths)
    perturb(model)
    config = ZerothOrderConfig(queries=2, epsilon=0.1, learning_rate=0.05, seed=5)
    assert model.start(batch, 4).shape == (4 * packs[0], packs[1], model.backbone.hidden_size)
    packed = Prge(model, config).losses(batch, 3), model.logits_at(batch)
    model.packs = False
    assert model.start(batch, 4).shape[:2] == (4 * len(lengths), max(lengths))
    padded = Prge(model, config).losses(batch, 3), model.logits_at(batch)
    torch.testing.assert_close(packed, padded, rtol=1e-6, atol=1e-6)


def test_a_row_alone_loses_its_padding():
    model = load_causal_model("tiny-llama-2", CONFIG, dtype=torch.float64)
    batch, short = prompts(lengths=(24, 8)), {}
    for name in ("input_ids", "attention_mask", "targets", "positions", "target_mask"):
        short[name] = getattr(batch, name)[1:]
    alone = type(batch)(**short)
    packing = model.packing(alone)
    assert packing is not None and packing.mask() is None
    torch.testing.assert_close(model.logits_at(alone), model.logits_at(batch)[1:], rtol=1e-6, atol=1e-6)


def test_where_it_does_not_pay_nothing_is_packed():
    """Rows of about one length, and models whose attention is not causal."""
    model = load_causal_model("tiny-llama-2", CONFIG)
    assert model.packing(prompts(lengths=(11, 11, 10))) is None
    for family in ("bert", "t5"):
        assert load_causal_model(f"tiny-{family}-2", CONFIG).packing(prompts(family, lengths=(23, 5))) is None


def test_tokens_that_a_row_is_computed_for():
    assert computed_length((10, 10, 9), 16, 576) == 10
    assert computed_length((10, 10, 9), 16, 0) == 16
    assert computed_length((16, 15, 15), 16, 576) == 16
    assert computed_length((3,), 8, 576) == 3
    assert computed_length((256,) * 16, 512, 576) == 256


def test_long_rows_make_several_packs():
    """In a single one, what they would attend to in vain would be more than the padding."""
    assert packs_of((256,) * 4, 512, 576) == ((0,), (1,), (2,), (3,))
    assert packs_of((500, 100, 380, 260, 240), 512, 576) == ((0,), (1, 2), (3, 4))
    assert packs_of((30, 20, 10, 40), 64, 576) == ((2, 3), (0, 1))
    assert packs_of((30, 10, 10, 40), 64, 576) == ((0, 1, 2, 3),)
    assert packs_of((500, 490, 480), 512, 576) is None
