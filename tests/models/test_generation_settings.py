"""Greedy texts equal transformers' `generate` under every setting that a model's generation_config.json may hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from workbench.core.errors import ConfigError
from workbench.methods.galaxy_plus.prepare import Request, local_texts
from workbench.models.configuration import model_config
from workbench.models.generation import GenerationRules

COUNT = 10


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A decoder-only model and an encoder-decoder with heads of random weights."""
    results = {}
    for family, kind in (("gpt2", AutoModelForCausalLM), ("bart", AutoModelForSeq2SeqLM)):
        results[family] = tmp_path_factory.mktemp(family)
        torch.manual_seed(0)
        kind.from_config(model_config(f"tiny-{family}-2")).save_pretrained(results[family])
    return results


def texts(folder: Path, settings: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return our new tokens and those of transformers with these generation settings."""
    (folder / "generation_config.json").write_text(json.dumps(settings))
    is_pair = "decoder_start_token_id" in settings
    kind = AutoModelForSeq2SeqLM if is_pair else AutoModelForCausalLM
    model, ids = kind.from_pretrained(folder).eval(), torch.arange(5, 12)[None]
    start = torch.tensor([[settings.get("decoder_start_token_id", 0)]])
    request = Request(7, ids, 1, start) if is_pair else Request(7, ids)
    tokens = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False, num_beams=1
    )
    return local_texts(str(folder), [request], COUNT)[0].tolist(), tokens[0, 1 if is_pair else 7 :].tolist()


PLAIN = {"pad_token_id": 1}
SETTINGS = {
    "nothing": {},
    "forced_eos": {"forced_eos_token_id": 9},
    "forced_bos": {"forced_bos_token_id": 4},
    "both forced, eos": {"forced_bos_token_id": 4, "forced_eos_token_id": 9, "eos_token_id": 9},
    "suppress": {"suppress_tokens": list(range(40))},
    "begin_suppress": {"begin_suppress_tokens": list(range(40))},
    "begin_suppress, forced_bos": {"begin_suppress_tokens": list(range(40)), "forced_bos_token_id": 4},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "sampling and beams are not greedy": {
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 3,
        "num_beams": 4,
        "length_penalty": 2.0,
    },
}


@pytest.mark.parametrize("family", ["gpt2", "bart"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_texts_equal_transformers(family: str, settings: dict[str, Any], folders: dict[str, Path]) -> None:
    given = PLAIN | settings | ({"decoder_start_token_id": 2} if family == "bart" else {})
    ours, theirs = texts(folders[family], given)
    assert ours == theirs and len(ours) == COUNT


@pytest.mark.parametrize("family", ["gpt2", "bart"])
@pytest.mark.parametrize("least", [{}, {"min_length": 11}, {"min_new_tokens": 6}])
def test_ends_end_a_text_and_not_before_its_least_length(
    family: str, least: dict[str, int], folders: dict[str, Path]
) -> None:
    """Ends are tokens that the model would choose third, as a number and as a list."""
    plain = PLAIN | ({"decoder_start_token_id": 2} if family == "bart" else {})
    free, _ = texts(folders[family], plain)
    for ends in (free[2], [free[2], free[4]]):
        ours, theirs = texts(folders[family], plain | least | {"eos_token_id": ends})
        assert ours == theirs
        assert least or len(ours) <= 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sequence_bias": [[[3], -2.0]]}, "have sequence_bias"),
        ({"encoder_repetition_penalty": 1.5}, "have encoder_repetition_penalty = 1.5"),
        ({"stop_strings": ["."]}, "have stop_strings"),
        ({"forced_bos_token_id": 10**6}, "name the token 1000000"),
        ({"suppress_tokens": [-3]}, "name the token -3"),
    ],
)
def test_other_settings_are_refused(settings: dict[str, Any], message: str, folders: dict[str, Path]) -> None:
    (folders["gpt2"] / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=message):
        GenerationRules(str(folders["gpt2"]))


def test_without_a_generation_config_the_model_s_own_settings_count(folders: dict[str, Path]) -> None:
    """BART's configuration forces the end of a text."""
    (folders["bart"] / "generation_config.json").unlink(missing_ok=True)
    start = torch.tensor([[2]])
    [result] = local_texts(str(folders["bart"]), [Request(7, torch.arange(5, 12)[None], 1, start)], COUNT)
    assert model_config(str(folders["bart"])).forced_eos_token_id == result[-1] == 2


def test_a_decoder_starts_as_the_generation_settings_say(folders: dict[str, Path]) -> None:
    (folders["bart"] / "generation_config.json").write_text(json.dumps(PLAIN | {"decoder_start_token_id": 5}))
    assert (
        GenerationRules(str(folders["bart"])).start_id == 5 != model_config(str(folders["bart"])).decoder_start_token_id
    )


def test_a_shape_ends_texts_as_its_configuration_says() -> None:
    assert GenerationRules("shape:llama-7b").until_end([5, 6, 2, 7]) == [5, 6, 2]
