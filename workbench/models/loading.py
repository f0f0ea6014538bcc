"""Load layer stacks and tokenizers by name: embedded, tiny and random, from a folder, or from the hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.core.errors import ConfigError, MissingDataError
from workbench.models.families import FAMILIES
from workbench.models.hub import from_hub, known_models, locate, suggestion
from workbench.models.partial_loading import parameters_on_meta, read_stage, stored_tensors
from workbench.models.stack import BackboneStage, LayerStack, family_of
from workbench.models.tokenizer import TextTokenizer, tiny_tokenizer

_TINY = re.compile(r"tiny-([a-z0-9]+?)(?:-(\d+))?")
_TINY_LAYERS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model's shape, known without its weights.

    layer_parameters: of one layer (they are alike).  embedding_parameters, final_parameters: before and after the layers.
    num_key_value_heads: fewer than num_heads under grouped-query attention.  is_gated: two up projections (Llama's SwiGLU).
    """

    name: str
    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_key_value_heads: int
    feed_forward_size: int
    vocabulary_size: int
    max_length: int
    is_causal: bool
    is_gated: bool
    layer_parameters: int
    embedding_parameters: int
    final_parameters: int

    @property
    def num_parameters(self) -> int:
        """Return the parameters of the whole stack."""
        return self.embedding_parameters + self.num_layers * self.layer_parameters + self.final_parameters


def load_stack(name: str, dtype: torch.dtype = torch.float32) -> LayerStack:
    """Return the frozen stack of a model.

    name: all-MiniLM-L6-v2, SmolLM2-135M, tiny-FAMILY or tiny-FAMILY-LAYERS (random, seeded, 32 wide), a folder, or a hub name.
    Raises ConfigError for an unknown name or family, MissingDataError if the files cannot be had.
    """
    if _is_tiny(name):
        # fork_rng: making a test model must not change the caller's random numbers.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = _from_config(_config(name))
        separator_id = load_tokenizer(name).separator_id
        return LayerStack(model.to(dtype), separator_id=separator_id)
    config = _config(name)
    family = family_of(config.model_type)
    from transformers import AutoModel

    def load(local_only: bool) -> Any:
        # Without its pooler a BERT checkpoint is whole for us; the report of left-over weights would only confuse.
        options = {"add_pooling_layer": False} if config.model_type == "bert" else {}
        return AutoModel.from_pretrained(
            locate(name), dtype=dtype, attn_implementation="sdpa", local_files_only=local_only, use_safetensors=None, **options
        )

    with _quiet_transformers():
        model = _load(name, load)
    separator_id = load_tokenizer(name).separator_id if family.has_token_types else None
    return LayerStack(model, separator_id=separator_id)


def load_stage(name: str, start: int, stop: int, dtype: torch.dtype = torch.float32) -> BackboneStage:
    """Return layers [start, stop) of a model.

    Of a folder with safetensors only these layers are read; of anything else the whole is loaded and the rest released.
    """
    place = None if _is_tiny(name) else locate(name)
    if isinstance(place, Path):
        try:
            tensors = stored_tensors(place)
        except (OSError, ValueError, KeyError) as error:
            raise MissingDataError(
                f"The model '{name}' was asked for.", f"Its weights do not load: {error}.", "Check its files."
            ) from error
        if tensors is not None:
            config = _config(name)
            separator_id = load_tokenizer(name).separator_id if family_of(config.model_type).has_token_types else None
            with parameters_on_meta():
                model = _from_config(config)
            stage = read_stage(model, tensors, start, stop, separator_id=separator_id, dtype=dtype)
            if stage is not None:
                return stage
    return load_stack(name, dtype).stage(start, stop)


def import_family(name: str) -> None:
    """Import what loading the model needs, so that a memory budget that begins afterwards counts the model alone."""
    with parameters_on_meta():
        _from_config(_config(name))


def require_known(name: str) -> None:
    """Raise ConfigError if the name can be no model's, MissingDataError if it is an embedded one that was not fetched; at once."""
    if _is_tiny(name):
        _tiny_parts(name)
    else:
        locate(name)


