"""Per-step losses and predictions against the arithmetic of MobiZO's public code, which is the later form of P-RGE
(github.com/leigao97/MobiZO, read in the fork jmha02/MobiZO: lora.py and trainer.py, --zo_mode dual).  Written again
here: B has a copy for each sign of each query; labels are the last tokens of texts that are padded on their left; every
copy makes the same step.  A prediction is the label word with the largest logit, or the candidate whose tokens have the
largest mean log-probability.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from workbench.methods.common.result import model_encoder
from workbench.methods.p_rge.seeds import query_seed
from workbench.methods.p_rge.zeroth_order import Prge, TrainableConfig, ZerothOrderConfig, load_causal_model
from workbench.models.configuration import model_config
from workbench.tasks import load_task
from workbench.tasks.prompts import evaluate
from workbench.tasks.task import PromptSample
from workbench.tasks.wording import PROMPTS

from .prompts import Prompts

Q, SEED, STEPS, EPSILON, ETA = 3, 5, 6, 1e-2, 5e-3
LORA = TrainableConfig(projections="all", rank=8, alpha=16.0)
LENGTHS = (9, 6)


FIELDS = {
    "sst2": ("sentence",),
    "copa": ("premise", "candidate1", "candidate2", "conjunction"),
    "winogrande": ("context", "subject1", "subject2", "object", "space"),
}


class Copies(nn.Module):
    """A projection whose input has the rows of every copy, one copy after the other, as in lora.py."""

    def __init__(self, base: nn.Linear, a: Tensor) -> None:
        super().__init__()
        self.base, self.a = base, a
        self.b = torch.zeros(2 * Q, base.out_features, LORA.rank, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        low = (x @ self.a.T).view(2 * Q, -1, *x.shape[1:-1], LORA.rank)
        added = torch.einsum("d...r,dor->d...o", low, self.b) * LORA.alpha / LORA.rank
        return self.base(x) + added.reshape(*x.shape[:-1], -1)


def drawn(step: int) -> tuple[Tensor, Tensor]:
    """Return prompts (E, longest), of which only the first LENGTHS tokens count, and their label words (E,)."""
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randint(4, 1400, (len(LENGTHS), max(LENGTHS)), generator=generator),
        torch.randint(4, 1400, (len(LENGTHS),), generator=generator),
    )


def test_losses_of_every_step_are_those_of_mobizo_s_code(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(model_config("tiny-llama-2")).save_pretrained(tmp_path)
    ours = load_causal_model(str(tmp_path), LORA, dtype=torch.float64)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    slots, trainables = ours.trainables.slots, ours.trainables
    copies = []
    for slot in slots:
        path = slot.name.removesuffix(".B")
        a = ours.backbone.get_submodule(path).a.T * LORA.rank / LORA.alpha  # ours has the factor in A
        copies.append(Copies(theirs.get_submodule(f"model.{path}"), a))
        theirs.set_submodule(f"model.{path}", copies[-1])
    assert len(slots) == 2 * 7

    def matrices(values: Tensor) -> list[Tensor]:
        parts = zip(torch.split(values.detach(), trainables.sizes), slots, strict=True)
        return [part.view(slot.shape).T.double() for part, slot in parts]

    config = ZerothOrderConfig(queries=Q, epsilon=EPSILON, learning_rate=ETA, seed=SEED)
    for step in range(STEPS):
        tokens, words = drawn(step)
        batch = Prompts(
            input_ids=tokens,
            attention_mask=(torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long(),
            targets=words[:, None],
            positions=torch.tensor(LENGTHS)[:, None] - 1,
            target_mask=torch.ones(len(LENGTHS), 1, dtype=torch.bool),
        )
        losses = Prge(ours, config).step(batch, step).losses
        noise = [matrices(trainables.noise(query_seed(SEED, step, query))) for query in range(Q)]
        expected = mobizo_step(theirs, copies, noise, tokens, words)
        torch.testing.assert_close(losses.double().view(Q, 2).T, expected, rtol=1e-5, atol=1e-6)
    assert trainables.flat.abs().max() > 1e-2
    for theta, copy in zip(matrices(trainables.flat), copies, strict=True):
        torch.testing.assert_close(copy.b, theta.expand_as(copy.b), rtol=1e-3, atol=1e-5)


@torch.no_grad()
def mobizo_step(
    model: nn.Module, copies: list[Copies], noise: list[list[Tensor]], tokens: Tensor, words: Tensor
) -> Tensor:
    """Return the losses (2, Q), plus and minus, and make the step.  noise: of each query, for each projection."""
    longest = max(LENGTHS) + 1
    ids, mask = torch.zeros(2, len(LENGTHS), longest, dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        ids[row, longest - length - 1 :] = torch.cat([tokens[row, :length], words[row : row + 1]])
        mask[row, longest - length - 1 :] = 1
    labels = torch.full_like(ids, -100)
    labels[:, -1] = ids[:, -1]
    z = [torch.stack([of_query[index] for of_query in noise]) for index in range(len(copies))]
    for copy, direction in zip(copies, z, strict=True):
        copy.b += EPSILON * torch.cat([direction, -direction])
    logits = model(ids.repeat(2 * Q, 1), mask.repeat(2 * Q, 1)).logits[:, :-1]
    shifted = labels[:, 1:].repeat(2 * Q, 1)
    losses = torch.stack(
        [
            F.cross_entropy(part.flatten(0, 1), wanted.flatten())
            for part, wanted in zip(logits.split(len(LENGTHS)), shifted.split(len(LENGTHS)), strict=True)
        ]
    ).view(2, Q)
    slopes = (losses[0] - losses[1]) / (2 * EPSILON)
    for copy, direction in zip(copies, z, strict=True):
        copy.b -= EPSILON * torch.cat([direction, -direction])
        copy.b -= ETA * (slopes[:, None, None] * direction).mean(dim=0)
    return losses


@pytest.mark.parametrize("task", ["sst2", "copa", "winogrande"])
def test_predictions_are_those_of_mobizo_s_code(task: str, tmp_path: Path) -> None:
    """Its classifications, whose label words are single tokens, and its multiple choices."""
    torch.manual_seed(3)
    config = model_config("tiny-llama-2")
    config.initializer_range = 0.5  # otherwise it answers every prompt alike
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ours, theirs = load_causal_model(str(tmp_path), LORA), AutoModelForCausalLM.from_pretrained(tmp_path)
    prompt = PROMPTS[task]
    if prompt.words:
        prompt = replace(prompt, words=(" a", " is"))  # single tokens of a small vocabulary
    words = [sentence.split() for sentence in load_task("sentiment", test_samples=32).test.texts]
    samples = [
        PromptSample(sample_id=number, fields=dict(zip(FIELDS[task], (*row[:4], " "), strict=False)), label=0)
        for number, row in enumerate(words)
    ]
    encoder = model_encoder(prompt, "tiny-llama-2", 128)
    scores = evaluate(ours.logits_at, samples, encoder)

    expected = []
    for sample in samples:
        text = prompt.fill(sample.fields)
        endings = prompt.words or encoder.continuations(sample, sample.fields)
        wholes, parts = encoder.encode([text + ending for ending in endings]), encoder.encode(list(endings))
        counts = [len(part) - len(encoder.lead) for part in parts]
        logits = left_padded_logits(theirs, wholes)
        if prompt.words:
            assert counts == [1, 1]
            expected.append(int(logits[0, -2, [whole[-1] for whole in wholes]].argmax()))
        else:
            each = [
                row[-count - 1 : -1].log_softmax(dim=-1)[range(count), whole[-count:]].mean()
                for row, whole, count in zip(logits, wholes, counts, strict=True)
            ]
            expected.append(int(each[1] > each[0]))
    assert list(scores.predictions) == expected and len(set(expected)) == 2


@torch.no_grad()
def left_padded_logits(model: nn.Module, rows: list[list[int]]) -> Tensor:
    """Return logits (rows, longest, V)."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return model(ids, mask, position_ids=positions).logits
