"""Load layer stacks and tokenizers by name: embedded, tiny and random, from a folder, or from the hub.

The facts of a model are its shape, known without its weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workbench.assets.fetch import asset_path
from workbench.core.errors import ConfigError, MissingDataError
from workbench.core.once import once
from workbench.models.families import FAMILIES, family_of, generating_families, require_carried
from workbench.models.hub import (
    SHAPE,
    has_weights,
    in_one_line,
    known_models,
    loaded,
    locate,
    refused,
    require_layers,
    require_settings,
    require_whole,
    shape_settings,
    suggestion,
)
from workbench.models.matmul import Head, head_of
from workbench.models.partial_loading import (
    HEADER,
    MISSING_WEIGHTS,
    StoredTensor,
    parameters_on_meta,
    read_head,
    read_stage,
    require_finite,
    stored_tensors,
)
from workbench.models.stack import BackboneStage, LayerStack
from workbench.models.tokenizer import (
    ImageTokenizer,
    TextTokenizer,
    image_tokenizer,
    read_settings,
    tiny_tokenizer,
    tokenizer_from_folder,
)

TOKENIZER_FILES = ("vocab.txt", "vocab.json", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model")
"""Files from which transformers can make a fast tokenizer if there is no tokenizer.json."""
STAND_IN = "all-MiniLM-L6-v2"
"""The embedded model whose tokenizer counts the tokens of shapes."""
_TINY = re.compile(r"tiny-([a-z0-9_]+?)(?:-(\d+))?")
_TINY_LAYERS = 6


def load_stack(name: str, dtype: torch.dtype = torch.float32, *, with_head: bool = False) -> LayerStack:
    """Return the frozen stack of a model.

    name: all-MiniLM-L6-v2, SmolLM2-135M, tiny-FAMILY or tiny-FAMILY-LAYERS (random, seeded, 32 wide), a folder, or a
    hub name.
    with_head: also load the language model head of a decoder-only model.  An encoder-decoder's head is always loaded.
    Raises ConfigError for an unknown name or family, MissingDataError if the files are unavailable.
    """
    model = (
        load_model(name, dtype)
        if with_head or is_tiny(name)
        else _pretrained(name, model_config(name), dtype).to(dtype)
    )
    family = family_of(model.config.model_type)
    head = head_of(model) if family.decoder is not None or (with_head and family.is_causal) else None
    return LayerStack(model.base_model, language_model_head=head)


def load_stage(
    name: str,
    start: int,
    stop: int,
    dtype: torch.dtype = torch.float32,
    *,
    after_layer: Callable[[nn.Module], object] | None = None,
    with_head: bool = False,
) -> BackboneStage:
    """Return layers [start, stop) of a model.

    after_layer: called with each layer, where possible before the next one is read.

    with_head: also load the head of a decoder-only model.
    From a folder with safetensors only these layers are read.  Otherwise the whole model is loaded and the rest
    released.
    """
    tensors = stored_weights(name)
    if tensors is not None:
        config = model_config(name)
        with parameters_on_meta():
            model = model_from_config(config, name)
        head = read_head(config, tensors, dtype) if with_head else None
        stage = read_stage(model, tensors, start, stop, dtype=dtype, after_layer=after_layer, head=head)
        if stage is not None and (head is not None or not with_head):
            return stage
    stage = load_stack(name, dtype, with_head=with_head).stage(start, stop)
    if after_layer is not None:
        for layer in stage.layers.values():
            after_layer(layer)
    return stage


def load_language_model_head(name: str, dtype: torch.dtype = torch.float32) -> Head:
    """Return the frozen head of a model that predicts words.  If the folder holds safetensors, its layers are not
    loaded.
    """
    tensors = stored_weights(name)
    head: Head | None = None if tensors is None else read_head(model_config(name), tensors, dtype)
    head = head or load_stack(name, dtype, with_head=True).language_model_head
    assert head is not None, "a model without words"
    return head


@cache
def import_family(name: str) -> None:
    """Import the libraries for loading the model, so that a memory budget that begins later counts only the model."""
    with parameters_on_meta():
        model_from_config(model_config(name), name)


def require_known(name: str) -> None:
    """Check a model's name without loading.  Raises ConfigError if it is invalid, MissingDataError if an embedded model
    was not fetched.
    """
    if is_tiny(name):
        _tiny_parts(name)
    elif not has_weights(name):
        shape_settings(name)
    else:
        locate(name)


@once
def load_tokenizer(name: str) -> TextTokenizer | ImageTokenizer:
    """Return a model's tokenizer.  Raises as load_stack does.  Embedded and tiny text models do not need transformers
    for it.

    A shape without a tokenizer next to its config.json counts tokens as STAND_IN does.
    """
    if is_tiny(name):
        family = FAMILIES[_tiny_parts(name)[0]]
        if family.reads_images:
            return image_tokenizer(family.tiny)
        start_id = family.tiny.get("decoder_start_token_id")
        return tiny_tokenizer(is_causal=family.is_causal, has_token_types=family.has_token_types, start_id=start_id)
    place: Path | str
    if has_weights(name):
        place = locate(name)
        config = read_settings(place / "config.json") if isinstance(place, Path) else model_config(name).to_dict()
    else:
        config = shape_settings(name)
        beside = Path(name).expanduser().parent
        has_own = not name.startswith(SHAPE) and (beside / "tokenizer.json").is_file()
        place = beside if has_own else asset_path(STAND_IN)
    model_type = config.get("model_type")
    family = (
        FAMILIES[model_type] if model_type in FAMILIES else family_of(model_config(name).model_type)
    )  # which says what is wrong
    if family.reads_images:
        return image_tokenizer(config)
    kind: dict[str, Any] = {
        "joins_pairs": family.is_causal,
        "has_token_types": family.has_token_types,
        "start_id": config.get("decoder_start_token_id"),
    }
    if isinstance(place, Path):
        if (place / "tokenizer.json").is_file():
            return tokenizer_from_folder(place, config, **kind)
        if not any((place / file).is_file() for file in TOKENIZER_FILES):
            raise MissingDataError(
                f"The tokenizer of '{name}' was asked for.",
                "Its folder has no tokenizer.json.",
                "Save the model's tokenizer into it.",
            )
    from transformers import AutoTokenizer

    with _quiet_transformers():
        tokenizer = loaded(
            name,
            lambda local_only: AutoTokenizer.from_pretrained(
                place, local_files_only=local_only, trust_remote_code=False
            ),
        )
    if not tokenizer.is_fast:
        raise ConfigError(
            f"The tokenizer of '{name}' was asked for.",
            "It has no tokenizer.json.",
            "Choose a model with a fast tokenizer.",
        )
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
    kind |= {"chat_template": template, "special_tokens": tokenizer.special_tokens_map}
    return TextTokenizer(tokenizer.backend_tokenizer, pad_id=pad_id, end_id=tokenizer.eos_token_id, **kind)


@once
def model_facts(name: str) -> ModelFacts:
    """Return a model's shape without loading its weights.  Raises as load_stack does."""
    config = model_config(name)
    with torch.device("meta"), parameters_on_meta():
        return facts_of(name, model_from_config(config, name))


