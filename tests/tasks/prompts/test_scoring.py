"""Scores by a model that is a function: equal to a naive count of one sequence at a time, calibrated, and F1 of what it
writes."""

import itertools
import math
import random

import pytest
import torch

from tests.tasks.prompts.characters import CHOICES, FILM, FILMS, QUESTIONS, Characters, codes, encode_prompts
from workbench.core.errors import ConfigError, DivergedError
from workbench.tasks.prompts import (
    PROMPTS,
    PromptBatch,
    PromptSample,
    evaluate,
    label_log_likelihoods,
    padding_statistics,
)
from workbench.tasks.prompts.encoding import PromptEncoder

VOCABULARY = 130
FIXED = {"is_causal": True, "max_length": 90}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every split takes several batches."""
    monkeypatch.setattr("workbench.tasks.prompts.scoring.BATCH_SIZE", 2)


def logits_of(prefix: tuple[int, ...]) -> torch.Tensor:
    """Logits (V,) by chance that depend on all that was read."""
    chance = random.Random(repr(prefix))
    return torch.tensor([chance.gauss(0.0, 2.0) for _ in range(VOCABULARY)])


def by_chance(batch: PromptBatch) -> torch.Tensor:
    read = batch.input_ids if batch.decoder_ids is None else batch.decoder_ids
    sources = [() if batch.decoder_ids is None else tuple(row[row > 0].tolist()) for row in batch.input_ids]
    rows = zip(read.tolist(), batch.positions.tolist(), sources, strict=True)
    return torch.stack(
        [torch.stack([logits_of((*source, *ids[: at + 1])) for at in places]) for ids, places, source in rows]
    )


def log_likelihoods(tokens: tuple[int, ...], count: int) -> list[float]:
    """Of the last `count` tokens, each behind all before it."""
    total = len(tokens)
    return [float(logits_of(tokens[:at]).log_softmax(0)[tokens[at]]) for at in range(total - count, total)]


def test_label_words_are_scored_among_the_whole_vocabulary() -> None:
    actual = label_log_likelihoods(by_chance, encode_prompts(FILMS, FILM, Characters(), is_causal=True, max_length=90))
    texts = [codes(FILM.fill(sample.fields)) for sample in FILMS]
    expected = [[log_likelihoods((*text, ord(word)), 1)[0] for word in "tg"] for text in texts]
    torch.testing.assert_close(actual, torch.tensor(expected))
    scores = evaluate(by_chance, FILMS, PromptEncoder(FILM, Characters(), **FIXED))
    chosen = [int(row[1] > row[0]) for row in expected]
    assert list(scores.predictions) == chosen and scores.metric == "accuracy"
    assert scores.value == pytest.approx(sum(one == film.label for one, film in zip(chosen, FILMS, strict=True)) / 3)


@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize("calibration", ["none", "content_free"])
def test_the_candidate_of_the_highest_mean_log_likelihood(decodes: bool, calibration: str) -> None:
    """Calibrated, sums less those behind the bare connective (domain-conditional PMI)."""
    many = tuple(
        PromptSample(sample_id=n, fields={**CHOICES[n % 2].fields, "premise": f"It was {n}"}, label=n % 2)
        for n in range(12)
    )
    tokenizer = Characters(start_id=3) if decodes else Characters()
    copa = PROMPTS["copa"]

    def score(fields: dict, candidate: str) -> float:
        text, ending = codes(copa.fill(fields)), codes(candidate.strip() if decodes else candidate)
        each = log_likelihoods((*text, 3, *ending) if decodes else (*text, *ending), len(ending))
        if calibration == "none":
            return sum(each) / len(each)
        bare = codes(copa.fill({**fields, "premise": ""}))
        return sum(each) - sum(log_likelihoods((*bare, 3, *ending) if decodes else (*bare, *ending), len(ending)))

    expected = [
        int(score(one.fields, f" {one.fields['candidate2']}") > score(one.fields, f" {one.fields['candidate1']}"))
        for one in many
    ]
    evaluation = evaluate(
        by_chance, many, PromptEncoder(copa, tokenizer, is_causal=not decodes, max_length=90), calibration=calibration
    )
    assert list(evaluation.predictions) == expected and 0 < sum(expected) < 12 and evaluation.calibration == calibration


@pytest.mark.parametrize(("calibration", "accuracy"), [("none", 0.5), ("content_free", 1.0), ("mean_prior", 1.0)])
def test_calibration_takes_out_what_a_model_prefers_whatever_it_reads(calibration: str, accuracy: float) -> None:
    """A model that sees good from bad, and likes to say 'great' more than either."""
    films = tuple(
        PromptSample(sample_id=n, fields={"sentence": ("bad", "good")[n % 2] * (1 + n // 2)}, label=n % 2)
        for n in range(8)
    )

    def biased(batch: PromptBatch) -> torch.Tensor:
        logits = torch.zeros(len(batch), 1, VOCABULARY)
        is_good = torch.tensor([ord("g") in ids for ids in batch.input_ids.tolist()])
        is_bad = torch.tensor([ord("b") in ids for ids in batch.input_ids.tolist()])
        logits[:, 0, ord("g")] = 5.0 + 1.0 * is_good
        logits[:, 0, ord("t")] = 1.0 * is_bad
        return logits

    evaluation = evaluate(biased, films, PromptEncoder(FILM, Characters(), **FIXED), calibration=calibration)
    assert evaluation.value == accuracy


@pytest.mark.parametrize("decodes", [False, True])
def test_answers_are_written_token_by_token_to_their_end(decodes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two questions of unequal length and unequally long answers, in one batch; the end is the line's, or a decoder's
    own token."""
    end = "\x02Q" if decodes else "\nQ"
    written = {"Who?": f" the us{end}", "When, and where?": f" never now, here{end}"}
    tokenizer = Characters(start_id=3, trail=(2,)) if decodes else Characters()

    def scripted(batch: PromptBatch) -> torch.Tensor:
        logits = torch.zeros(len(batch), 1, VOCABULARY)
        for row, ids in enumerate(batch.input_ids.tolist()):
            text = "".join(map(chr, filter(None, ids)))
            answer = next(answer for question, answer in written.items() if question in text)
            at = int(batch.positions[row, 0]) if decodes else len(text.partition("Answer:")[2])
            if not decodes:
                assert int(batch.positions[row, 0]) == len(text) - 1
            else:
                assert batch.decoder_ids[row, 1 : at + 1].tolist() == list(codes(answer[:at]))
            logits[row, 0, ord(answer[at])] = 1.0
        return logits

    encoder = PromptEncoder(PROMPTS["squad"], tokenizer, is_causal=not decodes, max_length=120)
    evaluation = evaluate(scripted, QUESTIONS, encoder)
    assert evaluation.predictions == ("the us", "never now, here") and evaluation.metric == "f1"
    assert evaluation.correct == (1.0, 0.5) and evaluation.value == 0.75
    monkeypatch.setattr("workbench.tasks.prompts.scoring.MAX_NEW_TOKENS", 4)
    short = evaluate(scripted, QUESTIONS, encoder)
    assert short.predictions == ("the", "nev")


