"""Merged models load in other programs and compute what the run's result computes: transformers' folder, and GGUF."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer, PreTrainedModel

from tests.methods.test_result import saved
from workbench.core.errors import ConfigError, MissingDataError, WriteError
from workbench.core.job import Job
from workbench.methods.common.merged import export_merged
from workbench.methods.common.result import load_result
from workbench.methods.common.text_model import load_text_model
from workbench.models.configuration import model_config
from workbench.models.generation import Sampling
from workbench.models.gguf_file import require_gguf
from workbench.models.hub import locate
from workbench.models.loading import load_stack, load_stage
from workbench.models.lora import PEFT_WEIGHTS
from workbench.models.merging import merged_lora
from workbench.models.tokenizer import TextTokenizer

WINDOW = 320
TALK: Any = [{"role": "user", "content": "Say 1."}]


def byte_level() -> tuple[Any, dict[str, Any]]:
    """Return SmolLM2's tokenizer with the bytes as its words, and its settings, a chat template among them."""
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġs", "Ġsa"]
    backend = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [("Ġ", "s"), ("Ġs", "a")]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words[:3]])
    return backend, json.loads((Path(locate("SmolLM2-135M")) / "tokenizer_config.json").read_text())


def pieces(begins_with_space: bool = False) -> tuple[Any, dict[str, Any]]:
    """Return a tokenizer of SentencePiece's kind, as Mistral's with a space before a text, or as that of Gemma's base
    model, which has no chat template, and its settings.
    """
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁▁", "▁s", "▁sa"]
    words += ["▁", *"abcdefghijklmnopqrstuvwxyzSU:.1"]
    backend: Any = Tokenizer(
        models.BPE(
            {word: index for index, word in enumerate(words)},
            [("▁", "▁"), ("▁", "s"), ("▁s", "a")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if begins_with_space:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    backend.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words[:4]])
    template = "{{ bos_token }}{% for message in messages %}U:  {{ message.content }}\n{% endfor %}S: "
    roles = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
    return backend, settings | {"chat_template": template} if begins_with_space else settings


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen3", "gemma3_text"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer of its family's kind; the head is its own, but for Gemma's."""
    folder = tmp_path_factory.mktemp("base") / "small"
    is_gemma, is_mistral = request.param == "gemma3_text", request.param == "mistral"
    backend, settings = pieces(is_mistral) if is_gemma or is_mistral else byte_level()
    config = model_config(f"tiny-{request.param}-2")
    config.vocab_size, config.tie_word_embeddings, config.dtype = backend.get_vocab_size(), is_gemma, "float32"
    if request.param == "qwen3":
        config.head_dim = 128  # transformers' reader of GGUF files knows no other size of Qwen3's heads
    if is_mistral:
        config.sliding_window = WINDOW
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0 if is_gemma else 2
    if is_gemma:
        config.head_dim = config.query_pre_attn_scalar = 256  # the only scale that transformers' reader knows
        config.layer_types = ["sliding_attention"] * 2
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def result(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of an instruction tuning with LoRA, whose matrices are far from zero."""
    folder = tmp_path_factory.mktemp("result")
    rows = [{"instruction": f"Say {number}.", "output": "yes"} for number in range(8)]
    (folder / "rows.json").write_text(json.dumps(rows))
    job = Job(
        method="fine_tuning",
        model=str(base),
        task="instruction_tuning",
        data=str(folder / "rows.json"),
        max_length=300,
        options={"technique": "lora"},
    )
    saved(folder / "run", job)
    path = folder / "run" / PEFT_WEIGHTS
    state = {key: torch.randn(value.shape) / 4 for key, value in load_file(path).items()}
    save_file(state, path, {"format": "pt"})
    return folder / "run"


def test_a_merged_folder_writes_the_same_text_in_transformers(result: Path, base: Path, tmp_path: Path) -> None:
    outcome = export_merged(str(result), tmp_path / "merged", "float16")
    model, tokenizer = (kind.from_pretrained(tmp_path / "merged") for kind in (AutoModelForCausalLM, AutoTokenizer))
    ours = load_text_model(str(result))
    ids = tokenizer.apply_chat_template(TALK, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    assert ids[0].tolist() == ours.tokenizer.chat(TALK)
    written = list(ours.writer.write(ids[0].tolist(), 8, Sampling()))
    assert model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist() == written
    assert written != list(load_text_model(str(base)).writer.write(ids[0].tolist(), 8, Sampling()))
    assert outcome.parameters == sum(value.numel() for value in model.parameters())
    with pytest.raises(ConfigError, match="The folder has files"):
        export_merged(str(result), tmp_path / "merged", "float16")


@pytest.mark.filterwarnings("ignore")
def test_a_gguf_file_loads_with_the_same_logits_and_tokens(
    result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_merged(str(result), tmp_path / "merged.gguf", "float32")
    reference = merged_lora(load_result(result).about.job.model, result)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="merged.gguf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="merged.gguf")
    longest = WINDOW if reference.config.model_type == "mistral" else 512  # no reader knows Mistral's window
    assert read.config.max_position_embeddings == longest
    ours = load_text_model(str(result)).tokenizer
    assert tokenizer.apply_chat_template(TALK, add_generation_prompt=True, return_dict=False) == ours.chat(TALK)
    assert tokenizer("say  sas   a\n").input_ids == ours.prompt("say  sas   a\n")
    ids = torch.arange(5, 30)[None]
    with torch.inference_mode():
        expected, actual = reference(ids).logits, read(ids).logits
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
    # The file is a model here, too: whole, in stages, and in a chat.  It is converted once.
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    name, mask = str(tmp_path / "merged.gguf"), torch.ones_like(ids)
    head = load_stack(name, with_head=True).language_model_head
    assert head is not None
    with torch.inference_mode():
        hidden = load_stage(name, 1, 2)(load_stage(name, 0, 1)(ids, mask)[0], mask)[0]
        actual = head(hidden)
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert load_text_model(name).tokenizer.chat(TALK) == ours.chat(TALK)
    assert len(list((tmp_path / "cache" / "gguf").iterdir())) == 1
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "merged.gguf").read_bytes()[:2000])
    with pytest.raises(MissingDataError, match="Transformers does not read it") as caught:
        load_stack(str(tmp_path / "cut.gguf"))
    assert "\n" not in str(caught.value)


def test_classes_are_merged_with_their_head(tmp_path: Path) -> None:
    model = saved(tmp_path / "run", Job(method="fine_tuning", model="tiny-bert-2", options={"technique": "lora"}))
    export_merged(str(tmp_path / "run"), tmp_path / "merged", "float16")
    reference = AutoModelForTokenClassification.from_pretrained(tmp_path / "merged")
    ids = torch.tensor(model._tokenizer.encode(["a fine film"], max_length=32))
    with torch.inference_mode():
        shares = reference(ids).logits.mean(1).softmax(-1)[0].tolist()
    [answer] = model.predict(["a fine film"])
    assert list(answer.probabilities.values()) == pytest.approx(shares, abs=1e-5)


def test_a_folder_that_does_not_fit_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: Any, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"a part")
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", fail)
    with pytest.raises(WriteError, match="No space left on device"):
        export_merged("tiny-llama-2", tmp_path / "merged", "float16")
    assert not (tmp_path / "merged").exists()


def test_what_cannot_be_merged_or_written_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "run", Job(method="fine_tuning", model="tiny-bert-2", options={"technique": "adapters"}))
    for place, out, said in (
        (tmp_path / "run", "merged", "no change of the model's weight matrices"),
        ("tiny-gpt2", "out.gguf", "Of its family, gpt2, no GGUF is written here"),
        ("tiny-llama", "out.gguf", "Its tokenizer is not BPE"),
        ("tiny-bert", "merged", "It predicts no words"),
    ):
        with pytest.raises(ConfigError, match=said):
            export_merged(str(place), tmp_path / out, "float16")
        assert not (tmp_path / out).exists()


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("family", "split", "settings", "said"),
    [
        ("llama", LLAMA_3, {}, None),
        ("llama", LLAMA_3.replace("{1,3}", "{1,4}"), {}, "would be read as other tokens"),
        ("qwen3", LLAMA_3.replace("{1,3}", ""), {}, None),
        ("qwen3", LLAMA_3, {"attention_bias": True}, "Its attention has biases"),
        ("llama", LLAMA_3, {"attention_bias": True}, None),
        ("llama", LLAMA_3, {"hidden_act": "gelu"}, r"Its activation is unusual \(gelu\)"),
    ],
)
def test_what_a_gguf_file_could_not_say_is_refused(family: str, split: str, settings: Any, said: str | None) -> None:
    """llama.cpp would read other tokens or weights, or compute with another activation."""
    backend, _ = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    config = model_config(f"tiny-{family}-2")
    for name, value in settings.items():
        setattr(config, name, value)
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        assert require_gguf("small", config, TextTokenizer(backend, pad_id=0)).architecture == family