def require_generating(name: str, request: str) -> None:
    """Raise ConfigError for a model that predicts no words, before its weights are read.  request: the request in a
    sentence.
    """
    require_known(name)
    if not family_of(model_config(name).model_type).generates:
        raise ConfigError(
            request,
            "It predicts no words: it reads whole texts or pictures.",
            f"Give a run's folder, or choose a model that generates ({generating_families()}).",
        )


def model_config(name: str) -> Any:
    """Return a model's Hugging Face configuration.  Raises as load_stack does."""
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    if is_tiny(name):
        return AutoConfig.for_model(_tiny_parts(name)[0], **_tiny_settings(*_tiny_parts(name)))
    is_shape = not has_weights(name)
    place = "" if is_shape else locate(name)
    if is_shape:
        settings = shape_settings(name)
    elif isinstance(place, Path):
        settings = read_settings(place / "config.json")
    else:
        settings = loaded(
            name, lambda local_only: PretrainedConfig.get_config_dict(place, local_files_only=local_only)[0]
        )
    # The family decides before anything is made of the settings: a folder's own code is never asked for, and no size
    # builds a huge list.
    if "model_type" not in settings:
        raise refused(
            name,
            "Its config.json is not a JSON object that names a model_type.",
            "Save the model's configuration again.",
        )
    family_of(settings["model_type"])
    config_class = CONFIG_MAPPING[settings["model_type"]]
    require_settings(name, settings, config_class.attribute_map)
    try:
        config = config_class.from_dict(settings)
    except Exception as error:  # libraries raise many kinds of errors for a user's files
        raise refused(name, f"Its config.json does not load: {in_one_line(error)}.", "Fix its config.json.") from error
    require_carried(config)
    require_layers(name, config, stored_weights(name) or {})
    return config