@pytest.mark.parametrize(
    ("prompt", "samples", "calibration", "message"),
    [
        (FILM, FILMS, "contextual", "'contextual' was asked for"),
        (PROMPTS["copa"], CHOICES, "mean_prior", "different candidates"),
        (PROMPTS["squad"], QUESTIONS, "content_free", "free text"),
        (FILM, (), "none", "score on no samples"),
    ],
)
def test_scores_that_cannot_be(prompt, samples, calibration: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate(by_chance, samples, PromptEncoder(prompt, Characters(), **FIXED), calibration=calibration)


def test_padding_is_the_mean_over_all_batches_there_can_be() -> None:
    lengths = [3, 9, 4, 4, 17, 1, 8]
    for row in padding_statistics(lengths, range(1, 8)):
        longest = [max(batch) for batch in itertools.combinations(lengths, row.batch_size)]
        expected = sum(longest) / len(longest)
        assert row.padded_length == pytest.approx(expected)
        assert row.share == pytest.approx(1 - sum(lengths) / 7 / expected)
    shares = [row.share for row in padding_statistics(lengths, (1, 4, 7))]
    assert shares == sorted(shares) and shares[0] == pytest.approx(0.0)
    for batch_size in (0, 8):
        with pytest.raises(ConfigError, match="There are 7 samples"):
            padding_statistics(lengths, [batch_size])


@pytest.mark.parametrize("kind", ["classification", "multiple_choice", "question_answering"])
def test_a_model_that_gives_no_numbers_gives_no_answers(kind: str) -> None:
    prompt, samples = {
        "classification": (FILM, FILMS),
        "multiple_choice": (PROMPTS["copa"], CHOICES),
        "question_answering": (PROMPTS["squad"], QUESTIONS),
    }[kind]
    with pytest.raises(DivergedError, match="not numbers"):
        evaluate(
            lambda batch: torch.full_like(by_chance(batch), math.nan),
            samples,
            PromptEncoder(prompt, Characters(), is_causal=True, max_length=900),
        )
