"""Model folders: what loads gives transformers' numbers on every path; what is spoiled is refused on every path, in one
sentence."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.sharding.builders import Case, hybrid, model_of, run_plan
from workbench.core.errors import WorkbenchError
from workbench.methods.p_rge.zeroth_order import TrainableConfig, load_causal_model
from workbench.models.configuration import model_config, model_facts
from workbench.models.families import FAMILIES
from workbench.models.loading import load_stack, load_stage, load_tokenizer
from workbench.models.sharding import ModelShard, model_layout, open_weights, shard_spec
from workbench.models.tokenizer import tiny_tokenizer

LAYERS = 4
Spoil = Callable[[Path], object]


def write(folder: Path, family: str, **changes: Any) -> Path:
    """Write a lively model of a changed tiny configuration, and its tokenizer."""
    config = model_config(f"tiny-{family}-{LAYERS}")
    for field, value in changes.items():
        setattr(config, field, value)
    if family == "t5":
        config.__post_init__()
    own = FAMILIES[family]
    model_of(config, 1).save_pretrained(folder)
    if not own.reads_images:
        tiny_tokenizer(is_causal=own.is_causal).backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"sep_token": "[SEP]", "pad_token": "[PAD]"}))
    return folder


def tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Spoil:
    """Return what rewrites the folder's weights."""

    def spoil(folder: Path) -> None:
        path = folder / "model.safetensors"
        save_file(change(load_file(path)), path, metadata={"format": "pt"})

    return spoil


def settings(**changes: Any) -> Spoil:
    """Return what rewrites the folder's configuration."""

    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def content(name: str, data: bytes) -> Spoil:
    """Return what replaces a file."""
    return lambda folder: (folder / name).write_bytes(data)


def header(data: bytes) -> Spoil:
    """Return what replaces the weights by a header and 40 bytes of numbers."""
    return content("model.safetensors", struct.pack("<Q", len(data)) + data + bytes(40))


def another(name: str, like: str) -> Spoil:
    """Return what adds a tensor of the shape of another one."""
    return tensors(
        lambda found: found | {name: torch.randn(next(found[key].shape for key in found if key.endswith(like)))}
    )


def whole(name: str, ids: Tensor, mask: Tensor, targets: Tensor | None) -> Tensor:
    return load_stack(name)(ids, mask, targets)[0]


