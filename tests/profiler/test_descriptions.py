import pytest

from workbench.core.errors import ConfigError
from workbench.profiler.descriptions import MODELS, ModelDescription, describe


@pytest.mark.parametrize(
    ("name", "params"),
    [
        # As the published checkpoints count them.
        ("T5-Base", 222_903_552),
        ("T5-Large", 737_668_096),
        ("BART-Large", 406_291_456),
        ("BERT-Base", 109_482_240),
        ("BERT-Large", 335_141_888),
        ("DistilBERT", 66_362_880),
        ("all-MiniLM-L6-v2", 22_713_216),
        ("GPT2", 124_439_808),
        ("GPT2-Medium", 354_823_168),
        ("GPT2-Large", 774_030_080),
        ("OPT-1.3B", 1_315_758_080),
        ("OPT-2.7B", 2_651_596_800),
        ("ViT-Huge", 632_404_480),
        ("SmolLM2-135M", 134_515_008),
        ("TinyLlama-1.1B", 1_100_048_384),
        ("Llama2-7B", 6_738_415_616),
    ],
)
def test_parameters_are_those_of_the_published_models(name, params):
    assert MODELS[name].params == params


def test_phi_2_is_counted_with_two_norms_a_layer_and_without_its_heads_bias():
    assert MODELS["Phi-2"].params == 2_779_683_840 + 32 * 2 * 2560 - 51200


def test_the_stack_of_an_encoder_decoder_is_both_sides():
    large = MODELS["T5-Large"]
    assert (large.num_layers, large.stack_layers) == (24, 48)
    assert not large.is_decoder_layer(23)
    assert large.is_decoder_layer(24)
    assert large.layer_params(24) - large.layer_params(0) == 4 * 1024 * 1024 + 1024


def test_an_unknown_model_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'T5-Large'"):
        describe("T5-Larg")


def test_sizes_that_cannot_be_are_refused():
    sizes = {"name": "x", "kind": "decoder", "num_layers": 1, "hidden": 10, "heads": 3, "feed_forward": 4, "vocab": 5}
    with pytest.raises(ConfigError, match="head_dim"):
        ModelDescription(**sizes)
    with pytest.raises(ConfigError, match="num_layers = 0"):
        ModelDescription(**{**sizes, "num_layers": 0, "heads": 2})


@pytest.mark.slow
def test_sizes_agree_with_hugging_face_models():
    """Grouped heads, gates, segments and positions are counted as transformers builds them."""
    transformers = pytest.importorskip("transformers")
    llama = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=50,
        tie_word_embeddings=True,
    )
    ours = ModelDescription(
        name="llama",
        kind="decoder",
        num_layers=2,
        hidden=32,
        heads=4,
        kv_heads=2,
        feed_forward=48,
        vocab=50,
        gated=True,
        biases=False,
        norm_vectors=1,
        final_norm=True,
    )
    assert ours.params == transformers.LlamaForCausalLM(llama).num_parameters()
    t5 = transformers.T5Config(d_model=32, num_layers=2, num_heads=4, d_kv=8, d_ff=48, vocab_size=50)
    ours = ModelDescription(
        name="t5",
        kind="encoder-decoder",
        num_layers=2,
        hidden=32,
        heads=4,
        feed_forward=48,
        vocab=50,
        biases=False,
        norm_vectors=1,
        final_norm=True,
        relative_buckets=32,
    )
    assert ours.params == transformers.T5ForConditionalGeneration(t5).num_parameters()
