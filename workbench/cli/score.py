"""`workbench score`: a task of prompts answered by a model as it is, or by what P-RGE made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from workbench.cli.job import DEFAULTS, Data, MaxLength, Samples, TaskName
from workbench.cli.output import Json, print_json, say
from workbench.core.errors import ConfigError

Calibration = Literal["none", "content_free", "mean_prior"]
"""What is taken out of the scores: nothing, what a prompt without content gives, or the mean over the training prompts."""


def score(
    model: Annotated[str, typer.Argument(help="A model's name (zero-shot), a run's folder, or a file of trained values.")],
    task: TaskName = DEFAULTS.task,
    calibration: Annotated[Calibration, typer.Option(help="Prior of the label words to take out.")] = "none",
    split: Annotated[Literal["validation", "test"], typer.Option(help="Samples that are answered.")] = "test",
    samples: Samples = None,
    max_length: MaxLength = 256,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Answer a task's prompts by a model, zero-shot or trained by forward passes, and count what is right."""
    from workbench.models.loading import load_tokenizer, model_facts
    from workbench.models.zeroth_order import TrainableConfig, find_trained, load_causal_model, load_trained
    from workbench.tasks.prompts import evaluate, load_prompt_task

    trained = find_trained(model)
    if trained is None:
        _require_generating(model)
    else:
        loaded, description = load_trained(trained)
    limit: dict[str, Any] = {f"{split}_samples": samples}
    found = load_prompt_task(task, data=data, **limit)
    if trained is None:
        loaded, name, what = load_causal_model(model, TrainableConfig()), model, f"{model}, zero-shot"
    else:
        name, what = description.model, f"{description.model} with the values of {model}"
    facts = model_facts(name)
    chosen = getattr(found, split)
    say(f"{what}: {len(chosen)} prompts of {task}")
    made = evaluate(
        loaded.logits_at,
        found,
        chosen,
        load_tokenizer(name),
        is_causal=facts.is_causal,
        max_length=min(max_length, facts.max_length),
        calibration=calibration,
    )
    if as_json:
        print_json({"model": name, "task": task, "split": split, "samples": len(chosen), "metric": made.metric, "value": made.value})
    else:
        print(f"{made.metric:<11} {made.value:.3f}  ({split} split, {len(chosen)} samples, calibration: {calibration})")


def _require_generating(model: str) -> None:
    from workbench.models.loading import model_facts, require_known
    from workbench.models.saving import DESCRIPTION

    for folder in (Path(model), Path(model) / "adapter"):
        if (folder / DESCRIPTION).is_file():
            raise ConfigError(
                f"A score of '{model}' on prompts was asked for.",
                "It holds an adapter that another method trained: it answers samples, not prompts.",
                "Its run printed its score on the test split; to predict with it, load it with load_adapter (docs/models.md).",
            )
    require_known(model)
    facts = model_facts(model)
    if not facts.is_causal and facts.num_encoder_layers is None:
        raise ConfigError(
            f"A zero-shot score of '{model}' was asked for.",
            "It predicts no words: its head has yet to be trained.",
            "Give a run's folder, or choose a model that generates (GPT-2, OPT, Llama, T5, BART).",
        )
