"""Save trained parameters atomically as safetensors and JSON, and load them in a new process with the same predictions.

LoRA is saved for peft and full fine-tuning for transformers, if one of their classes can represent the model.  Adapters
and all other techniques use our own format.
Our head is a matrix on the mean of the last hidden states.  W mean(h) + b is the mean of W h + b, so a token
classification whose logits are averaged over the attention mask is the same model.  Spans and tags are directly the
logits of those classes.
Families with another pooling (encoder-decoders) or without such a class (OPT, ViT) are saved in our own format.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.core.files import make_folder, whole_file
from workbench.core.names import FloatType
from workbench.core.serial import from_json, shown, user_path, write_json, write_text
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.configuration import is_tiny, local_folder, model_config, stored_weights
from workbench.models.families import family_of
from workbench.models.hub import EMBEDDED_MODELS, locate
from workbench.models.loading import TOKENIZER_FILES, load_stack, load_tokenizer
from workbench.models.lora import PEFT_CONFIG, PEFT_WEIGHTS, PeftTask, Published, peft_names, save_lora
from workbench.models.parallel_adapter import ParallelAdapter
from workbench.models.partial_loading import parameters_on_meta
from workbench.models.quantization import QuantizationConfig, quantize
from workbench.models.stack import LayerStack
from workbench.models.stored_tensors import save_tensors
from workbench.models.techniques import TechniqueConfig, TechniqueStage
from workbench.models.tokenizer import TextTokenizer

T = TypeVar("T")
Config = TypeVar("Config")

WEIGHTS, DESCRIPTION = "adapter.safetensors", "adapter.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedDescription(Generic[Config]):
    """Describes trained parameters.

    config: how they are added to the backbone.  model: the backbone's name.

    quantization: how the backbone's weights are stored.  dtype: dtype of P-RGE's weights and activations without
    quantization.
    """

    config: Config
    model: str
    quantization: QuantizationConfig | None = None
    dtype: FloatType = "float32"
    schema_version: Literal[3] = 3


def save_adapter(
    folder: Path | str, state: Mapping[str, Tensor], description: TrainedDescription[ParallelAdapterConfig]
) -> Path:
    """Write a whole adapter's state_dict (or the union of its stages') and return the folder.

    Raises ConfigError if the state is incomplete.  Weights are written first: a folder with a description is complete.
    """
    folder = Path(folder)
    # Loading checks names and shapes now, so that errors do not surface later.
    _build(description.config, state, f"The adapter for '{folder}'")
    save_tensors(folder / WEIGHTS, state)
    write_json(folder / DESCRIPTION, description)
    return folder


def load_adapter(folder: Path | str) -> tuple[ParallelAdapter, TrainedDescription[ParallelAdapterConfig]]:
    """Return a saved adapter, in evaluation mode.  Raises ConfigError if the folder holds none or it is damaged."""
    request = f"The adapter '{folder}' was asked for."
    description, state = _load(Path(folder), request, TrainedDescription[ParallelAdapterConfig], DESCRIPTION, WEIGHTS)
    return _build(description.config, state, f"The adapter '{folder}'").eval(), description


def _load(
    folder: Path, request: str, kind: type[T], description: str, weights: str | None
) -> tuple[T, dict[str, Tensor]]:
    """Read a description and the trained tensors from the files with these names.

    request: the first sentence of the error.
    """
    try:
        content = from_json((folder / description).read_bytes(), kind, source=f"'{folder / description}'")
        return content, {} if weights is None else require_floats(load_file(folder / weights), request)
    except OSError as error:
        raise ConfigError(
            request, f"{error.strerror or error}: '{error.filename or weights}'.", "Check the folder."
        ) from error
    except SafetensorError as error:
        raise ConfigError(request, f"Its {weights} is damaged: {error}.", "Train it again, or take a copy.") from error


def require_floats(state: dict[str, Tensor], request: str) -> dict[str, Tensor]:
    """Return trained tensors unchanged.

    request: the first sentence of the error.  Raises ConfigError if one holds integers, or NaN or infinity.
    """
    for name, tensor in state.items():
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise ConfigError(
                request,
                f"Its weight '{shown(name)}' holds "
                f"{'values that are not numbers' if tensor.is_floating_point() else 'integers'}.",
                "Train it again, or take a copy.",
            )
    return state


def _build(config: ParallelAdapterConfig, state: Mapping[str, Tensor], name: str) -> ParallelAdapter:
    adapter = ParallelAdapter(config)
    try:
        adapter.load_state_dict(dict(state))
    except RuntimeError as error:
        first = " ".join(str(error).split("\n")[1:2]).strip() or str(error)
        raise ConfigError(
            f"{name} was asked for.", f"Its weights do not fit its description: {first}", "Check the folder."
        ) from error
    return adapter


TRAINED, TRAINED_DESCRIPTION = "trained.safetensors", "fine_tuning.json"
WHOLE_MODEL = "config.json"
"""The file that transformers writes next to the weights of a whole model."""
_BACKBONE, _HEAD = "backbone.", "head.output."


def set_trained(model: TechniqueStage, weights: Mapping[str, Tensor]) -> None:
    """Set a model's trained parameters by name.  Raises ConfigError for a name or shape that does not fit."""
    with torch.no_grad():
        for name, parameter in model.trained().items():
            if name not in weights or weights[name].shape != parameter.shape:
                problem = f"It has the shape {tuple(weights[name].shape)}." if name in weights else "It is missing."
                raise ConfigError(
                    f"The trained parameter '{name}' was asked for.",
                    problem,
                    "Check which model and technique it is for.",
                )
            parameter.copy_(weights[name])


