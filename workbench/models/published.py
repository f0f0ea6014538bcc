"""Which class of transformers holds a model with the head that was trained, and what peft and transformers find beside the weights.

Our head is a matrix on the mean of the last hidden states.  W mean(h) + b is the mean of W h + b, so a token classification whose logits
are averaged over the attention mask is the same model.  Spans and tags are those classes' own logits.  Families whose pooling differs
(encoder-decoders) or that have no such class (OPT, ViT) are kept in our own format.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal, NamedTuple

from workbench.core.files import make_folder, whole_file
from workbench.core.serial import write_text
from workbench.models.families import family_of
from workbench.models.hub import EMBEDDED_MODELS, locate, snapshot_of
from workbench.models.loading import TOKENIZER_FILES, is_tiny, load_tokenizer, model_config
from workbench.models.partial_loading import parameters_on_meta
from workbench.models.tokenizer import TextTokenizer

PeftTask = Literal["TOKEN_CLS", "QUESTION_ANS", "CAUSAL_LM", "SEQ_2_SEQ_LM"]
_MAKERS = {
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
}
_BESIDE = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", *TOKENIZER_FILES)


class Published(NamedTuple):
    """task: peft's name of it.  prefix: of the base model's parameters in the class.  head: the name of its last matrix."""

    task: PeftTask
    prefix: str
    head: str


def published(name: str, task: PeftTask) -> Published | None:
    """Return how transformers' class of a task holds a model, None if there is none.  Raises as model_config does."""
    config = model_config(name)
    if task in ("TOKEN_CLS", "QUESTION_ANS") and family_of(config.model_type).decoder is not None:
        return None
    try:
        with parameters_on_meta():
            whole = published_model(config, task)
    except ValueError:  # transformers' answer where it has no such class
        return None
    prefix = next(f"{path}." if path else "" for path, module in whole.named_modules() if module is whole.base_model)
    return Published(task, prefix, next((own for own in ("classifier", "score", "qa_outputs") if hasattr(whole, own)), ""))


def published_model(config: Any, task: PeftTask) -> Any:
    """Return a model of transformers' class of a task.  Raises ValueError if there is no such class."""
    import transformers

    return getattr(transformers, _MAKERS[task]).from_config(config)


def head_task(kind: str) -> PeftTask:
    """Return peft's name of the class that holds a head of ours, by the kind of the task."""
    return "QUESTION_ANS" if kind == "question_answering" else "TOKEN_CLS"


def kept_name(name: str) -> str:
    """Return the name under which a model is found from any working folder: a local folder's whole path, all others as they are."""
    is_local = name not in EMBEDDED_MODELS and Path(name).expanduser().is_dir()
    return str(Path(name).expanduser().resolve()) if is_local else name


def base_of(name: str) -> str:
    """Return where transformers finds a model: a folder's whole path or a hub name; of a tiny model its name, which only we know."""
    place = name if is_tiny(name) else locate(name)
    return str(place.resolve()) if isinstance(place, Path) else place


def save_tokenizer(name: str, folder: Path) -> None:
    """Put a model's tokenizer into a folder as transformers reads it; nothing of one that reads pictures."""
    make_folder(folder)
    tokenizer = load_tokenizer(name)
    if not isinstance(tokenizer, TextTokenizer):
        return
    place = None if is_tiny(name) else locate(name)
    source = snapshot_of(place) if isinstance(place, str) else place
    for path in () if source is None else [source / file for file in _BESIDE]:
        if path.is_file():
            with whole_file(folder / path.name) as part:
                shutil.copyfile(path, part)
    if not (folder / "tokenizer.json").is_file():
        tokens = {"pad_token": tokenizer.pad_id, "sep_token": tokenizer.separator_id}
        known = {role: tokenizer.backend.id_to_token(index) for role, index in tokens.items() if index is not None}
        write_text(folder / "tokenizer.json", tokenizer.backend.to_str())
        write_text(folder / "tokenizer_config.json", json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **known}) + "\n")
