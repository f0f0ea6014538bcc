"""What models of each kind read and predict, what is cut when it does not fit, and which samples a step takes."""

from dataclasses import replace

import pytest
import torch

from tests.tasks.prompts.characters import CHOICES, FILM, FILMS, QUESTIONS, Characters, codes, encode_prompts
from workbench.core.errors import ConfigError, MissingDataError
from workbench.models.configuration import model_facts
from workbench.models.loading import load_tokenizer
from workbench.tasks.prompts import PROMPTS, PromptSample, collate_prompts, step_indices, training_batch
from workbench.tasks.tokenize import by_length

BOTH_WAYS = {"is_causal": False, "max_length": 80}
CAUSAL = {"is_causal": True, "max_length": 80}


def test_a_causal_model_predicts_a_label_words_first_token_from_the_prompts_last() -> None:
    encoded = encode_prompts(FILMS, FILM, Characters(), **CAUSAL)
    assert encoded.reader == "causal" and encoded.label_ids == codes("tg") and encoded.labels == (0, 1, 0)
    assert encoded.lengths == (11, 15, 17) and encoded.sample_ids == (10, 11, 12) and encoded.max_targets == 1
    batch = collate_prompts(encoded, [1, 0])
    assert batch.input_ids.tolist() == [[*codes("so good It was "), 0], [*codes("bad It was "), 0, 0, 0, 0, 0]]
    assert batch.attention_mask.sum(dim=1).tolist() == [15, 11] and batch.attention_mask[1, :11].all()
    assert batch.positions.tolist() == [[14], [10]] and batch.targets.tolist() == [[ord("g")], [ord("t")]]
    assert (
        batch.labels.tolist() == [1, 0]
        and batch.indices == (1, 0)
        and batch.target_mask.all()
        and batch.decoder_ids is None
    )
    assert {
        getattr(batch, name).dtype for name in ("input_ids", "attention_mask", "targets", "positions", "labels")
    } == {torch.int64}
    assert collate_prompts(encoded, [0], length=20).input_ids.shape == (1, 20)


@pytest.mark.parametrize("lead", [(), (1,)])
@pytest.mark.parametrize(("prompt", "samples"), [(PROMPTS["copa"], CHOICES), (PROMPTS["squad"], QUESTIONS)])
def test_a_causal_model_reads_all_but_the_last_token_of_a_longer_answer(prompt, samples, lead) -> None:
    """Every target stands one behind the position that predicts it."""
    encoded = encode_prompts(samples, prompt, Characters(lead=lead), **CAUSAL)
    batch = collate_prompts(encoded, range(2))
    templates = prompt.candidates or (prompt.answer,)
    for row, sample in enumerate(samples):
        answer = codes(templates[sample.label].format_map(sample.fields))
        reference = (*lead, *codes(prompt.fill(sample.fields)), *answer)
        count, positions = int(batch.target_mask[row].sum()), batch.positions[row]
        assert tuple(batch.targets[row, :count].tolist()) == answer == reference[-count:]
        assert (
            tuple(batch.input_ids[row, : len(reference) - 1].tolist()) == reference[:-1]
            and batch.attention_mask[row].sum() == len(reference) - 1
        )
        assert [reference[at + 1] for at in positions[:count].tolist()] == list(answer)
        assert not batch.targets[row, count:].any() and not positions[count:].any()
    assert not batch.target_mask.all() and batch.targets.shape == batch.positions.shape == (2, encoded.max_targets)


def test_a_decoder_writes_what_its_encoder_was_asked() -> None:
    """Special tokens in front (BART's) are given to the decoder, those behind it has to write."""
    tokenizer = Characters(lead=(1,), trail=(2,), start_id=3)
    [row] = encode_prompts(CHOICES[:1], PROMPTS["copa"], tokenizer, **BOTH_WAYS).rows
    assert row.ids == (1, *codes("It fell because"), 2)
    assert (
        row.targets == (*codes("I did"), 2) and row.decoder_ids == (3, 1, *codes("I did")) and row.first_position == 1
    )
    films = encode_prompts(FILMS, FILM, tokenizer, **BOTH_WAYS)
    batch = collate_prompts(films, [0, 1])
    assert films.label_ids == codes("tg") and batch.targets.tolist() == [[ord("t")], [ord("g")]]
    assert batch.decoder_ids.tolist() == [[3, 1], [3, 1]] and batch.positions.tolist() == [[1], [1]]
    choices = collate_prompts(encode_prompts(CHOICES, PROMPTS["copa"], tokenizer, **BOTH_WAYS), [0, 1])
    assert choices.decoder_ids.tolist()[0] == [3, 1, *codes("I did"), 0] and choices.target_mask.sum(
        dim=1
    ).tolist() == [6, 7]


def test_an_encoders_targets_are_classes() -> None:
    encoded = encode_prompts(FILMS, FILM, Characters(lead=(1,), trail=(2,)), **BOTH_WAYS)
    assert encoded.rows[1].ids == (1, *codes("so good It was "), 2) and encoded.label_ids == ()
    assert collate_prompts(encoded, [0, 1]).targets.tolist() == [[0], [1]]
    with pytest.raises(ConfigError, match=r"multiple_choice was asked for.*writes no words"):
        encode_prompts(CHOICES, PROMPTS["copa"], Characters(), **BOTH_WAYS)


