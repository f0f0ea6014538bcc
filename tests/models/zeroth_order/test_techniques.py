"""What can be trained (P-RGE, Appendix B): LoRA, DoRA and VeRA are peft's; each learns by forward passes, and by
gradients."""

import pytest
import torch

from workbench.core.errors import ConfigError
from workbench.methods.p_rge.zeroth_order import (
    FirstOrder,
    Mezo,
    PrecisionWarning,
    Prge,
    TrainableConfig,
    ZerothOrderConfig,
    gradients_of,
    smallest_epsilon,
    warn_of_rounding,
)
from workbench.methods.p_rge.zeroth_order import load_causal_model as load
from workbench.models.loading import load_stack
from workbench.models.lora import import_peft
from workbench.models.quantization import QuantizationConfig

from .prompts import perturb, prompts

TECHNIQUES = ("lora_fa", "lora", "dora", "vera")
ESTIMATE = ZerothOrderConfig(queries=4, epsilon=1e-2, learning_rate=0.02)


def with_peft(technique, family, ours):
    """The same backbone with peft's layers in it, which are given our values."""
    peft = import_peft()
    stack = load_stack(f"tiny-{family}-2", with_head=True)
    stage, head = stack.stage(0, 2), stack.language_model_head
    targets = [name.removesuffix(".base") for name, _ in ours.backbone.named_modules() if name.endswith(".base")]
    transposed = family == "gpt2"
    if technique == "vera":
        config = peft.VeraConfig(
            r=8, target_modules=targets, d_initial=0.1, save_projection=True, fan_in_fan_out=transposed
        )
        peft.VeraModel(stage, config, "default")
    else:
        config = peft.LoraConfig(
            r=8, lora_alpha=16, use_dora=technique == "dora", target_modules=targets, fan_in_fan_out=transposed
        )
        peft.inject_adapter_in_model(config, stage)
    for path in targets:
        layer, own = stage.get_submodule(path), ours.backbone.get_submodule(path)
        with torch.no_grad():
            if technique == "vera":
                layer.vera_lambda_d["default"].copy_(own.lambda_d)
                layer.vera_lambda_b["default"].copy_(own.lambda_b)
                # Shared by all layers; each takes the corner that it needs.
                layer.vera_A["default"][:, : own.a.shape[0]] = own.a.T
                layer.vera_B["default"][: own.b.shape[1]] = own.b.T
                continue
            a = own.a / 2 if technique == "lora_fa" else own.A  # ours holds alpha / r = 2 already
            layer.lora_A["default"].weight.copy_(a.T)
            layer.lora_B["default"].weight.copy_(own.B.T)
            if technique == "dora":
                layer.lora_magnitude_vector["default"].weight.copy_(own.magnitude)
    return stage.eval(), head


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_the_layers_compute_what_peft_does(technique, family):
    ours, batch = load(f"tiny-{family}-2", TrainableConfig(technique=technique, rank=8, alpha=16)), prompts()
    beginning = ours.logits_at(batch)
    plain = load_stack(f"tiny-{family}-2", with_head=True)
    rows = torch.arange(3)[:, None]
    untouched = plain.language_model_head(plain(batch.input_ids, batch.attention_mask)[0][rows, batch.positions])
    torch.testing.assert_close(beginning, untouched, rtol=1e-4, atol=1e-5)
    perturb(ours, seed=3, alpha=0.3)
    stage, head = with_peft(technique, family, ours)
    with torch.no_grad():
        expected = head(stage(batch.input_ids, batch.attention_mask)[0][rows, batch.positions])
    assert (expected - untouched).abs().max() > 0.01
    torch.testing.assert_close(ours.logits_at(batch), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_every_technique_runs_in_parts_on_stored_weights(technique):
    quantization = QuantizationConfig(storage="int8", block_size=32)
    model, batch = (
        load("tiny-llama-2", TrainableConfig(technique=technique, rank=8), quantization=quantization),
        prompts(),
    )
    perturb(model, seed=3, alpha=0.1)
    results = [
        Prge(model, ZerothOrderConfig(queries=2, epsilon=0.1, execution=execution)).losses(batch, 0)
        for execution in ("sequential", "both")
    ]
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)
    assert results[0].std() > 1e-4


