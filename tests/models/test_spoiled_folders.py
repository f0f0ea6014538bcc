"""Model folders that are spoiled: each is refused on every path, in one sentence."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.models.model_folders import PATHS, Spoil, batch_for, forward_only, settings, tensors, whole, write
from workbench.core.errors import MissingDataError, WorkbenchError
from workbench.models.configuration import model_facts
from workbench.models.families import FAMILIES
from workbench.models.loading import load_tokenizer
from workbench.models.stored_tensors import require_finite


def content(name: str, data: bytes) -> Spoil:
    """Return what replaces a file."""
    return lambda folder: (folder / name).write_bytes(data)


def header(data: bytes) -> Spoil:
    """Return what replaces the weights by a header and 40 bytes of numbers."""
    return content("model.safetensors", struct.pack("<Q", len(data)) + data + bytes(40))


def missing(end: str) -> Spoil:
    """Return what drops the first tensor whose name ends with a path."""

    def drop(found: dict[str, Tensor]) -> dict[str, Tensor]:
        name = min(key for key in found if f".{key}".endswith(f".{end}"))
        return {key: tensor for key, tensor in found.items() if key != name}

    return tensors(drop)


def test_weights_are_checked_without_memory_of_their_size() -> None:
    """A word embedding of 671 MB on a device of 1600 MB has no room for another of it, least of all in float64."""
    weight = torch.full((4096, 64), 4.0, dtype=torch.float32)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        assert require_finite(weight, "They") is weight
    assert max(event.cpu_memory_usage for event in measured.key_averages()) < weight.nbytes / 64
    assert require_finite(weight.half(), "They").sum().isinf()  # a sum that overflows is no weight that does
    weight[4095, 63] = float("nan")
    with pytest.raises(MissingDataError, match="not numbers"):
        require_finite(weight.half(), "They")


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
        for path in {"one tensor": PATHS.values(), "head": (forward_only,)}.get(way, (whole,)):
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
    "weights not pulled": (content(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\nsize 9\n"), "git lfs pull"),
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
    "a mixture of experts": (settings(model_type="qwen3_moe"), "mixture of experts is not supported. Known families"),
    "a hybrid": (settings(model_type="granitemoehybrid"), "is not supported"),
    "relative positions": (settings(model_type="deberta-v2"), "Attention to relative positions is not supported"),
    "a setting that is not supported": (
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
