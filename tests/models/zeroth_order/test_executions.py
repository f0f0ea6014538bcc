"""All executions are one estimator, and that the one of the definition (P-RGE, Algorithm 1 to 3): the central test."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from workbench.methods.p_rge.seeds import query_seed
from workbench.methods.p_rge.zeroth_order import (
    Mezo,
    Prge,
    TrainableConfig,
    ZerothOrderConfig,
    load_causal_model,
)
from workbench.models.families import FAMILIES
from workbench.models.quantization import QuantizationConfig

from .prompts import Naive, perturb, prompts

EXECUTIONS = tuple(itertools.product(("sequential", "outer", "inner", "both"), ("per_layer", "kept")))
CONFIG = TrainableConfig(rank=4, alpha=8, num_outputs=3)
ESTIMATE = ZerothOrderConfig(queries=2, epsilon=0.1, learning_rate=0.05, seed=5)


def estimate(**changes):
    settings = {name: getattr(ESTIMATE, name) for name in ZerothOrderConfig.__dataclass_fields__}
    return ZerothOrderConfig(**settings | changes)


def started(family, projections="query_value", **options):
    """A model in the midst of its training: B is zero only in the beginning."""
    model = load_causal_model(f"tiny-{family}-2", replace(CONFIG, projections=projections), **options)
    perturb(model)
    return model


@pytest.mark.parametrize("projections", ["query_value", "all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_execution_gives_the_losses_of_the_definition(family, projections):
    model = started(family, projections, dtype=torch.float64)
    batch, naive = prompts(family), Naive(f"tiny-{family}-2")
    for index, layer in enumerate(naive.stack.layers) if projections == "all" else ():
        matrices = {name for name, module in layer.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)}
        slots = {slot.name.removesuffix(".B") for slot in model.trainables.slots if slot.layer == index}
        assert {name.split(".", 2)[2] for name in slots} == matrices
    theta = model.trainables.flat.clone()
    expected = []
    for query in range(2):
        noise = model.trainables.noise(query_seed(5, 3, query))
        for sign in (1, -1):
            moved = torch.split(theta + sign * ESTIMATE.epsilon * noise, model.trainables.sizes)
            values = {
                slot.name: part.view(slot.shape) for slot, part in zip(model.trainables.slots, moved, strict=True)
            }
            expected.append(naive.loss(model, values, batch))
    for execution, copies in EXECUTIONS:
        actual = Prge(model, estimate(execution=execution, copies=copies)).losses(batch, 3)
        torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-6, atol=1e-6)
    some = Prge(model, ESTIMATE).losses(batch, 3, queries=[1])
    torch.testing.assert_close(some, torch.tensor(expected[2:]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model.trainables.flat, theta, rtol=0, atol=0)
    torch.testing.assert_close(Mezo(model, ESTIMATE).losses(batch, 3), torch.tensor(expected), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model.trainables.flat, theta, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_a_loss_among_some_tokens_knows_no_others(family):
    """MeZO's own, for classifications: what the model gives to other words makes no difference."""
    model, batch = started(family, dtype=torch.float64), prompts(family)
    choices = torch.cat([batch.targets[batch.target_mask], torch.tensor([7, 1000])]).unique()
    logits = model.logits_at(batch)[..., choices].double()
    wanted = (batch.targets[..., None] == choices).long().argmax(dim=-1)
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view(
        wanted.shape
    )
    expected = ((each * batch.target_mask).sum(dim=1) / batch.target_mask.sum(dim=1)).mean()
    among = replace(batch, choices=choices)
    assert model.part_losses(among).item() == pytest.approx(float(expected), rel=1e-5)
    assert model.part_losses(batch).item() > float(expected) + 1
    losses = [Prge(model, estimate(execution=execution)).losses(among, 0) for execution in ("sequential", "both")]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "technique"),
    [("llama", "lora_fa"), ("llama", "lora"), ("gpt2", "dora"), ("opt", "vera"), ("bart", "lora_fa"), ("bert", "lora")],
)
def test_every_execution_makes_the_same_updates(family, technique):
    """Five steps of each, and of MeZO in place, from the same weights, seeds and samples."""

    def trained(make):
        model = load_causal_model(f"tiny-{family}-2", replace(CONFIG, technique=technique), dtype=torch.float64)
        begun, estimator = model.trainables.flat.clone(), make(model)
        for step in range(5):
            estimator.step(prompts(family, seed=step), step)
        return model.trainables.flat - begun

    epsilon, rate = (1.0, 1.0) if technique == "vera" else (0.1, 0.01)  # two vectors change little
    config = partial(estimate, epsilon=epsilon, learning_rate=rate)
    expected = trained(lambda model: Prge(model, config(execution="sequential")))
    assert expected.abs().max() > 1e-3
    # In each of five steps each of two losses, a float32 below 16, may differ in its last place; noise is hardly above
    # 4.
    tolerance = {"rtol": 1e-4, "atol": 5 * 2 * 2**-20 / (2 * epsilon) * rate * 4}
    for execution, copies in EXECUTIONS[1:]:
        actual = trained(lambda model, e=execution, c=copies: Prge(model, config(execution=e, copies=c)))
        torch.testing.assert_close(actual, expected, **tolerance)
    torch.testing.assert_close(trained(lambda model: Mezo(model, config())), expected, **tolerance)


@pytest.mark.parametrize("family", ["llama", "t5", "bert"])
def test_stages_make_the_steps_of_the_whole(family):
    name, batch = f"tiny-{family}-4", prompts(family)
    reference = load_causal_model(name, CONFIG)
    result = Prge(reference, ESTIMATE).step(batch, 0)
    for execution in ("both", "inner"):
        stages = [load_causal_model(name, CONFIG, span=span) for span in ((0, 1), (1, 3), (3, 4))]
        states = None
        for stage in stages:
            estimator = Prge(stage, estimate(execution=execution))
            states = estimator.forward_stage(states, batch, 0, range(2))
            stage.trainables.apply(result.log)
        torch.testing.assert_close(estimator.arranged(states, 2), result.losses, rtol=1e-5, atol=1e-5)
        assert torch.equal(torch.cat([stage.trainables.flat for stage in stages]), reference.trainables.flat)


@pytest.mark.parametrize("storage", ["int8", "nf4", "bfloat16"])
def test_a_quantized_backbone_is_dequantized_once_for_all_passes(storage, monkeypatch):
    from workbench.models.quantization import stored

    model, batch = started("llama", quantization=QuantizationConfig(storage=storage, block_size=32)), prompts()
    counts = {"now": 0}

    def counted(original):
        def dequantize(self):
            counts["now"] += 1
            return original(self)

        return dequantize

    for kind in (stored.CastWeight, stored.BlockWeight):
        monkeypatch.setattr(kind, "dequantize", counted(kind.dequantize))
    results, dequantized = {}, {}
    for execution in ("sequential", "outer", "inner", "both"):
        estimator = Prge(model, estimate(execution=execution))
        counts["now"] = 0
        results[execution], dequantized[execution] = estimator.losses(batch, 0), counts["now"]
        torch.testing.assert_close(results[execution], results["sequential"], rtol=1e-4, atol=1e-4)
    layers = 2 * 7
    heads = dequantized["both"] - layers
    assert dequantized == {
        "sequential": 4 * (layers + heads),
        "outer": layers + 2 * heads,
        "inner": layers + 2 * heads,
        "both": layers + heads,
    }
