"""The description of a trained model, and its model card: its output, its quality, its origin, and code that
loads it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.names import Kind
from workbench.core.ranges import Tokens, require_ranges
from workbench.core.serial import shown
from workbench.models.configuration import is_tiny
from workbench.models.lora import PEFT_CONFIG, read_peft_config
from workbench.models.saving import WHOLE_MODEL
from workbench.tasks.wording import Prompt

CARD = "README.md"
_OURS = """\
from workbench.methods.common.result import load_result

model = load_result(".")  # this folder
[answer] = model.predict([{sample}])
print(answer.answer, answer.probabilities)
"""
_THEIRS = """\
import torch
from {library} import {maker}
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")  # this folder
model = {maker}.from_pretrained("."{settings}).eval()


def predict({names}):
    inputs = tokenizer({read}, return_tensors="pt", truncation=True, max_length={length})
    with torch.no_grad():
        logits = model(**inputs).logits[0]{logits}
    return {answer}


print(predict({example}))
"""
_MEAN = ".mean(dim=0)  # the head stands on the mean of the last hidden states"
_WORDS = """\
[-1]
    first = [tokenizer({read} + word).input_ids[inputs["input_ids"].shape[1]] for word in {words}]
    logits = logits[first]  # of the words that stand for the classes, behind the prompt"""