def model_from_config(config: Any, name: str = "") -> Any:
    """Return the base model of a configuration, with random weights.  The caller decides whether its parameters get
    memory.

    name: the model's name in the error message; by default the configuration's name.  Raises MissingDataError for an
    unusable configuration.
    """
    try:
        return _from_config(config)
    except Exception as error:  # libraries raise many kinds of errors for a user's configuration
        name = name or getattr(config, "_name_or_path", "") or config.model_type
        raise refused(
            name, f"Its configuration makes no model: {in_one_line(error)}.", "Fix its config.json."
        ) from error


def stored_weights(name: str) -> dict[str, StoredTensor] | None:
    """Return the tensors of a model's safetensors files.  None if it has none on this machine.  Raises as load_stack
    does.

    For a hub name this searches the hub's local cache.
    """
    folder = local_folder(name)
    try:
        return None if folder is None else stored_tensors(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(locate(name), str):
            return None  # an incomplete download; loading the model fetches the rest
        raise refused(name, f"Its weights do not load: {in_one_line(error)}.", "Check its files.") from error


def load_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a complete Hugging Face model, with its language model head if it has one.  Raises as load_stack does.

    A tiny model is the base model of `load_stack`, whose word embedding serves as the head.
    """
    config = model_config(name)
    if not is_tiny(name):
        return _pretrained(name, config, dtype, with_head=True).eval()
    # fork_rng: making a test model must not change the caller's random state.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _from_config(config).to(dtype).eval()


def local_folder(name: str) -> Path | None:
    """Return the folder on this machine with a model's files, for a hub model in the hub's cache; None if there is none
    (a tiny model).
    """
    place = None if is_tiny(name) or not has_weights(name) else locate(name)
    if not isinstance(place, str):
        return place
    from transformers.utils.hub import try_to_load_from_cache

    paths = (try_to_load_from_cache(place, file) for file in ("model.safetensors.index.json", "model.safetensors"))
    return next((Path(path).parent for path in paths if isinstance(path, str)), None)


def is_tiny(name: str) -> bool:
    """Return whether a name belongs to a random model, which is generated and not read."""
    return name.startswith("tiny-") and not Path(name).is_dir()


def _tiny_parts(name: str) -> tuple[str, int]:
    match = _TINY.fullmatch(name)
    layers = int(match[2]) if match and match[2] else _TINY_LAYERS
    if match is None or match[1] not in FAMILIES or not 1 + (FAMILIES[match[1]].decoder is not None) <= layers <= 64:
        raise ConfigError(f"The model '{name}' was asked for.", f"Known are {known_models()}.", suggestion(name))
    return match[1], layers


def _tiny_settings(family: str, layers: int) -> dict[str, Any]:
    facts = FAMILIES[family]
    # Dropout is zero, so that training mode gives the same results; token ids beyond the vocabulary would not load.
    settings: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    if not facts.reads_images:
        vocabulary = tiny_tokenizer(is_causal=facts.is_causal).backend.get_vocab_size()
        settings |= {"vocab_size": vocabulary, "max_position_embeddings": 128}
    if facts.decoder is None:
        settings |= {"hidden_size": 32, "num_hidden_layers": layers}
    else:
        encoder, decoder = layers - layers // 2, layers // 2
        settings |= {"d_model": 32, "num_layers": encoder, "num_decoder_layers": decoder}
        settings |= {"encoder_layers": encoder, "decoder_layers": decoder}
    return settings | dict(facts.tiny)


def _from_config(config: Any) -> Any:
    import transformers

    return transformers.AutoModel.from_config(config, attn_implementation="sdpa", trust_remote_code=False)


def _pretrained(name: str, config: Any, dtype: torch.dtype, *, with_head: bool = False) -> Any:
    """Return the base model of a checkpoint, but a complete encoder-decoder, whose head may differ from its word
    embedding.

    with_head: also return a complete model for a decoder-only one.
    """
    import transformers

    family = family_of(config.model_type)
    maker = transformers.AutoModel if family.decoder is None else transformers.AutoModelForSeq2SeqLM
    if with_head and family.is_causal:
        maker = transformers.AutoModelForCausalLM
    # We do not need the pooler, so the report of unused weights would only confuse.
    options: dict[str, Any] = {"trust_remote_code": False}
    if family.has_pooler:
        options["add_pooling_layer"] = False

    place = locate(name)
    if isinstance(place, Path) and any(place.glob("pytorch_model*.bin")) and stored_weights(name) is None:
        problem = "Its weights are only in pytorch_model.bin, a pickle, whose code would run when it is read."
        todo = (
            "Convert a copy that you trust: AutoModel.from_pretrained(FOLDER).save_pretrained(FOLDER) writes "
            "model.safetensors."
        )
        raise refused(name, problem, todo)
    headers = place.glob(f"*{HEADER}") if isinstance(place, Path) else ()
    if not MISSING_WEIGHTS.has(*(path.with_name(path.name.removesuffix(HEADER)) for path in headers)):
        return maker.from_config(config, dtype=dtype, attn_implementation="sdpa", **options).eval()

    def load(local_only: bool) -> Any:
        return maker.from_pretrained(
            place,
            dtype=dtype,
            attn_implementation="sdpa",
            local_files_only=local_only,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # our own message reports them
            **options,
        )

    with _quiet_transformers():
        model, loading_info = loaded(name, load)
    require_whole(name, loading_info)
    for parameter in model.parameters():
        require_finite(parameter, f"The weights of '{name}'")
    return model


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide progress bars and notes of transformers while it loads."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


UNLIMITED_LENGTH = 512
"""Length for models without a limit, such as those with relative positions.  T5 was trained on this length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model's shape.

    num_layers: number of layers, in an encoder-decoder of both stacks.  num_encoder_layers: number of its encoder's
    layers, None for a single stack.
    embedding_parameters: number of parameters before the layers.  decoder_embedding_parameters: number of parameters
    between an encoder-decoder's two stacks.
    Shared word embeddings are counted once, with the first stack; T5's position tables count as embedding.
    num_key_value_heads: fewer than num_heads with grouped-query attention.  is_gated: two up projections (SwiGLU
    and its like).
    shares_words: whether an encoder-decoder's two stacks share one word embedding.
    is_parallel: whether both blocks of a layer read the same residual stream.
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
    embedding_parameters: int
    num_encoder_layers: int | None = None
    decoder_embedding_parameters: int = 0
    shares_words: bool = False
    is_parallel: bool = False


def facts_of(name: str, model: Any) -> ModelFacts:
    """Return the facts of a Hugging Face base model, which may be on the meta device."""
    config, stack = model.config, LayerStack(model)
    paths = stack.layer_paths(0)
    # Some store (in, out), others (out, in): the side that differs from d is the feed-forward size.
    down: Any = stack.layers[0].get_submodule(paths["down"])
    images: Any = model.get_submodule("embeddings") if stack.family.reads_images else None
    longest = stack.family.max_positions(config) if images is None else images.position_embeddings.shape[1]
    return ModelFacts(
        name=name,
        family=config.model_type,
        num_layers=stack.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        feed_forward_size=down.weight.numel() // config.hidden_size,
        vocabulary_size=getattr(config, "vocab_size", 0),
        max_length=longest or UNLIMITED_LENGTH,
        is_causal=stack.is_causal,
        is_gated="gate" in paths or "gate_up" in paths,
        is_parallel=stack.family.is_parallel(config),
        embedding_parameters=_count((stack.embedding, stack.position_bias)),
        num_encoder_layers=stack.num_encoder_layers,
        decoder_embedding_parameters=_count(
            (stack.decoder_embedding, stack.decoder_position_bias), without=stack.embedding
        ),
        shares_words=stack.shares_words,
    )


def _count(modules: Iterable[nn.Module | None], *, without: nn.Module | None = None) -> int:
    left_out = set() if without is None else {id(parameter) for parameter in without.parameters()}
    sizes = {
        id(parameter): parameter.numel()
        for module in modules
        if module is not None
        for parameter in module.parameters()
    }
    return sum(count for key, count in sizes.items() if key not in left_out)
