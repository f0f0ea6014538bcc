"""A split backbone gives the numbers of the whole Hugging Face model."""

import pytest
import torch
import torch.nn.functional as functional

from workbench.core.errors import ConfigError
from workbench.models.configuration import model_config, model_from_config
from workbench.models.families import FAMILIES
from workbench.models.loading import load_stack, load_tokenizer
from workbench.models.stack import LayerStack

TEXT_FAMILIES = [name for name, family in FAMILIES.items() if not (family.decoder or family.reads_images)]
SPLITS = ([6], [3, 3], [2, 2, 1, 1], [1, 5], [1] * 6)


def reference(name):
    """Return the Hugging Face model itself, with the same random weights as load_stack."""

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model_from_config(model_config(name)).eval()


def padded_batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 1000, (3, 11), generator=generator)
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[1, 7:] = 0
    mask[2, 2:] = 0
    return ids * mask, mask


@pytest.mark.parametrize(
    ("family", "split", "is_padded"),
    [
        *(("bert", split, True) for split in SPLITS),
        *((name, [1, 3, 2], True) for name in TEXT_FAMILIES),
        *((name, [3, 3], False) for name in TEXT_FAMILIES),
    ],
    ids=str,
)
def test_stages_equal_the_whole_model(family, split, is_padded):
    name = f"tiny-{family}"
    ids, mask = padded_batch()
    if not is_padded:
        ids, mask = ids[:1], mask[:1]
    with torch.no_grad():
        expected = reference(name)(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    stack = load_stack(name)
    hidden, taps, start = ids, [], 0
    for layers in split:
        stage = stack.stage(start, start + layers)
        hidden, new = stage(hidden, mask)
        taps += new
        start += layers
    assert not hidden.requires_grad
    real = mask.bool()
    torch.testing.assert_close(hidden[real], expected.last_hidden_state[real], rtol=1e-5, atol=1e-6)
    assert len(taps) == len(expected.hidden_states) == stack.num_taps == 7
    actual, states = ([one[real] for one in each] for each in (taps, expected.hidden_states))
    torch.testing.assert_close(actual, states, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("split", [[1] * 6, [2, 4], [6]], ids=str)
def test_pictures(split):
    tokenizer, stack, model = load_tokenizer("tiny-vit"), load_stack("tiny-vit"), reference("tiny-vit")
    images = [bytes(range(start, start + 64)) for start in (0, 90, 180)]
    tokens = torch.tensor(
        [[list(token) for token in image] for image in tokenizer.encode_images(images)], dtype=torch.uint8
    )
    pixels = torch.tensor([list(image) for image in images]).view(3, 1, 8, 8) / 127.5 - 1
    with torch.no_grad():
        expected = model(pixels, output_hidden_states=True)
    hidden, taps, start = tokens, [], 0
    for layers in split:
        hidden, new = stack.stage(start, start + layers)(hidden, torch.ones(3, 17))
        taps, start = taps + new, start + layers
    torch.testing.assert_close(hidden, expected.last_hidden_state, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(taps[:-1], expected.hidden_states, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    # Batches of the runtime are padded to a multiple of eight tokens.
    padded, mask = (
        torch.nn.functional.pad(tokens, (0, 0, 0, 7), value=9),
        torch.nn.functional.pad(torch.ones(3, 17), (0, 7)),
    )
    torch.testing.assert_close(stack(padded, mask)[0][:, :17], expected.last_hidden_state, rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="'digits'"):
        stack(*padded_batch())


@pytest.mark.parametrize(
    "texts",
    [("a cat", "no dog"), ("a [SEP] cat", "no dog"), ("a cat", "[SEP] no [SEP] dog"), ("", "no dog"), ("[SEP]", "")],
)
def test_token_types_of_a_pair_are_those_of_the_tokenizer(texts):
    tokenizer, stack, model = load_tokenizer("tiny-bert"), load_stack("tiny-bert"), reference("tiny-bert")
    actual = torch.tensor(tokenizer.encode([texts[0]], [texts[1]], max_length=32))
    encoding = tokenizer.backend.encode(*texts)
    ids, types = torch.tensor([encoding.ids]), torch.tensor([encoding.type_ids])
    with torch.no_grad():
        expected = model(input_ids=ids, token_type_ids=types).last_hidden_state
        untyped = model(input_ids=ids).last_hidden_state
    hidden, _ = stack(actual, torch.ones_like(actual))
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(expected, untyped, atol=1e-4)


def test_a_stage_owns_only_its_layers():
    stack = load_stack("tiny-llama")
    first, last = stack.stage(0, 2), stack.stage(2, 6)
    assert {name.split(".")[1] for name in first.state_dict() if name.startswith("layers")} == {"0", "1"}
    assert {name.split(".")[1] for name in last.state_dict() if name.startswith("layers")} == {"2", "3", "4", "5"}
    assert first.final is None and last.embedding is None and last.final is not None
    assert not any(parameter.requires_grad for parameter in stack.parameters())


@pytest.mark.parametrize(("start", "stop"), [(0, 7), (3, 3), (-1, 2)])
def test_a_stage_that_is_not_there(start, stop):
    with pytest.raises(ConfigError, match="has 6"):
        load_stack("tiny-bert").stage(start, stop)


@pytest.mark.parametrize("family", ["bert", "distilbert", "gpt2", "opt", "bart"])
def test_padding_may_go_beyond_the_last_position(family):

    config = model_config(f"tiny-{family}-2")
    config.max_position_embeddings = 10
    with torch.random.fork_rng():
        torch.manual_seed(0)
        stack = LayerStack(model_from_config(config).eval())
    ids, mask = padded_batch()
    targets = torch.randint(4, 1000, (3, 3), generator=torch.Generator().manual_seed(2)) if family == "bart" else None
    mask[0, 10:] = 0
    longer = [functional.pad(one, (0, 5)) for one in (ids, mask)]
    with torch.no_grad():
        expected = stack(ids[:, :10], mask[:, :10], targets)[0]
        actual = stack(*longer, targets)[0]
    for row, length in enumerate(mask.sum(dim=1).tolist()):
        inside = slice(None) if family == "bart" else slice(length)
        torch.testing.assert_close(actual[row, inside], expected[row, inside])
    longer[1][0, 10] = 1
    with pytest.raises(ConfigError, match=r"A text of 11 tokens was given to the model\. It has 10 positions"):
        stack(*longer, targets)