def test_label_words_that_begin_alike_are_named() -> None:
    for tokenizer in (Characters(), Characters(start_id=3)):
        with pytest.raises(ConfigError, match=r"'terrible' and 'tedious' were asked for.*same token"):
            encode_prompts(FILMS, replace(FILM, words=("terrible", "tedious")), tokenizer, **CAUSAL)


def test_a_token_across_the_end_of_the_prompt_is_the_answers() -> None:
    """A tokenizer that joins "s " to one token when something follows."""

    class Joining(Characters):
        def encode(self, texts, pairs=None, *, max_length):
            return [list(codes(text[:-1].replace("s ", "\x05") + text[-1:])) or [0] for text in texts]

    encoded = encode_prompts(
        FILMS, replace(FILM, words=(" terrible", "great"), text="{sentence} It was"), Joining(), **CAUSAL
    )
    assert (
        encoded.label_ids == (5, ord("s"))
        and encoded.rows[0].ids == codes("bad It wa")
        and encoded.rows[0].first_position == 8
    )


def test_a_long_text_is_cut_from_its_left_and_the_question_never() -> None:
    words = PromptSample(sample_id=5, fields={"sentence": "one two three four"}, label=1)
    for length, kept in ((26, "one two three four"), (25, "two three four"), (18, "three four"), (12, "four")):
        encoded = encode_prompts([FILMS[0], words], FILM, Characters(), is_causal=True, max_length=length)
        assert encoded.rows[1].ids == codes(f"{kept} It was ")
    with pytest.raises(
        ConfigError, match=r"A prompt of 26 tokens.*Sample 5 does not fit even with one word of its sentence"
    ):
        encode_prompts([words], FILM, Characters(), is_causal=True, max_length=11)
    # The longest candidate has to fit behind the same prompt, whichever is right.
    encoded = encode_prompts(CHOICES[:1], PROMPTS["copa"], Characters(), is_causal=True, max_length=22)
    assert encoded.rows[0].ids == codes("fell because I di")


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "bart", "bert"])
def test_every_kind_of_model_has_every_task_it_can_do(family: str) -> None:
    tokenizer, facts = load_tokenizer(f"tiny-{family}"), model_facts(f"tiny-{family}")
    for name, samples in (("sst2", FILMS), ("copa", CHOICES), ("squad", QUESTIONS)):
        if family == "bert" and name != "sst2":
            continue
        encoded = encode_prompts(samples, PROMPTS[name], tokenizer, is_causal=facts.is_causal, max_length=64)
        batch = training_batch(encoded, 4, seed=0, step=0)
        width = (batch.input_ids if batch.decoder_ids is None else batch.decoder_ids).shape[1]
        assert batch.positions.max() < width and batch.target_mask.any(dim=1).all()
        assert len(set(encoded.label_ids)) == (0 if name != "sst2" or family == "bert" else 2)
        assert (
            encoded.digest()
            == encode_prompts(samples, PROMPTS[name], tokenizer, is_causal=facts.is_causal, max_length=64).digest()
        )


def test_smollm2_reads_the_prompts_as_whole_texts() -> None:
    """Its label words are one token each, and where the answer begins is where the whole text's tokens part."""
    try:
        tokenizer = load_tokenizer("SmolLM2-135M")
    except MissingDataError:
        pytest.skip("SmolLM2-135M was not fetched")
    for name, words in (("sst2", [" terrible", " great"]), ("boolq", ["No", "Yes"]), ("wnli", ["No", "Yes"])):
        prompt = PROMPTS[name]
        sample = PromptSample(sample_id=0, fields=dict.fromkeys(prompt.fields, "Some text"), label=1)
        encoded = encode_prompts([sample], prompt, tokenizer, **CAUSAL)
        assert [tokenizer.backend.decode([token]) for token in encoded.label_ids] == words
        [reference] = tokenizer.encode([prompt.fill(sample.fields) + prompt.words[1]], max_length=80)
        assert [*encoded.rows[0].ids, encoded.label_ids[1]] == reference
    [row] = encode_prompts(QUESTIONS[:1], PROMPTS["squad"], tokenizer, **CAUSAL).rows
    assert tokenizer.backend.decode(row.targets) == " me\n" and tokenizer.decode(row.ids).endswith("Answer: me")


def test_steps_take_every_sample_once_an_epoch_and_depend_on_nothing_before() -> None:
    taken = [index for step in range(15) for index in step_indices(10, 4, 3, step)]
    epochs = [taken[at : at + 10] for at in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs) and len({tuple(epoch) for epoch in epochs}) == 6
    assert step_indices(10, 4, 3, 14) == taken[-4:] and step_indices(10, 4, 4, 0) != taken[:4]
    assert len(step_indices(3, 8, 0, 1)) == 8
    encoded = encode_prompts(FILMS, FILM, Characters(), **CAUSAL)
    assert training_batch(encoded, 2, 3, 5).indices == tuple(step_indices(3, 2, 3, 5))
    assert list(by_length(encoded.lengths, 2)) == [[2, 1], [0]]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda encoded: step_indices(0, 4, 0, 0), "empty dataset"),
        (lambda encoded: step_indices(4, 0, 0, 0), "batches of 0 samples"),
        (lambda encoded: collate_prompts(encoded, []), "batch of 0 samples"),
        (lambda encoded: collate_prompts(encoded, [0, 2], length=16), "Sample 2 has 17"),
        (lambda encoded: encode_prompts([], FILM, Characters(), **CAUSAL), "empty split"),
    ],
)
def test_batches_that_cannot_be(ask, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ask(encode_prompts(FILMS, FILM, Characters(), **CAUSAL))