def save_trained(
    folder: Path,
    model: TechniqueStage,
    description: TrainedDescription[TechniqueConfig],
    *,
    class_names: Sequence[str] = (),
) -> Path:
    """Write a whole model's trained parameters and then their description; return the folder.

    class_names: in class order, for transformers.  A regression's head is saved so that it predicts in the labels'
    original units.
    """
    config, name = description.config, description.model
    assert model.head is not None, "a whole model has a head"
    linear, head = model.head.output, dict[str, Tensor]()
    if isinstance(linear, nn.Linear):  # the backbone's own head is in its files
        bias = linear.bias.detach() * config.label_std + config.label_mean
        head = {"weight": linear.weight.detach() * config.label_std, "bias": bias}
    shape = published(name, head_task(config.kind)) if config.technique in ("full", "lora") else None
    state = {key: parameter.detach() for key, parameter in model.trained().items() if not key.startswith(_HEAD)}
    if shape is None:
        save_tensors(folder / TRAINED, state | {f"{_HEAD}{key}": tensor for key, tensor in head.items()})
    elif config.technique == "full":
        names = class_names or [f"LABEL_{number}" for number in range(config.num_outputs)]
        _save_whole(folder, model, head, name, names, shape)
    else:
        matrices = {key.removeprefix(_BACKBONE): tensor for key, tensor in state.items()}
        settings = {"r": config.lora_rank, "lora_alpha": config.lora_alpha, "lora_dropout": config.lora_dropout}
        save_lora(folder, matrices, head, model.backbone, base_of(name), shape, **settings)
    save_tokenizer(name, folder)
    full_description = replace(
        description, model=kept_name(name), config=replace(config, label_mean=0.0, label_std=1.0)
    )
    write_json(folder / TRAINED_DESCRIPTION, full_description)
    return folder


def _save_whole(
    folder: Path, model: TechniqueStage, head: Mapping[str, Tensor], base: str, names: Sequence[str], shape: Published
) -> None:
    config = model_config(base)
    config.id2label, config.label2id = dict(enumerate(names)), {name: number for number, name in enumerate(names)}
    with parameters_on_meta():
        full_model = published_model(config, shape.task)
    full_model.to_empty(device="cpu")
    stage = LayerStack(full_model.base_model).stage(0, model.backbone.num_layers)
    stage.load_state_dict(model.backbone.state_dict())
    full_model.get_submodule(shape.head).load_state_dict(dict(head))
    config.architectures, config.dtype = [type(full_model).__name__], "float32"
    save_tensors(folder / "model.safetensors", full_model.state_dict(), {"format": "pt"})
    write_text(folder / WHOLE_MODEL, config.to_json_string())


