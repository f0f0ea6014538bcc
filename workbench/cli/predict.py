"""`workbench predict` and `workbench evaluate`: a run's trained model answers new samples, or is scored on labelled
ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from workbench.cli.job import DEFAULTS, Columns, Data, Samples
from workbench.cli.output import Json, print_json, print_table, print_text, say
from workbench.core.errors import ConfigError

Calibration = Literal["none", "content_free", "mean_prior"]
"""The prior that is removed from the scores: none, the scores of a prompt without content, or the mean over the
training prompts."""
ResultFolder = Annotated[str, typer.Argument(help="A run's folder (`run --workdir`), or its adapter/.")]


def predict(
    result: ResultFolder,
    texts: Annotated[list[str] | None, typer.Argument(help="The sentences.")] = None,
    pair: Annotated[
        list[str] | None, typer.Option(help="Second text of each sentence, for tasks on pairs; may be repeated.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="A text file with one sentence per line; a CSV, JSONL or Parquet file; or SQuAD's JSON."),
    ] = None,
    columns: Columns = "",
    as_json: Json = False,
) -> None:
    """Predict with a run's trained model: the class and its probability, or the number."""
    if bool(texts) == (file is not None) or (pair and len(pair) != len(texts or ())):
        raise ConfigError(
            "A prediction was asked for.",
            f"Given are: sentences {len(texts or ())}, second texts {len(pair or ())}, file '{file or ''}'.",
            "Give sentences, each with its --pair if there are pairs, or --file FILE.",
        )
    from workbench.methods.common.result import load_result
    from workbench.tasks.characters import whole_characters

    model = load_result(result)
    text_columns = [whole_characters(column) for column in (texts, pair) if column]
    rows = model.read(str(file), columns or None) if file is not None else list(zip(*text_columns, strict=True))
    answers = model.predict(rows)
    if as_json:
        names = model.about.texts
        print_json(
            [
                {"sample": dict(zip(names, row, strict=True)), **answer._asdict()}
                for row, answer in zip(rows, answers, strict=True)
            ]
        )
        return
    shown = [answer.answer if isinstance(answer.answer, str) else f"{answer.answer:.4g}" for answer in answers]
    sure = [f"{max(answer.probabilities.values()):.2f}" if answer.probabilities else "" for answer in answers]
    table = zip(shown, sure, (" | ".join(row) for row in rows), strict=True)
    print_table(f"{model.about.job.task} by {result}", ("answer", "probability", "text"), table)


def push(
    result: ResultFolder,
    repository: Annotated[str, typer.Argument(help="OWNER/NAME on the hub; it is created if it does not exist.")],
    public: Annotated[bool, typer.Option("--public", help="Make it public. Otherwise only you can see it.")] = False,
    as_json: Json = False,
) -> None:
    """Push a run's trained model to the Hugging Face hub: weights, tokenizer and model card."""
    from workbench.methods.common.sharing import push_to_hub

    address = push_to_hub(result, repository, public=public)
    if as_json:
        print_json(address)
    else:
        print_text(address)


def evaluate(
    model: Annotated[
        str, typer.Argument(help="A run's folder, a file of trained values, or a model's name (prompts, zero-shot).")
    ],
    data: Data = None,
    columns: Columns = "",
    split: Annotated[
        Literal["validation", "test"], typer.Option(help="Which split to score, if the data have splits.")
    ] = "test",
    samples: Samples = None,
    calibration: Annotated[Calibration, typer.Option(help="Which prior of the label words to correct for.")] = "none",
    task: Annotated[str | None, typer.Option(help="Task of a zero-shot model.", show_default=DEFAULTS.task)] = None,
    max_length: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of tokens per prompt of a zero-shot model.", show_default="256"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Score a run's trained model on its test split or on other data, or a model's zero-shot answers to a task's
    prompts.
    """
    from workbench.methods.common.result import load_result
    from workbench.methods.common.result_file import find_result

    if samples is not None and samples < 1:
        raise ConfigError(f"An evaluation of {samples} samples was asked for.", "That is none.", "Raise --samples.")
    if find_result(model) is None:
        evaluation = _prompted(
            model, task or DEFAULTS.task, data, columns, split, samples, calibration, max_length or 256
        )
    else:
        if task is not None or max_length is not None:
            raise ConfigError(
                f"An evaluation of '{model}' with another task or max_length was asked for.",
                "It has those of its training.",
                "Leave --task and --max-length out.",
            )
        evaluation = load_result(model).evaluate(
            data, columns or None, split=split, samples=samples, calibration=calibration
        )
    if as_json:
        print_json({"model": model, **evaluation._asdict()})
    else:
        for name, value in evaluation.metrics.items():
            print_text(f"{name:<11} {value:.3f}")
        calibrated = "" if calibration == "none" else f", calibration {calibration}"
        print_text(f"({evaluation.samples} samples: {evaluation.source}{calibrated})")


def _prompted(
    model: str,
    task: str,
    data: str | None,
    columns: str,
    split: str,
    samples: int | None,
    calibration: Calibration,
    max_length: int,
) -> Any:
    """Return the score of a model as it is, or of a file of trained values, on a task's prompts."""
    from workbench.methods.common.result import Evaluation, model_encoder
    from workbench.methods.p_rge.zeroth_order import TrainableConfig, find_trained, load_causal_model, load_trained
    from workbench.models.configuration import require_generating
    from workbench.tasks import load_task
    from workbench.tasks.prompts import evaluate as score

    name, trained = model, find_trained(model)
    if trained is None:
        require_generating(model, f"A zero-shot score of '{model}' was asked for.")
    else:
        loaded, description = load_trained(trained)
        name = description.model
    limit: dict[str, Any] = {f"{split}_samples": samples}
    prompt_task = load_task(task, data=data, columns=columns, prompted=True, **limit)
    if trained is None:
        loaded = load_causal_model(model, TrainableConfig())
    chosen, unlabelled = getattr(prompt_task, split).prompts, prompt_task.train.prompts
    say(
        f"{name}{', zero-shot' if trained is None else f' with the values of {model}'}: {len(chosen)} prompts of {task}"
    )
    encoder = model_encoder(prompt_task.template, name, max_length)
    scored = score(loaded.logits_at, chosen, encoder, calibration=calibration, unlabelled=unlabelled)
    return Evaluation({scored.metric: scored.value}, len(chosen), f"the {split} split of {task}")