_PIPELINES = {
    "question_answering": "question-answering",
    "token_classification": "token-classification",
    "text_generation": "text-generation",
}
_TOKENS = {
    "question_answering": "ModelForQuestionAnswering",
    "token_classification": "ModelForTokenClassification",
    "text_generation": "ModelForCausalLM",
}
HUB_NAMES = {
    "all-MiniLM-L6-v2": "sentence-transformers/all-MiniLM-L6-v2",
    "SmolLM2-135M": "HuggingFaceTB/SmolLM2-135M",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The trained model's task, data and metrics.

    job: the run's job; a local model or file has its full path.  technique: the technique, such as 'lora'.
    base_digest: digest of the base model's weight files.
    kind: a Task's or a Prompt's kind.  texts: names of a sample's texts, in order; empty for pictures.  class_names: in
    class order.
    words: label words of text-to-text, one for each class.  max_length: number of tokens to which samples are
    truncated.  may_be_none: as in Task.
    metrics: metrics on the test split; `obtained` says how they were measured.  plan, source: the devices and data of
    the training, in words.
    digests: digests of each split's samples, which show whether the data changed after the training.
    """

    job: Job
    technique: str
    base_digest: str
    kind: Kind
    texts: tuple[str, ...]
    class_names: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    prompt: Prompt | None = None
    may_be_none: bool = False
    max_length: Tokens
    metrics: dict[str, float]
    obtained: str
    plan: str
    source: str
    digests: dict[str, str]
    schema_version: Literal[2] = 2

    def __post_init__(self) -> None:
        require_ranges(self, "A result")
        if twice := [name for name in dict.fromkeys(self.class_names) if self.class_names.count(name) > 1]:
            request = f"A result with {len(self.class_names)} classes was asked for."
            raise ConfigError(request, f"Two are named '{shown(twice[0])}'.", "Train again.")


def model_card(folder: Path, about: Result) -> str:
    """Return the text of a README.md with the hub's model card metadata.  folder: contains the trained weights."""
    from huggingface_hub import EvalResult, ModelCardData

    job, (library, words, code) = about.job, _loading(folder, about)
    source = _plain(about.source)
    kind = _PIPELINES.get(about.kind, "text-classification") if about.texts else "image-classification"
    common: Any = {"task_type": kind, "dataset_type": job.task, "dataset_name": about.source, "dataset_split": "test"}
    title = f"{Path(job.model).name} for {job.task}, trained by {about.technique.replace('_', ' ')}"
    data = ModelCardData(
        library_name=library,
        base_model=None if is_tiny(job.model) or Path(job.model).is_dir() else HUB_NAMES.get(job.model, job.model),
        pipeline_tag=kind,
        tags=[about.technique],
        metrics=list(about.metrics),
        model_name=title,
        eval_results=[
            EvalResult(**common, metric_type=name, metric_value=value) for name, value in about.metrics.items()
        ],
    )
    names = ", ".join(map(_plain, about.class_names))
    answer = f"one of the classes {names}" if names else "a number" if about.kind == "regression" else "a text"
    if about.kind == "token_classification":
        answer = f"one of the classes {names} for each word"
    shell = '"a sentence"' + (' --pair "its second text"' if len(about.texts) > 1 else "")
    metrics = "\n".join(f"| {_plain(name)} | {value:.4f} |" for name, value in about.metrics.items())
    options = "".join(f", {name} = {_plain(value)}" for name, value in job.options.items())
    rate = job.peak_learning_rate
    settings = f"{job.epochs} epochs, batches of {job.batch_size}, learning rate {rate:g}, seed {job.seed}"
    return f"""---
{data.to_yaml()}
---
# {_plain(title)}

It reads {" and ".join(map(_plain, about.texts)) or "a picture"} and answers with {answer}.

- Base model: {_code(job.model)}
- Method: {_code(job.method)}{options}; {settings}
- Data: {source}, each of at most {about.max_length} tokens
- Plan: {_plain(about.plan)}

| metric | value |
| --- | --- |
{metrics}

Measured {_plain(about.obtained)}.

## How to load it

{words}

```python
{code.rstrip()}
```

In the shell: `workbench predict FOLDER {shell}`, `workbench evaluate FOLDER --data FILE`.
`result.json` holds all this for programs.
"""


_MARKDOWN = re.compile(r"([\\`*_\[\]<>&|~$])")


def _plain(value: object) -> str:
    """Return a name or text of the user's data as Markdown that only shows it, without HTML, links or code."""
    return _MARKDOWN.sub(r"\\\1", shown(value if isinstance(value, str) else str(value), 400))


def _code(value: str) -> str:
    """Return a name as Markdown's inline code, which a backtick would end."""
    return "`" + shown(value, 400).replace("`", "'") + "`"


def _loading(folder: Path, about: Result) -> tuple[str, str, str]:
    """Return the library that loads a folder, notes on loading, and the loading code."""
    name, prompt = about.job.model, about.prompt
    names = [text if text.isidentifier() else f"text{number}" for number, text in enumerate(about.texts)]
    example = ", ".join(f'"Some {text} of your own."' for text in names)
    reading = (
        ", ".join(names)
        if prompt is None
        else f"{prompt.text!r}.format({', '.join(f'{text}={text}' for text in about.texts)})"
    )
    answer = (
        "logits.item()"
        if about.kind == "regression"
        else f"dict(zip({list(about.class_names)}, logits.softmax(0).tolist()))"
    )
    filled: dict[str, Any] = {
        "names": ", ".join(names),
        "example": example,
        "read": reading,
        "answer": answer,
        "length": about.max_length,
    }
    ours = _OURS.format(sample=f"({example})" if len(names) > 1 else example)
    if about.kind in _TOKENS and (
        (folder / WHOLE_MODEL).is_file() or ((folder / PEFT_CONFIG).is_file() and not is_tiny(name))
    ):
        library, maker = ("transformers", "Auto") if (folder / WHOLE_MODEL).is_file() else ("peft", "AutoPeft")
        description = (
            f"`{maker}{_TOKENS[about.kind]}.from_pretrained` of {library} loads it. The workbench reads the answers, "
            "too."
        )
        return (
            library,
            description
            + (" Its prompt is the model's chat template, or Alpaca's." if about.kind == "text_generation" else ""),
            ours,
        )
    if (folder / WHOLE_MODEL).is_file():
        filled |= {
            "library": "transformers",
            "maker": "AutoModelForTokenClassification",
            "settings": "",
            "logits": _MEAN,
        }
        return "transformers", "By transformers; the folder holds the whole model.", _THEIRS.format(**filled)
    if (folder / PEFT_CONFIG).is_file() and not is_tiny(name):
        filled |= {"library": "peft", "settings": ", dtype=torch.float32"}
        elsewhere = HUB_NAMES.get(name, "the base model's name on the hub, or its folder")
        description = (
            f"By peft. On another machine write {elsewhere} into `adapter_config.json`, as `base_model_name_or_path`."
        )
        if {"precision", "backbone_dtype"} & set(about.job.options):
            description += " It computes with the base model's own weights, not with those in few bits of the training."
        shape = read_peft_config(folder)["task_type"]
        if shape == "TOKEN_CLS":
            filled["settings"] += f", num_labels={len(about.class_names) or 1}"
            return (
                "peft",
                description,
                _THEIRS.format(**filled, maker="AutoPeftModelForTokenClassification", logits=_MEAN),
            )
        if shape == "CAUSAL_LM" and prompt is not None and prompt.words:
            logits = _WORDS.format(read=reading, words=list(prompt.words))
            return "peft", description, _THEIRS.format(**filled, maker="AutoPeftModelForCausalLM", logits=logits)
    description = (
        f"Only by the workbench{f': `{name}` is a random model that nothing else can make' if is_tiny(name) else ''}."
    )
    return "edge-llm-workbench", description, ours