def test_mezo_trains_all_parameters_in_place():
    model, batch = load("tiny-llama-2", TrainableConfig(technique="full")), prompts()
    before = model.trainables.state()
    estimator = Mezo(model, ZerothOrderConfig(queries=2, epsilon=1e-3, learning_rate=2e-4))
    estimator.losses(batch, 0)
    for name, parameter in model.trainables.parameters.items():
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=1e-6)
    losses = [estimator.step(batch, step).loss for step in range(30)]
    assert losses[-1] < losses[0] - 0.02, losses


@pytest.mark.parametrize(("optimizer", "rate"), [("sgd", 0.1), ("adam", 3e-3)])
@pytest.mark.parametrize("technique", ["full", "lora_fa"])
def test_first_order_references_learn(optimizer, rate, technique):
    model, batch = load("tiny-gpt2-2", TrainableConfig(technique=technique, rank=8)), prompts()
    trainer = FirstOrder(model, optimizer, rate)
    losses = [trainer.step(batch) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.02, losses
    before = load("tiny-gpt2-2", model.config).state_dict()
    changed = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    tied = {"head.weight"} if technique == "full" else set()  # the word embedding by its other name
    assert (
        changed - tied
        == changed & {name if technique == "full" else f"backbone.{name}" for name in model.trainables.parameters}
        and len(changed) >= len(model.trainables.parameters) / 2
    )


@pytest.mark.parametrize(
    ("dtype", "technique", "epsilon"),
    [("bfloat16", "lora_fa", 1e-5), ("float16", "full", 1e-6), ("float32", "dora", 1e-10)],
)
def test_an_epsilon_that_is_rounded_away_is_warned_of(dtype, technique, epsilon):
    model = load("tiny-llama-2", TrainableConfig(technique=technique), dtype=getattr(torch, dtype))
    make = Mezo if technique == "full" else Prge
    todo = "Raise epsilon.$" if dtype == "float32" else "or compute in float32"
    with pytest.warns(PrecisionWarning, match=f"too small for {dtype}: it keeps .* binary digits.*{todo}"):
        make(model, ZerothOrderConfig(epsilon=epsilon))
    warn_of_rounding(model, 2 * smallest_epsilon(model))  # warnings are errors here


def test_below_the_bound_chance_decides_and_above_it_the_slope():
    def slopes(dtype, epsilon):
        model = load("tiny-llama-2", TrainableConfig(), dtype=dtype)
        perturb(model, seed=3, alpha=0.1)
        return torch.tensor(
            gradients_of(Prge(model, ZerothOrderConfig(queries=16, epsilon=epsilon)).losses(prompts(), 0), epsilon)
        )

    exact, coarse = slopes(torch.float32, 0.05), slopes(torch.bfloat16, 0.05)
    assert torch.corrcoef(torch.stack([exact, coarse]))[0, 1] > 0.8
    with pytest.warns(PrecisionWarning):
        lost = slopes(torch.bfloat16, 1e-5)
    assert (lost - exact).norm() > 3 * exact.norm()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ZerothOrderConfig(queries=0), "queries = 0"),
        (lambda: ZerothOrderConfig(epsilon=0.0), "epsilon = 0.0"),
        (lambda: ZerothOrderConfig(epsilon=float("nan")), "epsilon = nan"),
        (lambda: ZerothOrderConfig(learning_rate=-1.0), "learning_rate = -1.0"),
        (lambda: ZerothOrderConfig(execution="inne"), "Did you mean 'inner'"),
        (lambda: TrainableConfig(technique="lorafa"), "Did you mean 'lora_fa'"),
        (lambda: TrainableConfig(rank=0), "rank = 0"),
        (lambda: load("tiny-bert-2", TrainableConfig()), "predicts no words"),
        (lambda: Prge(load("tiny-llama-2", TrainableConfig(technique="full")), ESTIMATE), "separate model"),
        (
            lambda: load(
                "tiny-llama-2", TrainableConfig(technique="full"), quantization=QuantizationConfig(block_size=32)
            ),
            "quantized",
        ),
        (lambda: FirstOrder(load("tiny-llama-2", TrainableConfig()), "adamw", 1e-3), "Did you mean 'adam'"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