def staged(name: str, ids: Tensor, mask: Tensor, targets: Tensor | None) -> Tensor:
    hidden = ids
    for start in (0, LAYERS // 2):
        hidden, _ = load_stage(name, start, start + LAYERS // 2)(hidden, mask, targets)
    return hidden if targets is None else hidden[:, ids.shape[1] :]


def sharded(name: str, ids: Tensor, mask: Tensor, targets: Tensor | None, what: Any = "hidden") -> Tensor:
    layout, source = model_layout(name), open_weights(name)
    case = Case(model=None, layout=layout, ids=ids, decoder_ids=targets)
    shape = layout.stacks[0]
    plan = hybrid(case, (0, shape.num_units), (shape.columns - 9, 9), (0.4, 0.6), (1, 2))
    specs = [shard_spec(plan, position, layout.stacks) for position in range(2)]
    shards = [ModelShard(layout, spec, source) for spec in specs]
    found = []
    for number, length in enumerate(mask.sum(1).tolist()):  # single-shot inference knows no padding
        one = run_plan(
            plan, shards, ids[None, number, :length], None if targets is None else targets[None, number], what=what
        )
        found.append(one if targets is not None else torch.nn.functional.pad(one, (0, 0, 0, ids.shape[1] - length)))
    return torch.cat(found)


def forward_only(name: str, ids: Tensor, mask: Tensor, targets: Tensor | None) -> Tensor:
    """The last stage's layers and head, as forward-only training loads them."""
    stack = load_stack(name)
    model = load_causal_model(name, TrainableConfig(technique="lora_fa", rank=2), span=(LAYERS // 2, LAYERS))
    assert model.head is not None
    return model.head(stack(ids, mask, targets)[0])


PATHS = {"whole": whole, "staged": staged, "sharded": sharded}


def reference(folder: Path, ids: Tensor, mask: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return transformers' last hidden states, and its logits if the model has a head."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    family = FAMILIES[json.loads((folder / "config.json").read_text())["model_type"]]
    maker = AutoModelForSeq2SeqLM if family.decoder else AutoModelForCausalLM if family.is_causal else AutoModel
    model = maker.from_pretrained(folder, attn_implementation="sdpa").eval()
    given: dict[str, Any] = {"attention_mask": mask, "output_hidden_states": True}
    if family.reads_images:
        pixels = ids[:, 1:].reshape(-1, 4, 4, 1, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(-1, 1, 8, 8)
        return model(pixels / 127.5 - 1).last_hidden_state, None
    if targets is not None:
        found = model(input_ids=ids, decoder_input_ids=targets, **given)
        return found.decoder_hidden_states[-1], found.logits
    found = model(input_ids=ids, **given)
    return found.hidden_states[-1], found.logits if family.is_causal else None


def batch_for(family: str) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(5)
    if family == "vit":
        return (
            torch.randint(256, (2, 17, 4), generator=generator, dtype=torch.uint8),
            torch.ones(2, 17, dtype=torch.int64),
            None,
        )
    ids, targets = (
        torch.randint(4, 1000, (2, 9), generator=generator),
        torch.randint(4, 1000, (2, 5), generator=generator),
    )
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return ids * mask, mask, targets if FAMILIES[family].decoder else None


WINDOWS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
ODD: dict[str, tuple[str, dict[str, Any], Spoil | None]] = {
    **{f"{family} as it is": (family, {}, None) for family in FAMILIES},
    "bert: gelu_new, wide": ("bert", {"hidden_act": "gelu_new", "intermediate_size": 200}, None),
    "bert: one token type": ("bert", {"type_vocab_size": 1}, None),
    "gpt2: untied": ("gpt2", {"tie_word_embeddings": False}, None),
    "gpt2: tied, a head of its own in the file": ("gpt2", {}, another("lm_head.weight", "wte.weight")),
    "gpt2: not scaled": ("gpt2", {"scale_attn_weights": False}, None),
    "gpt2: scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"}, None),
    "llama: tied": ("llama", {"tie_word_embeddings": True}, None),
    "llama: untied": ("llama", {"tie_word_embeddings": False}, None),
    "llama: tied, a head of its own in the file": (
        "llama",
        {"tie_word_embeddings": True},
        another("lm_head.weight", "embed_tokens.weight"),
    ),
    "llama: without groups, long positions": (
        "llama",
        {
            "num_key_value_heads": 4,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
            | {"original_max_position_embeddings": 8},
        },
        None,
    ),
    "llama: one group, biases, wide heads": (
        "llama",
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "head_dim": 12},
        None,
    ),
    "roberta: other sizes": ("roberta", {"vocab_size": 1499, "hidden_act": "relu"}, None),
    "modernbert: biases, narrow windows": (
        "modernbert",
        {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "local_attention": 4},
        None,
    ),
    "mistral: window shorter than the text, wide heads": ("mistral", {"sliding_window": 4, "head_dim": 12}, None),
    "mistral: no window": ("mistral", {"sliding_window": None}, None),
    "qwen2: tied, one group, windows in two layers": (
        "qwen2",
        {
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": WINDOWS,
        },
        None,
    ),
    "qwen3: biases, odd vocabulary, long positions": (
        "qwen3",
        {
            "attention_bias": True,
            "vocab_size": 1493,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
            },
        },
        None,
    ),
    "smollm3: biases, other layers without positions, windows": (
        "smollm3",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "no_rope_layers": [0, 1, 0, 1],
            "sliding_window": 5,
            "use_sliding_window": True,
            "layer_types": WINDOWS,
        },
        None,
    ),
    "granite: tied, biases": ("granite", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, None),
    "phi3: one group, window, half of a head turns": (
        "phi3",
        {
            "num_key_value_heads": 1,
            "sliding_window": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        None,
    ),
    "phi: norms of heads, one group": ("phi", {"qk_layernorm": True, "num_key_value_heads": 1}, None),
    "gpt_neox: one block after the other, tied": (
        "gpt_neox",
        {"use_parallel_residual": False, "tie_word_embeddings": True},
        None,
    ),
    "gpt_neox: without biases, whole heads turn": (
        "gpt_neox",
        {
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
        None,
    ),
    "olmo2: one group, biases": ("olmo2", {"num_key_value_heads": 1, "attention_bias": True}, None),
    "gemma3: untied, one group, narrow windows, long positions": (
        "gemma3_text",
        {
            "tie_word_embeddings": False,
            "num_key_value_heads": 1,
            "sliding_window": 3,
            "query_pre_attn_scalar": 9,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        None,
    ),
    "opt: untied": ("opt", {"tie_word_embeddings": False}, None),
    "opt: norms behind, narrow words": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}, None),
    "opt: without biases and norm weights": (
        "opt",
        {"enable_bias": False, "layer_norm_elementwise_affine": False},
        None,
    ),
    "vit: without biases": ("vit", {"qkv_bias": False, "hidden_act": "gelu_new"}, None),
    "t5: untied": ("t5", {"tie_word_embeddings": False}, None),
    "t5: gated, other head size": ("t5", {"feed_forward_proj": "gated-gelu", "d_kv": 16}, None),
    "t5: gated, untied": ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, None),
    "t5: tied, encoder words of their own in the file": (
        "t5",
        {},
        another("encoder.embed_tokens.weight", "shared.weight"),
    ),
    "bart: untied": ("bart", {"tie_word_embeddings": False}, None),
    "bart: other stacks": (
        "bart",
        {"decoder_attention_heads": 8, "decoder_ffn_dim": 96, "activation_function": "quick_gelu"},
        None,
    ),
    "bart: stacks of other lengths": ("bart", {"encoder_layers": 1, "decoder_layers": 3}, None),
    "bart: scaled": ("bart", {"scale_embedding": True, "activation_function": "relu"}, None),
}


@torch.no_grad()
@pytest.mark.parametrize("case", ODD)
def test_every_path_gives_transformers_numbers(case: str, tmp_path: Path) -> None:
    family, changes, spoil = ODD[case]
    folder = write(tmp_path, family, **changes)
    if spoil is not None:
        spoil(folder)
    batch = batch_for(family)
    expected, logits = reference(folder, *batch)
    real = batch[1].bool() if batch[2] is None else torch.ones_like(batch[2], dtype=torch.bool)

    def assert_equal(found: Tensor, wanted: Tensor, what: str) -> None:
        error = (found[real] - wanted[real]).abs().max() / wanted[real].abs().max()
        assert error < 1e-5, f"{what}: {error:.1e}"

    for what, path in PATHS.items():
        if expected.shape[-1] == 32:  # transformers gives OPT-350m's hidden states behind their projection
            assert_equal(path(str(folder), *batch), expected, what)
    if logits is not None:
        assert_equal(sharded(str(folder), *batch, what="all"), logits, "sharded head")
        assert_equal(forward_only(str(folder), *batch), logits, "forward-only head")


def test_pairs_with_one_token_type(tmp_path: Path) -> None:
    """All tokens are of type 0, as transformers has it when no types are given."""
    folder = write(tmp_path, "bert", type_vocab_size=1)
    ids, mask, _ = batch_for("bert")
    expected, _ = reference(folder, ids, mask, None)
    second = torch.cat([ids[:, :4], ~ids[:, 4:]], dim=1)
    torch.testing.assert_close(
        whole(str(folder), second, mask, None)[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-6
    )


def missing(end: str) -> Spoil:
    """Return what drops the first tensor whose name ends with a path."""

    def drop(found: dict[str, Tensor]) -> dict[str, Tensor]:
        name = min(key for key in found if f".{key}".endswith(f".{end}"))
        return {key: tensor for key, tensor in found.items() if key != name}

    return tensors(drop)


@pytest.mark.parametrize("name", FAMILIES)
def test_missing_weights_are_named_on_every_path(name: str, tmp_path: Path) -> None:
    """A tensor, a final norm, a layer, a head; all of them under a foreign prefix: never random numbers."""
    family = FAMILIES[name]
    last = family.decoder or family

    def stored(path: str) -> str:
        for ours, theirs in family.stored_names.items():
            path = path.replace(ours, theirs)
        return path

    query = next(path for role, path in last.weights.items() if role.startswith("query"))
    first_layer = stored(f"{family.layers.rpartition('.')[2]}.0.")
    ways = {
        "one tensor": missing(stored(f".{query}.weight").removeprefix(".")),
        "prefix": tensors(lambda found: {f"foreign.{key}": one for key, one in found.items()}),
        "a layer": tensors(lambda found: {key: one for key, one in found.items() if first_layer not in key}),
    }
    if last.final:
        ways["final norm"] = missing(f"{last.final}.weight")
    if family.is_causal:
        ways["head"] = missing(stored("lm_head.weight"))
    for number, (way, spoil) in enumerate(ways.items()):
        folder = write(tmp_path / str(number), name, **({"tie_word_embeddings": False} if way == "head" else {}))
        spoil(folder)
        paths = {"forward-only": forward_only} if way == "head" else PATHS
        for path in paths.values():
            with pytest.raises(WorkbenchError, match=r"do not hold|hold 3 layers|hold 1 layers") as caught:
                path(str(folder), *batch_for(name))
            assert "\n" not in str(caught.value), way


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_that_no_model_has_are_refused_in_every_family(family: str, tmp_path: Path) -> None:
    """Whatever a family calls them: not all of transformers' configurations check the names that stand for others."""
    folder = write(tmp_path, family)
    text = (folder / "config.json").read_text()
    for field in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
        for value in ("six", -1, 0, 10**9, 2.5, None, [6]):
            settings(**{field: value})(folder)
            with pytest.raises(WorkbenchError) as caught:
                whole(str(folder), *batch_for(family))
            assert "\n" not in str(caught.value) and "asked for" in str(caught.value)
            assert (
                f"{field} = 0, which must be 1 to" in str(caught.value) or value != 0 or field != "num_attention_heads"
            )
            (folder / "config.json").write_text(text)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("good"), "bert")


def test_a_dtype_that_is_none_is_refused(good: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((good / "config.json").read_text())
    settings(dtype=3)(tmp_path)
    with pytest.raises(WorkbenchError, match="Its configuration makes no model"):
        model_facts(str(tmp_path))


def unpickles(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(f'cos\nsystem\n(S"touch {folder}/ran"\ntR.'.encode())


def own_code(folder: Path) -> None:
    """A folder that brings code for its configuration, tokenizer and model, which writes a file if it runs."""
    maps = {
        "AutoConfig": "evil.Config",
        "AutoModel": "evil.Model",
        "AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"],
    }
    settings(model_type="evil", auto_map=maps)(folder)
    (folder / "evil.py").write_text(
        f"open({str(folder / 'ran')!r}, 'w')\nclass Config: pass\nclass Model: pass\nclass Tokenizer: pass\n"
    )


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SPOILED: dict[str, tuple[Spoil, str]] = {
    "weights cut": (lambda folder: os.truncate(folder / WEIGHTS, 5000), "truncated"),
    "weights empty": (content(WEIGHTS, b""), "truncated"),
    "weights of 7 bytes": (content(WEIGHTS, b"1234567"), "truncated"),
    "header of 2^60 bytes": (content(WEIGHTS, struct.pack("<Q", 1 << 60) + b"{}"), "truncated"),
    "header that is a list": (header(b"[12]"), "malformed: Expected `object`, got `array`"),
    "header without offsets": (header(b'{"a":{"b":1}}'), "malformed: .*dtype"),
    "header with the bytes of another shape": (
        header(b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}'),
        "a has other bytes than its shape",
    ),
    "noise": (content(WEIGHTS, bytes(range(200, 256)) * 40), "do not load"),
    "pickle": (unpickles, r"only in pytorch_model\.bin, a pickle.*save_pretrained"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "no file named model.safetensors"),
    "index malformed": (content(INDEX, b"{"), "index.json' is malformed"),
    "index that is a list": (content(INDEX, b"[]"), "malformed: Expected `object`"),
    "index of a missing file": (content(INDEX, b'{"weight_map": {"a": "x.safetensors"}}'), "x.safetensors"),
    "index that leads outside": (content(INDEX, b'{"weight_map": {"a": "../x.safetensors"}}'), "not in the folder"),
    "hidden_size 128": (settings(hidden_size=128), r"\(32,\), by its configuration \(128,\)"),
    "hidden_size -384": (settings(hidden_size=-384), "hidden_size = -384"),
    "hidden_size '32'": (settings(hidden_size="32"), "hidden_size"),
    "heads 0": (settings(num_attention_heads=0), "num_attention_heads = 0"),
    "key-value heads 0": (settings(num_key_value_heads=0), "num_key_value_heads = 0"),
    "heads 7": (settings(num_attention_heads=7), "attention heads"),
    "layers 'six'": (settings(num_hidden_layers="six"), "num_hidden_layers"),
    "layers 5": (settings(num_hidden_layers=5), "4 layers"),
    "layers 3": (settings(num_hidden_layers=3), "4 layers"),
    "layers 0": (settings(num_hidden_layers=0), "num_hidden_layers = 0"),
    "layers 10^9": (settings(num_hidden_layers=10**9), "num_hidden_layers = 1000000000"),
    "padding behind the vocabulary": (settings(pad_token_id=10**9), "[Pp]adding_idx"),
    "vocabulary -1": (settings(vocab_size=-1), "vocab_size = -1"),
    "vocabulary 7": (settings(vocab_size=7), r"\(7, 32\)"),
    "positions 10^12": (settings(max_position_embeddings=10**12), "max_position_embeddings"),
    "labels 10^9": (settings(num_labels=10**9), "num_labels = 1000000000"),
    "already quantized": (
        settings(quantization_config={"quant_method": "bitsandbytes"}),
        "already quantized, by bitsandbytes",
    ),
    "a family with code of its own": (own_code, "family 'evil'"),
    "a weight that is NaN": (
        tensors(
            lambda found: (
                found | {key: one * float("nan") for key, one in found.items() if "layer.0.output.dense" in key}
            )
        ),
        "not numbers",
    ),
    "a weight without an end": (
        tensors(
            lambda found: (
                found | {key: one / 0 for key, one in found.items() if "layer.3.attention.self.key.weight" in key}
            )
        ),
        "not numbers",
    ),
    "activation": (settings(hidden_act="nope"), "nope"),
    "used as a decoder": (settings(is_decoder=True), "is_decoder"),
    "unknown type": (settings(model_type="nope"), "nope"),
    "a mixture of experts": (settings(model_type="qwen3_moe"), "mixture of experts is not carried. Known families"),
    "a hybrid": (settings(model_type="granitemoehybrid"), "is not carried"),
    "relative positions": (settings(model_type="deberta-v2"), "Attention to relative positions is not carried"),
    "a setting that is not carried": (
        settings(model_type="gemma3_text", use_bidirectional_attention=True),
        "use_bidirectional_attention = True was asked for.*attend to later ones",
    ),
    "configuration cut": (content("config.json", b'{"model_'), "config.json"),
    "configuration that is a list": (content("config.json", b"[]"), "model_type"),
    "configuration of bytes": (content("config.json", b"\xff\xfe\x00"), "config.json"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "tokenizer cut": (lambda folder: os.truncate(folder / "tokenizer.json", 100), "tokenizer.json"),
    "tokenizer empty": (content("tokenizer.json", b""), "tokenizer.json"),
    "tokenizer of bytes": (content("tokenizer.json", b"\xff\xfe"), "tokenizer.json"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
}


@pytest.mark.parametrize("way", SPOILED)
def test_spoiled_folders_are_refused_in_one_sentence(way: str, good: Path, tmp_path: Path) -> None:
    spoil, words = SPOILED[way]
    folder = tmp_path / "model"
    folder.mkdir()
    for file in good.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    spoil(folder)
    before = sorted(path.name for path in folder.iterdir())

    def as_a_run(name: str, *batch: Any) -> Any:
        return load_tokenizer(name) and model_facts(name) and whole(name, *batch)

    for path in (as_a_run, *(() if "tokenizer" in way else PATHS.values())):  # a stage needs no tokenizer
        with pytest.raises(WorkbenchError, match=words) as caught:
            path(str(folder), *batch_for("bert"))
        assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)
    assert sorted(path.name for path in folder.iterdir()) == before, "nothing of it ran and nothing was written"
