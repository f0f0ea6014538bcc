"""A frozen model whose layers are read each time they run computes the same, and holds one of them at a time."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.test_random_weights import NAME, small  # noqa: F401  # a fixture
from workbench.assets.fetch import asset_path
from workbench.core.job import Job
from workbench.methods.common.folder import model_digest
from workbench.methods.p_rge.zeroth_order import TrainableConfig, loading
from workbench.methods.pac_plus import epochs
from workbench.methods.pac_plus.epochs import initial_adapter
from workbench.methods.pac_plus.method import PacPlus
from workbench.methods.training import backpropagation
from workbench.models import hub, layers_on_disk
from workbench.models.configuration import model_config
from workbench.models.layers_on_disk import load_frozen
from workbench.models.loading import load_stack
from workbench.models.quantization import QuantizationConfig, held_bytes, quantize
from workbench.models.random_weights import write_random
from workbench.models.techniques import TechniqueConfig, TechniqueStage

FLOAT = QuantizationConfig(storage="float32")


def in_memory(stack) -> list[int]:
    """Return the layers whose matrices take memory."""
    tensors = [[one for one in (*layer.parameters(), *layer.buffers()) if one.ndim > 1] for layer in stack.layers]
    return [index for index, tensor in enumerate(tensors) if all(one.is_contiguous() for one in tensor)]


@pytest.mark.parametrize("storage", ["float32", "nf4"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5"])
def test_passes_are_those_of_the_whole_model_with_one_layer_at_a_time(small, monkeypatch, family, storage):  # noqa: F811
    small(family)
    write_random(NAME, lambda line: None)
    config = QuantizationConfig(storage=storage)
    reference = quantize(load_stack(NAME, with_head=family in ("llama", "gpt2")), config)
    ids, mask = torch.randint(0, 50, (2, 8)), torch.ones(2, 8, dtype=torch.int64)
    expected, _ = reference(ids, mask)
    monkeypatch.setattr(layers_on_disk, "KEPT_BYTES", held_bytes(reference.layers[0]))
    stack = load_frozen(NAME, config, with_head=reference.language_model_head is not None)
    values = [0] if family != "t5" else list(range(reference.num_layers))  # its layers share a table
    seen = list[list[int]]()
    for layer in stack.layers:
        layer.register_forward_pre_hook(lambda *call: seen.append(in_memory(stack)))
    for _ in range(2):
        assert in_memory(stack) == values
        assert torch.equal(stack(ids, mask)[0], expected)
    if family != "t5":
        assert seen == 2 * [[*{0: 0, number: number}] for number in range(reference.num_layers)]
    if reference.language_model_head is not None:
        assert stack.language_model_head is not None
        assert torch.equal(stack.language_model_head(expected), reference.language_model_head(expected))


@pytest.mark.parametrize("technique", ["lora", "adapters", "serial", "parallel"])
def test_what_is_trained_beside_them_is_kept(small, monkeypatch, technique):  # noqa: F811
    """LoRA puts matrices into layers without weights; Houlsby's adapters train norms."""
    small("llama")
    write_random(NAME, lambda line: None)
    monkeypatch.setattr(layers_on_disk, "KEPT_BYTES", 0)
    config = TechniqueConfig(technique=technique, hidden_size=32, num_layers=4)
    ids, mask = torch.randint(0, 50, (2, 8)), torch.ones(2, 8, dtype=torch.int64)
    outputs = []
    for stack in (load_stack(NAME), load_frozen(NAME, FLOAT)):
        model = TechniqueStage(stack.stage(0, 4), config).eval()
        with torch.no_grad():
            for parameter in model.trained().values():
                parameter.fill_(0.01)
            outputs.append(model(ids, mask)[0])
    torch.testing.assert_close(*outputs)
    assert in_memory(stack) == []


def test_a_run_of_pac_plus_reads_no_whole_model_on_the_laptop(request, monkeypatch):
    reviews = asset_path("vader-ratings")
    request.getfixturevalue("small")("llama")
    shape = model_config("tiny-llama-4").to_dict() | {"vocab_size": 30522}  # the tokenizer's
    monkeypatch.setattr(hub, "known_shapes", lambda: {"small": shape})
    folder = write_random(NAME, lambda line: None)
    (folder.parent / reviews.name).symlink_to(reviews)
    options = {"backbone_dtype": "nf4"}
    job = Job(method="pac_plus", model=NAME, task="sentiment", options=options, max_length=8, train_samples=8)
    method = PacPlus()
    prepared = method.prepared(job)
    plain = initial_adapter(prepared, quantize(load_stack(NAME), prepared.quantization)).state_dict()
    monkeypatch.setattr(layers_on_disk, "KEPT_BYTES", 0)
    for place in (epochs.__name__, backpropagation.__name__, layers_on_disk.__name__):
        monkeypatch.setattr(f"{place}.load_stack", lambda *name, **settings: pytest.fail("the whole model"))
    stack = method.backbone(prepared)
    assert in_memory(stack) == []
    state = initial_adapter(prepared, stack).state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in plain.items())


@pytest.mark.parametrize("family", ["llama", "t5", "bert"])
def test_p_rges_quantized_model_is_read_layer_by_layer(small, monkeypatch, family):  # noqa: F811
    small(family)
    write_random(NAME, lambda line: None)
    config = QuantizationConfig(storage="int8")
    reference = quantize(load_stack(NAME, with_head=True), config)
    monkeypatch.setattr(loading, "load_stack", lambda *name, **settings: pytest.fail("the whole model"))
    model = loading.load_causal_model(NAME, TrainableConfig(rank=2, num_outputs=2), quantization=config)
    mine, theirs = model.backbone.state_dict(), reference.stage(0, reference.num_layers).state_dict()
    assert held_bytes(model.backbone) >= held_bytes(reference.layers)
    shared = mine.keys() & theirs.keys()  # LoRA-FA moves the projections that it changes
    assert len(shared) > reference.num_layers and all(torch.equal(mine[name], theirs[name]) for name in shared)
    assert (model.head is None) == (reference.language_model_head is None)


def test_a_models_digest_follows_its_weights(small):  # noqa: F811
    small("llama")
    folder = write_random(NAME, lambda line: None)
    before = model_digest(NAME)
    assert before == model_digest(NAME)
    shard = next(iter(sorted(folder.glob("*.safetensors"))))
    tensors = load_file(shard)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, shard)
    assert model_digest(NAME) != before
