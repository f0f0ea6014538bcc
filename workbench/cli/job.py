"""The options that make a job, shared by the commands that take one; their defaults are the Job's own."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from workbench.core.catalogue import DEFAULT_CLUSTER
from workbench.core.errors import ConfigError
from workbench.core.job import ADAPTER_RATE, FULL_RATE, Job
from workbench.core.methods import declaration_of, registered
from workbench.methods.base import published_settings

DEFAULTS = Job()

ClusterName = Annotated[str, typer.Option("--cluster", help="Cluster by name or .toml file (`workbench devices --list`).")]
Model = Annotated[
    str,
    typer.Option(
        help="A name that comes with the workbench (all-MiniLM-L6-v2, SmolLM2-135M), a Hugging Face folder, or a name on its hub."
    ),
]
TaskName = Annotated[str, typer.Option("--task", help="Task, such as sentiment or mrpc.")]
Seed = Annotated[int, typer.Option(help="Of splits, order and initial weights.")]
MaxLength = Annotated[int, typer.Option(help="Word pieces at which a sample is cut.")]
Samples = Annotated[int | None, typer.Option(help="Use so many samples of this split.", show_default="all")]
EvalSamples = Annotated[int | None, typer.Option(help="Use so many samples of the validation and of the test split.", show_default="all")]
Data = Annotated[
    str | None,
    typer.Option(help="Your own file (CSV, JSON, JSONL, Parquet), folder or hub name; or the folder of a task that does not come along."),
]
Columns = Annotated[
    str, typer.Option(metavar="ROLE=NAME,...", help="Of your own data, where not found: text=review,pair=reply,label=stars.")
]
WorkFolder = Annotated[
    Path | None, typer.Option("--workdir", help="Keep cache, checkpoints and the adapter here.", show_default="one under the cache folder")
]
ReportFile = Annotated[Path | None, typer.Option("--report", help="Write the Report (JSON) here.")]

CLUSTER = DEFAULT_CLUSTER
_TASK = typer.Option("--task", help="As sentiment, mrpc; of own --data classification, regression.", show_default="sentiment")
_OPTION = typer.Option("--option", metavar="KEY=VALUE", help="Setting of the method (below); may be repeated.")
_FAULTS = "Kill, freeze, slow a device, take its memory, let it leave or return: kill:beta@step40, slow:beta:4@step20-60; may be repeated."
_CONVERGED = "End once the mean loss has not fallen 1 % for so many epochs; 0 does all epochs."
_PUBLISHED = "The paper's settings where you give none, instead of ours; reports name the differences."
_BACKUP = "Steps between two backups that devices keep for each other; 0 keeps steps in the folder."
OPTIONS: dict[str, Any] = {
    "method": Annotated[str, typer.Option(help="One of those below.")],
    "model": Model,
    "task": Annotated[str | None, _TASK],
    "epochs": Annotated[int, typer.Option(help="Passes over the training data.")],
    "seed": Seed,
    "batch_size": Annotated[int, typer.Option(help="Samples of one optimizer step.")],
    "micro_batches": Annotated[int, typer.Option(help="How many a mini-batch is cut into.")],
    "learning_rate": Annotated[
        float | None, typer.Option(help="Peak learning rate.", show_default=f"{ADAPTER_RATE}; full fine-tuning: {FULL_RATE}")
    ],
    "max_length": MaxLength,
    **dict.fromkeys(("train_samples", "validation_samples", "test_samples"), Samples),
    "data": Data,
    "columns": Columns,
    "options": Annotated[list[str] | None, _OPTION],
    "faults": Annotated[list[str] | None, typer.Option("--fault", metavar="KIND:DEVICE[:FACTOR]@FROM[-TO]", help=_FAULTS)],
    "converged_after": Annotated[int, typer.Option(help=_CONVERGED)],
    "backup_every": Annotated[int, typer.Option(help=_BACKUP)],
    "as_published": Annotated[bool, typer.Option("--as-published", help=_PUBLISHED)],
}
PLANNED_FIELDS = ("method", "model", "task", "batch_size", "micro_batches", "max_length", "data", "columns", "options", "as_published")
SIMULATED_FIELDS = (*PLANNED_FIELDS, "epochs", "seed", "train_samples", "faults", "converged_after", "backup_every")
ALL_FIELDS = tuple(OPTIONS)


def takes_job(*fields: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for a command whose first argument is a Job: it gets an option for each of these fields instead."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def filled(**given: Any) -> None:
            read = {name: given.pop(name) for name in fields}
            read["task"] = task_of(read["task"], read["data"])
            read["options"] = parse_options(read["options"])
            if "test_samples" in fields and (samples := given.pop("eval_samples")) is not None:
                read = {**read, **{name: read[name] or samples for name in ("validation_samples", "test_samples")}}
            if "faults" in read:
                read["faults"] = "; ".join(read["faults"] or ())
            command(Job(**read), **given)

        kinds = {name: OPTIONS[name] for name in fields} | ({"eval_samples": EvalSamples} if "test_samples" in fields else {})
        unset = ("task", "options", "faults", "eval_samples")
        defaults = {name: None if name in unset else getattr(DEFAULTS, name) for name in kinds}
        return with_options(command, filled, kinds, defaults, "job")

    return decorate


def with_options(
    command: Callable[..., None], filled: Callable[..., None], kinds: Mapping[str, Any], defaults: Mapping[str, Any], *replaced: str
) -> Callable[..., None]:
    """Return `filled` under the command's name, with options of these kinds in place of `replaced`, the command's own ones behind them."""
    own = [one for one in inspect.signature(command, eval_str=True).parameters.values() if one.name not in replaced]
    kinds = {**kinds, **{one.name: one.annotation for one in own}}
    defaults = {**defaults, **{one.name: one.default for one in own}}
    made = functools.wraps(command)(filled)
    made.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kinds[name]) for name in kinds]
    )
    made.__annotations__ = kinds
    return made


def task_of(task: str | None, data: str | None) -> str:
    """Return the task that was asked for; without a word of it the default, or what one does with data of one's own."""
    return task or (DEFAULTS.task if data is None else "classification")


def parse_options(given: list[str] | None) -> dict[str, Any]:
    """Return the method's settings from KEY=VALUE words."""
    found: dict[str, Any] = {}
    for word in given or ():
        key, value = key_and_value(word, "reduction=8")
        if key in found:
            raise ConfigError(f"The option '{word}' was given.", f"{key}={found[key]} was given, too.", "Name it once.")
        found[key] = parsed(value)
    return found


def key_and_value(word: str, example: str) -> tuple[str, str]:
    """Return the parts of KEY=VALUE.  Raises ConfigError for another word."""
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise ConfigError(f"The option '{word}' was given.", "It is not KEY=VALUE.", f"Write, for example, --option {example}.")
    return key, value


def parsed(text: str) -> Any:
    """Return a value that is written as JSON, or else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # also a number of thousands of digits
        return text


class JobCommand(TyperCommand):
    """A command whose help ends with the methods' options."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        lines = (f"{method}: {described_options(method)}" for method in registered())
        self.epilog = "\n\n".join(("--option KEY=VALUE, by method, with the defaults:", *lines))
        super().format_help(ctx, formatter)


def described_options(method: str) -> str:
    """Return a method's options with their defaults in words, and the paper's values where these differ."""
    try:
        declared = declaration_of(method)
    except ConfigError as error:  # a package of someone else's
        return error.found
    published, _ = published_settings(declared.options)
    words = (
        f"{name}={default}" + (f" (paper: {published[name].value})" if name in published else "")
        for name, default in declared.defaults.items()
    )
    return ", ".join(words)
