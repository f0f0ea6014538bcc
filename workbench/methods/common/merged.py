"""A run's result as one whole model, for other programs: LoRA merged into the weights."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from workbench.core.errors import ConfigError
from workbench.core.serial import shown
from workbench.methods.common.result import load_result
from workbench.methods.common.result_file import find_result
from workbench.models.configuration import model_config, model_facts, require_generating
from workbench.models.generation import GenerationRules
from workbench.models.gguf_file import GgufType, require_gguf, write_gguf
from workbench.models.loading import load_tokenizer
from workbench.models.lora import PEFT_CONFIG
from workbench.models.merging import merged_lora, save_whole, whole_model
from workbench.models.saving import WHOLE_MODEL, PeftTask
from workbench.models.tokenizer import TextTokenizer

GGUF = ".gguf"


class Merged(NamedTuple):
    """A written model.  note: what differs from the run's own computation, or ''."""

    path: str
    parameters: int
    file_bytes: int
    note: str


def export_merged(place: str, out: Path, dtype: GgufType) -> Merged:
    """Write a run's result, or a base model, as one whole model: a folder for transformers, or a .gguf file.

    dtype: the dtype of a GGUF file's matrices; a folder keeps the base model's.  Raises ConfigError for a technique
    that cannot be merged, and as save_whole and write_gguf do.
    """
    folder, note = find_result(place), ""
    if folder is None:
        name, model = place, None
        require_generating(name, f"The whole model of '{name}' was asked for.")
    else:
        about = load_result(folder).about
        name = about.job.model
        _require_mergeable(folder, about.technique)
        if about.job.options.get("backbone_dtype", "float32") != "float32":
            note = "The run computed over weights in few bits; the matrices were added to the base model's own weights."
        model = None
    tokenizer = load_tokenizer(name)
    assert isinstance(tokenizer, TextTokenizer), "LoRA and texts are of words"
    if out.suffix == GGUF:
        require_generating(name, f"'{name}' as a GGUF file was asked for.")
        require_gguf(name, model_config(name), tokenizer)
    if folder is None:
        task: PeftTask = "CAUSAL_LM" if model_facts(name).num_encoder_layers is None else "SEQ_2_SEQ_LM"
        model = whole_model(name, task)
    else:
        model = merged_lora(name, folder)
    if out.suffix == GGUF:
        write_gguf(out, name, model, tokenizer, dtype)
        written = out.stat().st_size
    else:
        ends = {*GenerationRules(name).ends, *([] if tokenizer.end_id is None else [tokenizer.end_id])}
        save_whole(out, name, model, tokenizer, ends)
        written = sum(path.stat().st_size for path in out.iterdir())
    return Merged(str(out), sum(value.numel() for value in model.parameters()), written, note)


def _require_mergeable(folder: Path, technique: str) -> None:
    request = f"The result '{shown(str(folder), 200)}' as one whole model was asked for."
    if (folder / WHOLE_MODEL).is_file():
        raise ConfigError(request, "It is one: full fine-tuning trained all weights.", "Take the folder as it is.")
    if not (folder / PEFT_CONFIG).is_file():
        problem = f"{technique} is no change of the model's weight matrices that could be added to them."
        todo = "Merge a result of LoRA or LoRA-FA; use this one as it is, with `workbench predict` or `chat`."
        raise ConfigError(request, problem, todo)
