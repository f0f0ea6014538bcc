"""A text does not depend on its draft: greedy or sampled, it is the one without."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from workbench.core.catalogue import load_cluster
from workbench.core.errors import ConfigError
from workbench.methods.common import text_model
from workbench.methods.galaxy_plus.serving import text_service
from workbench.models.generation import Sampling
from workbench.models.loading import load_model, load_tokenizer
from workbench.models.sharding.whole import WholeModel
from workbench.models.speculation import NUM_GUESSES, Draft, DraftChoice, local_draft, num_guesses
from workbench.models.text import CachedModel, LocalWriter, RecomputedModel
from workbench.models.text_batch import BatchModel, GrowingText, TextBatch

SAMPLINGS = (Sampling(), Sampling(temperature=0.7, seed=3), Sampling(temperature=1.2, top_p=0.8, seed=4))


def written_together(writer: LocalWriter) -> list[list[int]]:
    """Return texts that join at different steps, with other numbers of tokens, each sampled in its way."""
    texts = [writer.write([5, 9, 7, *range(20, 20 + at)], 24 - 3 * at, way) for at, way in enumerate(SAMPLINGS)]
    results = [list[int]() for _ in texts]
    for turn in range(24):
        for at in range(min(len(texts), 1 + turn)):
            token = next(texts[at], None)
            results[at] += [] if token is None else [token]
    return results


def recomputed(name: str) -> RecomputedModel:
    model = CachedModel(load_model(name))
    return RecomputedModel(lambda ids: model.start(ids, (), 0)[1])


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("tiny-llama-4", WholeModel),
        ("tiny-gemma3_text-4", WholeModel),
        ("tiny-t5-6", WholeModel),
        ("tiny-llama-4", lambda name: CachedModel(load_model(name))),
        ("tiny-gemma3_text-4", lambda name: CachedModel(load_model(name))),
        ("tiny-llama-4", recomputed),
    ],
)
def test_a_text_does_not_depend_on_its_draft(name: str, build: Any) -> None:
    """Also where guesses are right and wrong in turn, and while texts join and end."""
    expected = written_together(LocalWriter(name, CachedModel(load_model(name))))
    assert [len(text) for text in expected] == [24, 21, 18]
    model: BatchModel = build(name)
    for text in ("layers:1", "int4", f"{name[:-2]}-2"):
        draft = local_draft(DraftChoice.read(text, name), name, model if isinstance(model, WholeModel) else None)
        assert written_together(LocalWriter(name, model, (), draft)) == expected, text
        assert 1 < draft.passes.mean <= NUM_GUESSES + 1


@pytest.mark.parametrize(("name", "guesser"), [("tiny-llama-4", "padded-2"), ("padded-4", "tiny-llama-2")])
def test_a_draft_may_have_another_number_of_unused_rows(name: str, guesser: str, tmp_path: Path) -> None:
    """The model may choose an unused one, which its draft cannot read, as in texts of random weights."""

    def saved(name: str) -> str:
        if name.startswith("tiny"):
            return name
        tiny = load_model(f"tiny-llama-{name[-1]}")
        tiny.config.tie_word_embeddings = True
        model = LlamaForCausalLM(tiny.config)
        model.model.load_state_dict(tiny.state_dict())
        torch.manual_seed(0)
        model.resize_token_embeddings(1600, mean_resizing=False)
        model.save_pretrained(tmp_path / name)
        load_tokenizer("tiny-llama-2").backend.save(str(tmp_path / name / "tokenizer.json"))
        roles = {"eos_token": "[SEP]", "pad_token": "[PAD]"}
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps(roles))
        return str(tmp_path / name)

    name, guesser = saved(name), saved(guesser)
    model = WholeModel(name)
    draft = local_draft(DraftChoice.read(guesser, name), name, model)
    expected = written_together(LocalWriter(name, model))
    assert written_together(LocalWriter(name, model, (), draft)) == expected
    assert draft.passes.mean > 1
    assert (max(map(max, expected)) >= 1492) == ("padded" in name)


P = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.5, 1.0], [-1.0, 2.0, 0.0]])
Q = torch.tensor([[0.0, 1.0, 0.5], [0.0, 1.5, 1.0], [1.0, 0.0, 0.0]])
"""Logits of the next token after each token, of a model and of its draft."""


def outcomes(logits: Tensor, drafting: Tensor | None, count: int) -> Counter[tuple[int, ...]]:
    """Return how often a model of given logits writes each text of three tokens, one for each seed."""
    results: Counter[tuple[int, ...]] = Counter()
    draft = None if drafting is None else Draft(RecomputedModel(lambda ids: drafting[ids[-1]][None]))
    batch = TextBatch(RecomputedModel(lambda ids: logits[ids[-1]][None]), draft)
    for seed in range(count):
        sampling = Sampling(temperature=1.0, seed=seed)
        text = GrowingText(tokens=[0], prompt=1, num_tokens=3, ends=(), sampling=sampling, rules=lambda ids, rows: rows)
        member = batch.join(text, [0], ())
        results[tuple(batch.next(member) or 0 for _ in range(3))] += 1
    return results


def test_sampled_texts_have_the_models_distribution() -> None:
    """Pearson's chi-squared of 27 texts is within 5 standard deviations; that of the draft's own texts is far above."""
    count = 1000
    steps = P.softmax(1)
    shares = {
        text: float(torch.stack([steps[a, b] for a, b in zip((0, *text), text, strict=False)]).prod())
        for text in product(range(3), repeat=3)
    }

    def chi_squared(found: Counter[tuple[int, ...]]) -> float:
        return sum((found[text] - count * share) ** 2 / (count * share) for text, share in shares.items())

    bound, drafted = 26 + 5 * 52**0.5, outcomes(P, Q, count)
    assert drafted == outcomes(P, None, count)
    assert chi_squared(drafted) < bound < chi_squared(outcomes(Q, None, count)) / 4


def test_a_pass_gives_as_many_tokens_as_were_guessed_and_one_more() -> None:
    """Of one text; of more, fewer are guessed, and none of more than eight."""
    model = WholeModel("tiny-llama-2")
    always_wrong = RecomputedModel(lambda ids: 1e4 * torch.eye(1492)[3:4])
    for guessing, expected in ((model, NUM_GUESSES + 1), (always_wrong, 1)):
        draft = Draft(guessing)
        text = list(LocalWriter("tiny-llama-2", model, (), draft).write([5, 9, 7], 21, SAMPLINGS[1]))
        assert len(text) == 21 and draft.passes.mean == expected
        assert draft.passes.acceptance == float(expected > 1)
    assert [num_guesses(count) for count in (1, 3, 4, 8, 9, 16)] == [4, 4, 3, 1, 0, 0]


def test_of_a_text_longer_than_the_draft_reads_nothing_is_guessed() -> None:
    """Its prompt may have more tokens than the draft's table of positions, too; other texts are guessed as before."""
    model, guesser = WholeModel("tiny-llama-4"), "tiny-gpt2-2"
    draft = local_draft(DraftChoice(model=guesser), "tiny-llama-4", model)
    writer, alone = LocalWriter("tiny-llama-4", model, (), draft), LocalWriter("tiny-llama-4", model)
    assert load_model(guesser).config.n_positions == 128
    for length, is_guessed in ((105, False), (300, False), (104, True)):
        ids = [5, 9, 7] * (length // 3) + [8] * (length % 3)
        assert list(writer.write(ids, 24)) == list(alone.write(ids, 24))
        assert (draft.passes.acceptance is not None) == is_guessed


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layers:4", "The first 4 layers .* It has 4"),
        ("layers:0", "no number of layers"),
        ("layers:", "no number of layers"),
        ("SmolLM2-135M", "It has other tokens. Choose a model of the same tokenizer"),
        ("tiny-bert-2", "It predicts no words"),
        ("tiny-t5-4", "The draft has an encoder, the model has none"),
    ],
)
def test_drafts_that_cannot_guess_are_refused(text: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process and on devices, before weights are read or a device is started."""
    for module, name in ((text_model, "WholeModel"), (text_service, "host_profile"), (text_service, "default_pool")):
        monkeypatch.setattr(module, name, None)
    with pytest.raises(ConfigError, match=said) as refused:
        text_model.load_text_model("tiny-llama-4", text)
    assert refused.value.todo.endswith(".")
    devices = text_service.text_service("tiny-llama-4", load_cluster("pair"), "paced", ends=[], say=str, draft=text)
    with pytest.raises(ConfigError, match=said), devices:
        pass
    assert DraftChoice.read("int4", "tiny-llama-4") == DraftChoice(is_int4=True)