def load_tokenizer(name: str) -> TextTokenizer:
    """Return a model's tokenizer.  Raises as load_stack does.  Embedded and tiny models need no transformers for it."""
    if _is_tiny(name):
        return tiny_tokenizer(is_causal=FAMILIES[_tiny_parts(name)[0]].is_causal)
    place = locate(name)
    if isinstance(place, Path) and (place / "tokenizer.json").is_file():
        return _tokenizer_from_folder(place)
    from transformers import AutoTokenizer

    with _quiet_transformers():
        tokenizer = _load(name, lambda local_only: AutoTokenizer.from_pretrained(place, local_files_only=local_only))
    if not tokenizer.is_fast:
        raise ConfigError(f"The tokenizer of '{name}' was asked for.", "It has no tokenizer.json.", "Choose a model with a fast tokenizer.")
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    return TextTokenizer(tokenizer.backend_tokenizer, pad_id=pad_id, separator_id=tokenizer.sep_token_id)


def model_facts(name: str) -> ModelFacts:
    """Return a model's shape without loading its weights.  Raises as load_stack does."""
    config = _config(name)
    family = family_of(config.model_type)
    with torch.device("meta"):
        model = _from_config(config)
    layers = model.get_submodule(family.layers)
    count = sum(parameter.numel() for parameter in layers[0].parameters())
    embedding = sum(parameter.numel() for path in family.embedding for parameter in model.get_submodule(path).parameters())
    final = sum(parameter.numel() for parameter in model.get_submodule(family.final).parameters()) if family.final else 0
    # GPT-2's Conv1D keeps (in, out), the others' Linear (out, in): the side that is not d is the feed-forward's.
    up = layers[0].get_submodule(family.weights["up"]).weight
    return ModelFacts(
        name=name,
        family=config.model_type,
        num_layers=len(layers),
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        feed_forward_size=up.numel() // config.hidden_size,
        vocabulary_size=config.vocab_size,
        max_length=config.max_position_embeddings,
        is_causal=family.is_causal,
        is_gated=any(path.endswith("gate_proj") for path, _ in layers[0].named_modules()),
        layer_parameters=count,
        embedding_parameters=embedding,
        final_parameters=final,
    )


def _is_tiny(name: str) -> bool:
    return name.startswith("tiny-") and not Path(name).is_dir()


def _tiny_parts(name: str) -> tuple[str, int]:
    match = _TINY.fullmatch(name)
    layers = int(match[2]) if match and match[2] else _TINY_LAYERS
    if match is None or match[1] not in FAMILIES or not 1 <= layers <= 64:
        raise ConfigError(f"The model '{name}' was asked for.", f"Known are {known_models()}.", suggestion(name))
    return match[1], layers


def _config(name: str) -> Any:
    from transformers import AutoConfig

    if _is_tiny(name):
        family, layers = _tiny_parts(name)
        vocabulary = load_tokenizer(name).backend.get_vocab_size()
        shape = {"vocab_size": vocabulary, "hidden_size": 32, "num_hidden_layers": layers, "max_position_embeddings": 128}
        # Dropout is set to zero so that a stage behaves alike in training mode; token ids beyond the vocabulary would not load.
        special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
        return AutoConfig.for_model(family, **shape, **special, **FAMILIES[family].tiny)
    place = locate(name)
    with _quiet_transformers():
        config = _load(name, lambda local_only: AutoConfig.from_pretrained(place, local_files_only=local_only))
    family_of(config.model_type)
    return config


def _from_config(config: Any) -> Any:
    from transformers import AutoModel

    return AutoModel.from_config(config, attn_implementation="sdpa")


def _load(name: str, load: Any) -> Any:
    asked = f"The model '{name}' was asked for."
    if isinstance(locate(name), Path):
        try:
            return load(True)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise MissingDataError(asked, f"Its folder does not load: {str(error).splitlines()[0]}", "Check its files.") from error
    return from_hub(asked, load, f"Connect to the network, give a model folder, or choose one of {known_models()}.")


def _tokenizer_from_folder(folder: Path) -> TextTokenizer:
    import json

    from tokenizers import Tokenizer

    settings: dict[str, Any] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / file).is_file():
            settings |= json.loads((folder / file).read_text(encoding="utf-8"))
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def id_of(role: str) -> int | None:
        token = settings.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        return None if token is None else backend.token_to_id(token)

    pad_id = next((index for index in (id_of("pad"), id_of("eos")) if index is not None), 0)
    return TextTokenizer(backend, pad_id=pad_id, separator_id=id_of("sep"))


class _quiet_transformers:
    """Silence progress bars and notes of transformers while it loads, and restore them."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self.verbosity, self.bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def __exit__(self, *exception: object) -> None:
        from transformers.utils import logging

        logging.set_verbosity(self.verbosity)
        if self.bars:
            logging.enable_progress_bar()
