"""An encoder-decoder, cut anywhere, gives the numbers of the whole Hugging Face model; so do the variants of each
family."""

import pytest
import torch

from workbench.core.errors import ConfigError
from workbench.models import loading
from workbench.models.configuration import model_config, model_facts
from workbench.models.loading import load_language_model_head, load_stack, load_stage

from .helpers import TARGET_LENGTH, batch_for, check_embeddings
from .test_stack import reference

# tiny models have 3 encoder and 3 decoder layers: cuts within each, between both, and stages that reach over the
# border.
SPLITS = ([6], [3, 3], [2, 2, 2], [1, 4, 1], [4, 2], [1] * 6)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.fixture(scope="module", params=["t5", "bart"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def stack(family):
    return load_stack(f"tiny-{family}")


def run(stack, batch, split, decoder_ids):
    """Return the last stage's output and all taps."""
    hidden, taps, start = batch.input_ids, [], 0
    for layers in split:
        stage = stack.stage(start, start + layers)
        hidden, new = stage(hidden, batch.attention_mask, decoder_ids)
        start += layers
        taps += new
        length = batch.attention_mask.shape[1]
        assert hidden.shape == (
            len(batch.labels),
            length + (TARGET_LENGTH if start > stack.num_encoder_layers else 0),
            32,
        )
    return hidden, taps


@pytest.mark.parametrize("lengths", [(11, 7, 2), (9,)], ids=["padded", "full"])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_stages_equal_the_whole_model(family, stack, split, lengths):
    batch = batch_for(stack, lengths)
    with torch.no_grad():
        expected = reference(f"tiny-{family}")(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            decoder_input_ids=batch.decoder_ids,
            output_hidden_states=True,
        )
    hidden, taps = run(stack, batch, split, batch.decoder_ids)
    assert not hidden.requires_grad and len(taps) == stack.num_taps == 8
    length, real = batch.attention_mask.shape[1], batch.attention_mask.bool()
    close(hidden[:, :length][real], expected.encoder_last_hidden_state[real])
    close(hidden[:, length:], expected.last_hidden_state)
    for ours, theirs in zip(taps[:4], expected.encoder_hidden_states, strict=True):
        close(ours[real], theirs[real])
    for ours, theirs in zip(taps[4:], expected.decoder_hidden_states, strict=True):
        close(ours, theirs)


def test_without_a_target_the_decoder_reads_its_start_token(stack):
    batch = batch_for(stack)
    start = torch.full((8, 1), stack.decoder_start_id)
    states, taps = stack(batch.input_ids, batch.attention_mask)
    expected, _ = stack(batch.input_ids, batch.attention_mask, start)
    assert states.shape == (8, 1, 32) and torch.equal(states, expected) and torch.equal(taps[-1], states)


def saved(folder, name, maker="AutoModel", **changes):
    """Save a random model of a changed configuration and return the Hugging Face model."""
    import transformers

    config = model_config(name)
    for key, value in changes.items():
        setattr(config, key, value)
    config = type(config).from_dict(config.to_dict())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, maker).from_config(config, attn_implementation="sdpa").eval()
    model.save_pretrained(folder)
    loading.load_tokenizer(name).backend.save(str(folder / "tokenizer.json"))
    return model


def load_cut(folder):
    """Return a function that runs a folder's model in three stages, each loaded alone."""
    stages = [load_stage(str(folder), *bounds) for bounds in ((0, 2), (2, 5), (5, 6))]

    def call(ids, mask, decoder_ids=None):
        hidden = ids
        for stage in stages:
            hidden, taps = stage(hidden, mask, decoder_ids)
        return taps[-1]

    return call


def test_the_facts_of_a_gated_t5_with_an_own_head_and_narrow_attention(tmp_path):
    """T5 v1.1: gated feed-forward, a head that is not the word embedding, heads x size != d (see test_folders)."""
    changes = {"feed_forward_proj": "gated-gelu", "is_gated_act": True, "dense_act_fn": "gelu_new"}
    saved(tmp_path, "tiny-t5", "AutoModelForSeq2SeqLM", d_kv=4, tie_word_embeddings=False, **changes)
    facts = model_facts(str(tmp_path))
    assert facts.is_gated and facts.num_heads == 4 and facts.feed_forward_size == 64
    check_embeddings(facts, load_stack(str(tmp_path)))


@pytest.mark.parametrize("name", ["tiny-t5", "tiny-bart"])
def test_the_language_model_head(tmp_path, name):
    model = saved(tmp_path, name, "AutoModelForSeq2SeqLM")
    if name == "tiny-bart":
        model.final_logits_bias.normal_()
        model.save_pretrained(tmp_path)
    stack = load_stack(str(tmp_path))
    batch = batch_for(stack)
    states, _ = stack(batch.input_ids, batch.attention_mask, batch.decoder_ids)
    with torch.no_grad():
        expected = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, decoder_input_ids=batch.decoder_ids
        ).logits
    for head in (
        stack.language_model_head,
        load_language_model_head(str(tmp_path)),
        load_language_model_head(str(tmp_path)),
    ):
        close(head(states), expected)
    tiny = load_language_model_head(name)
    assert not tiny.weight.requires_grad and tiny.weight.shape == (model.config.vocab_size, 32)
    assert (tiny.scale == 32**-0.5) == (name == "tiny-t5")
    assert load_language_model_head(str(tmp_path), torch.bfloat16)(states.bfloat16()).dtype == torch.bfloat16


def test_opt_350m_projects_its_words_and_normalises_behind(tmp_path):
    model = saved(tmp_path, "tiny-opt", do_layer_norm_before=False, word_embed_proj_dim=16)
    stack = load_stack(str(tmp_path))
    assert stack.final is None and set(stack.embedding) == {"words", "positions", "project_in"}
    batch = batch_for(stack)
    with torch.no_grad():
        expected = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    real = batch.attention_mask.bool()
    hidden = load_cut(tmp_path)(batch.input_ids, batch.attention_mask)
    close(model.decoder.project_out(hidden)[real].detach(), expected[real])
    check_embeddings(model_facts(str(tmp_path)), stack)


def test_made_up_inputs_fit_every_stage():
    for name in ("tiny-t5", "tiny-vit", "tiny-llama"):
        stack = load_stack(name)
        for bounds in ((0, 3), (1, 4), (3, 6), (4, 6), (0, 6)):
            stage = stack.stage(*bounds)
            output, taps = stage(*stage.make_inputs(2, 17, 3))
            owned = [one for one in (stage.embedding, stage.decoder_embedding) if one is not None]
            assert output.shape[0] == 2 and len(taps) == len(stage.layers) + len(owned)


def test_what_cannot_be_had():
    with pytest.raises(ConfigError, match="'tiny-t5-1'"):
        load_stack("tiny-t5-1")
