"""Names of models: embedded, tiny, folders, the hub; and what is said when they cannot be had."""

import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.waiting import LIMIT_S
from workbench.core.catalogue import load_cluster
from workbench.core.errors import ConfigError, MissingDataError, WriteError
from workbench.core.job import Job
from workbench.experiment import run
from workbench.methods.common.scaling import describe_facts
from workbench.models import configuration
from workbench.models.configuration import model_config, model_facts, model_from_config
from workbench.models.families import FAMILIES
from workbench.models.loading import load_model, load_stack, load_stage, load_tokenizer
from workbench.models.partial_loading import parameters_on_meta
from workbench.models.stored_tensors import MISSING_WEIGHTS, header_bytes, made_up_weights
from workbench.profiler.descriptions import MODELS

from .helpers import batch_for, check_embeddings


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_agree_with_the_weights(family):
    name = f"tiny-{family}-4"
    facts, stack = model_facts(name), load_stack(name)
    assert (facts.num_layers, facts.hidden_size, facts.num_heads, facts.feed_forward_size) == (4, 32, 4, 64)
    check_embeddings(facts, stack)
    own = FAMILIES[family]
    assert facts.is_causal == stack.is_causal == own.is_causal
    assert facts.is_gated == bool({"gate", "gate_up"}.intersection(own.weights))
    assert facts.num_encoder_layers == stack.num_encoder_layers == (2 if own.decoder else None)
    if family == "vit":
        assert facts.max_length == 17 and facts.vocabulary_size == 0
    else:
        assert facts.vocabulary_size == load_tokenizer(name).backend.get_vocab_size()


def test_a_folder_that_torch_cannot_make_is_not_the_model_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_home(config: object, **settings: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/nowhere")

    monkeypatch.setattr("transformers.AutoModel.from_config", without_home)
    with pytest.raises(WriteError, match=r"'tiny-bert-2' was asked for.*'/nowhere'\. Set WORKBENCH_CACHE"):
        configuration.model_from_config(model_config("tiny-bert-2"), "tiny-bert-2")


def test_tiny_models_are_seeded_and_leave_the_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, other = load_stack("tiny-llama"), load_stack("tiny-llama")
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_folder_loads_as_itself(family, tmp_path):

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_from_config(model_config(f"tiny-{family}-2"))
    model.save_pretrained(tmp_path)
    tokenizer = save_tokenizer(family, tmp_path)
    stack, tiny = load_stack(str(tmp_path)), load_stack(f"tiny-{family}-2")
    batch = batch_for(tiny)
    inputs = batch.input_ids, batch.attention_mask, batch.decoder_ids
    torch.testing.assert_close(stack(*inputs)[0], tiny(*inputs)[0])
    result = load_tokenizer(str(tmp_path))
    assert (
        result == tokenizer
        if family == "vit"
        else (result.joins_pairs, result.has_token_types, result.start_id)
        == (
            tokenizer.joins_pairs,
            tokenizer.has_token_types,
            tokenizer.start_id,
        )
    )
    assert model_facts(str(tmp_path)).num_layers == 2
    half = load_stack(str(tmp_path), torch.bfloat16)
    assert half(*inputs)[0].dtype == torch.bfloat16


def save_tokenizer(family, folder):
    tokenizer = load_tokenizer(f"tiny-{family}")
    if family != "vit":
        tokenizer.backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text('{"pad_token": "[PAD]", "sep_token": {"content": "[SEP]"}}')
    return tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_is_loaded_without_the_other_layers(family, tmp_path, monkeypatch):
    from workbench.models import loading

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model_from_config(model_config(f"tiny-{family}")).save_pretrained(tmp_path)
    save_tokenizer(family, tmp_path)
    monkeypatch.setattr(loading, "load_stack", lambda *args: pytest.fail("the whole model was loaded"))
    stack = load_stack(f"tiny-{family}")
    batch = batch_for(stack)
    reference = stack(batch.input_ids, batch.attention_mask, batch.decoder_ids)
    monkeypatch.setattr(loading, "load_tokenizer", lambda name: pytest.fail("a stage needs no tokenizer"))
    hidden, taps = batch.input_ids, []
    for start, stop in ((0, 2), (2, 5), (5, 6)):
        stage = loading.load_stage(str(tmp_path), start, stop)
        assert not any(tensor.is_meta or tensor.requires_grad for tensor in (*stage.parameters(), *stage.buffers()))
        assert len(list(stage.parameters())) == len(list(stack.stage(start, stop).parameters()))
        hidden, new = stage(hidden, batch.attention_mask, batch.decoder_ids)
        taps += new
    torch.testing.assert_close(taps, reference[1])
    inner = loading.load_stage(str(tmp_path), 2, 5, with_embedding=True)
    torch.testing.assert_close(inner.embed(batch.input_ids, batch.attention_mask), taps[0])
    half = loading.load_stage(str(tmp_path), 0, 5, torch.bfloat16)
    assert half(batch.input_ids, batch.attention_mask, batch.decoder_ids)[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "name", ["nonsense", "tiny-mamba", "tiny-bert-0", "tiny-bert-six", "two/many/slashes", "spaces are/not names", ""]
)
def test_unknown_names_list_the_known_ones(name):
    with pytest.raises(ConfigError, match="all-MiniLM-L6-v2") as caught:
        load_stack(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["bert-base-uncased", "someone/some-model"])
def test_without_the_hub_the_answer_comes_without_retries(name, monkeypatch, tmp_path):
    """A retry would sleep between its attempts, for minutes."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits to try again"))
    for load in (load_stack, load_tokenizer, model_facts):
        with pytest.raises(MissingDataError, match="cannot be reached"):
            load(name)


def test_embedded_models_that_were_not_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    with pytest.raises(MissingDataError, match="python -m workbench fetch"):
        load_stack("all-MiniLM-L6-v2")


@pytest.mark.parametrize(
    ("shape", "described"),
    [
        ("llama-7b", "Llama2-7B"),
        ("llama-1b", "TinyLlama-1.1B"),
        ("phi-2", "Phi-2"),
        ("gpt2-medium", "GPT2-Medium"),
        ("opt-1.3b", "OPT-1.3B"),
        ("mbert", "BERT-Base"),
        ("t5-large", "T5-Large"),
        ("bart-large", "BART-Large"),
        ("vit-huge", "ViT-Huge"),
    ],
)
def test_shapes_are_those_of_the_papers_models(shape, described):
    """As the studies describe them; multilingual BERT is BERT-Base with more words."""
    result, expected = describe_facts(model_facts(f"shape:{shape}")), MODELS[described]
    same = ("kind", "num_layers", "hidden", "heads", "query_width", "kv_width", "feed_forward", "gated")
    assert [getattr(result, name) for name in same] == [getattr(expected, name) for name in same]
    assert result.vocab == (119_547 if shape == "mbert" else expected.vocab)


def test_a_configuration_is_planned_without_weights(tmp_path):
    """On the host's devices, too, costs are computed; whatever needs weights is refused in one line."""
    model_config("tiny-qwen3-4").save_pretrained(tmp_path)
    save_tokenizer("qwen3", tmp_path)
    shape = str(tmp_path / "config.json")
    job = Job(method="fine_tuning", model=shape, train_samples=64, validation_samples=8, test_samples=8)
    report = run(job, load_cluster("laptop"), "simulate")
    assert report.plan.stages[-1].stop == 4
    assert any("a shape without weights" in note for note in report.notes)
    assert model_facts(shape) == replace(model_facts("tiny-qwen3-4"), name=shape)
    for refused in (
        lambda: run(job, load_cluster("laptop")),
        lambda: load_stack(shape),
        lambda: load_stage(shape, 0, 1),
    ):
        with pytest.raises(ConfigError, match="a configuration without weights") as caught:
            refused()
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"Known are shape:llama-7b.*Did you mean 'shape:phi-2'"):
        model_facts("shape:phi2")