def load_trained(
    folder: Path | str, load: Callable[..., LayerStack] = load_stack
) -> tuple[TechniqueStage, TrainedDescription[TechniqueConfig]]:
    """Return the whole trained model, in evaluation mode.  load: loads its backbone, as load_stack does.

    Raises ConfigError if the folder holds none or it is damaged.
    """
    folder, request = Path(folder), f"The fine-tuned model '{folder}' was asked for."
    is_whole, is_peft = (folder / WHOLE_MODEL).is_file(), (folder / PEFT_CONFIG).is_file()
    weights = None if is_whole else PEFT_WEIGHTS if is_peft else TRAINED
    description, state = _load(folder, request, TrainedDescription[TechniqueConfig], TRAINED_DESCRIPTION, weights)
    generates = description.config.kind == "text_generation"
    stack = load(str(folder) if is_whole else description.model, with_head=generates)
    if description.quantization is not None:
        quantize(stack, description.quantization)
    model = TechniqueStage(stack.stage(0, stack.num_layers), description.config)
    if is_whole or is_peft:
        shape = published(str(folder) if is_whole else description.model, head_task(description.config.kind))
        assert shape is not None, "so it was saved"
        if is_whole:
            tensors = {
                name: tensor.read(torch.float32)
                for name, tensor in (stored_weights(str(folder)) or {}).items()
                if shape.head in name
            }
            state, prefix = dict(model.trained()), ""
        else:
            matrices = [name.removeprefix(_BACKBONE) for name in model.trained() if name.startswith(_BACKBONE)]
            tensors, prefix = state, "base_model.model."
            names = peft_names(model.backbone, matrices, shape.prefix)
            state = {
                f"{_BACKBONE}{parameter_name}": tensors[name]
                for parameter_name, name in names.items()
                if name in tensors
            }
        for key in ("weight", "bias"):
            state.pop(f"{_HEAD}{key}", None)
            if (name := f"{prefix}{shape.head}.{key}") in tensors:
                state[f"{_HEAD}{key}"] = tensors[name]
    set_trained(model, state)
    model.eval()
    return model, description


_MAKERS = {
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
}
_OTHER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    *TOKENIZER_FILES,
)


def published(name: str, task: PeftTask) -> Published | None:
    """Return how transformers' class for a task stores a model.  None if there is no such class.  Raises as
    model_config does.
    """
    config = model_config(name)
    if task in ("TOKEN_CLS", "QUESTION_ANS") and family_of(config.model_type).decoder is not None:
        return None
    try:
        with parameters_on_meta():
            full_model = published_model(config, task)
    except ValueError:  # raised by transformers if there is no such class
        return None
    prefix = next(
        f"{path}." if path else "" for path, module in full_model.named_modules() if module is full_model.base_model
    )
    return Published(
        task,
        prefix,
        next((head_name for head_name in ("classifier", "score", "qa_outputs") if hasattr(full_model, head_name)), ""),
    )


def published_model(config: Any, task: PeftTask) -> Any:
    """Return a model of transformers' class for a task.  Raises ValueError if there is no such class."""
    import transformers

    return getattr(transformers, _MAKERS[task]).from_config(config)


def head_task(kind: str) -> PeftTask:
    """Return peft's task name of the class that fits our head, by kind of task."""
    tasks: dict[str, PeftTask] = {"question_answering": "QUESTION_ANS", "text_generation": "CAUSAL_LM"}
    return tasks.get(kind, "TOKEN_CLS")


def kept_name(name: str) -> str:
    """Return a model name that works from any working folder: the full path of a local folder, other
    names unchanged.
    """
    path = user_path(name, "The model")
    return str(path.resolve()) if name not in EMBEDDED_MODELS and path.exists() else name


def base_of(name: str) -> str:
    """Return the name by which transformers finds a model: a folder's full path or a hub name.

    A tiny model's name is returned unchanged, although transformers does not know it.
    """
    place = name if is_tiny(name) else locate(name)
    return str(place.resolve()) if isinstance(place, Path) else place


def save_tokenizer(name: str, folder: Path) -> None:
    """Write a model's tokenizer into a folder in transformers' format.  An image model has nothing to write."""
    make_folder(folder)
    tokenizer = load_tokenizer(name)
    if not isinstance(tokenizer, TextTokenizer):
        return
    source = local_folder(name)
    for path in () if source is None else [source / file for file in _OTHER_FILES]:
        if path.is_file():
            with whole_file(folder / path.name) as part:
                shutil.copyfile(path, part)
    if not (folder / "tokenizer.json").is_file():
        tokens = {"pad_token": tokenizer.backend.id_to_token(tokenizer.pad_id), "sep_token": "[SEP]"}
        settings = {role: token for role, token in tokens.items() if role == "pad_token" or not tokenizer.joins_pairs}
        write_text(folder / "tokenizer.json", tokenizer.backend.to_str())
        write_text(
            folder / "tokenizer_config.json",
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings}) + "\n",
        )