def test_a_real_device_has_the_tensors_sent_that_it_reads(tmp_path, monkeypatch):
    base, device, sent, requests = tmp_path / "base", tmp_path / "device", [], []
    load_model("tiny-bert-2").save_pretrained(base)
    save_tokenizer("bert", base)
    device.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (device / name).write_bytes((base / name).read_bytes())
    content = (base / "model.safetensors").read_bytes()
    (device / "model.safetensors.header").write_bytes(content[: header_bytes(base / "model.safetensors")])

    def fetch(paths):
        requests.append(len(paths))
        for path in paths:
            sent.append(path)
            path.parent.mkdir(exist_ok=True)
            begin, end = map(int, path.name.split("-")) if "-" in path.name else (0, len(content))
            path.write_bytes(content[begin:end])

    monkeypatch.setattr(MISSING_WEIGHTS, "fetch", fetch)
    with made_up_weights():
        assert load_stack(str(device)).num_layers == 2 and load_stage(str(device), 0, 1).layers
    assert not sent
    expected = load_stage(str(base), 1, 2).state_dict()
    for _ in range(2):
        actual = load_stage(str(device), 1, 2).state_dict()
        assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    assert requests == [len(sent)] == [len(list(load_stage(str(base), 1, 2).parameters()))]  # all at once
    actual, expected = (load_stack(str(folder)).state_dict() for folder in (device, base))
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    assert sent[-1].name == "model.safetensors"


def test_two_threads_that_load_do_not_disturb_each_other():
    """A device loads a stage ahead while it trains; what another thread makes meanwhile has memory."""
    inside, leave, results = threading.Event(), threading.Event(), []

    def load():
        with parameters_on_meta():
            inside.set()
            leave.wait(LIMIT_S)
            results.append(nn.Linear(2, 2))

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait(LIMIT_S)
    outside = nn.Linear(2, 2)
    leave.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert [one.weight.is_meta for one in (*results, outside, nn.Linear(2, 2))] == [True, True, False, False]
