"""The options that make a job, shared by the commands that take one; their defaults are the Job's own."""

from __future__ import annotations

import functools
import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from workbench.cli.output import print_text
from workbench.core.catalogue import DEFAULT_CLUSTER
from workbench.core.errors import ConfigError
from workbench.core.job import ADAPTER_RATE, FULL_RATE, Job
from workbench.core.methods import declaration_of, registered
from workbench.methods.option_values import published_settings

DEFAULTS = Job()


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether an option was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


ClusterName = Annotated[
    str, typer.Option("--cluster", help="Cluster by name or .toml file (`workbench devices --list`).")
]
Model = Annotated[
    str,
    typer.Option(
        help="A model that comes with the workbench (all-MiniLM-L6-v2, SmolLM2-135M), a folder in Hugging Face format, "
        "a GGUF file, or a name on the Hugging Face hub. Plans and simulations also take shape:llama-7b or a "
        "config.json."
    ),
]
TaskName = Annotated[str, typer.Option("--task", help="Task, such as sentiment or mrpc.")]
Seed = Annotated[int, typer.Option(help="Random seed of splits, data order and initial weights.")]
MaxLength = Annotated[int, typer.Option(help="Maximum number of tokens per sample; longer samples are cut.")]
Samples = Annotated[int | None, typer.Option(help="Use only this many samples of the split.", show_default="all")]
EvalSamples = Annotated[
    int | None,
    typer.Option(help="Use only this many samples of the validation and of the test split.", show_default="all"),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Your own data: a file (CSV, JSON, JSONL, Parquet), a folder, or a name on the hub. Or the folder with "
        "the data of a task that the workbench does not contain."
    ),
]
Columns = Annotated[
    str,
    typer.Option(
        metavar="ROLE=NAME",
        help="Which columns of your data to use, if their names are unusual: text=review,pair=reply,label=stars.",
    ),
]
WorkFolder = Annotated[
    Path | None,
    typer.Option(
        "--workdir",
        help="Folder for the activation cache, the snapshots and the adapter.",
        show_default="one under the cache folder",
    ),
]
ReportFile = Annotated[Path | None, typer.Option("--report", help="Write the Report (JSON) to this file.")]

CLUSTER = DEFAULT_CLUSTER
_TASK = typer.Option(
    "--task",
    help="Task, such as sentiment or mrpc. For your own --data: classification, regression.",
    show_default="sentiment",
)
_OPTION = typer.Option("--option", metavar="KEY=VALUE", help="A setting of the method (see below); may be repeated.")
_FAULTS = (
    "Kill, freeze or slow a device, take its memory, or let it leave or return. Examples: kill:beta@step40, "
    "slow:beta:4@step20-60. May be repeated."
)
_CONVERGED = "Stop when the mean loss has not fallen by 1 % for this many epochs. 0: run all epochs."
_PUBLISHED = "Use the paper's settings as defaults instead of ours. Reports name the differences."
_EVERY = (
    "Steps between two snapshots. After a device is lost, the run continues from the last snapshot. 0: after every "
    "step, if the state is small."
)
_TO = (
    "Where snapshots are stored. disk: in the run's folder. neighbour: in memory, with a copy of each device's on the "
    "next device."
)
OPTIONS: dict[str, Any] = {
    "method": Annotated[str, typer.Option(help="Method that trains or answers. All methods are named below.")],
    "model": Model,
    "task": Annotated[str | None, _TASK],
    "epochs": Annotated[int, typer.Option(help="Passes over the training data.")],
    "seed": Seed,
    "batch_size": Annotated[int, typer.Option(help="Samples per optimizer step.")],
    "micro_batches": Annotated[int, typer.Option(help="Micro-batches per mini-batch.")],
    "learning_rate": Annotated[
        float | None,
        typer.Option(help="Peak learning rate.", show_default=f"{ADAPTER_RATE}; full fine-tuning: {FULL_RATE}"),
    ],
    "max_length": MaxLength,
    **dict.fromkeys(("train_samples", "validation_samples", "test_samples"), Samples),
    "data": Data,
    "columns": Columns,
    "options": Annotated[list[str] | None, _OPTION],
    "faults": Annotated[list[str] | None, typer.Option("--fault", metavar="FAULT", help=_FAULTS)],
    "converged_after": Annotated[int, typer.Option(help=_CONVERGED)],
    "snapshot_every": Annotated[int, typer.Option(help=_EVERY)],
    "snapshot_to": Annotated[str, typer.Option(help=_TO)],
    "as_published": Annotated[bool, typer.Option("--as-published", help=_PUBLISHED)],
}
PLANNED_FIELDS = (
    "method",
    "model",
    "task",
    "batch_size",
    "micro_batches",
    "max_length",
    "data",
    "columns",
    "options",
    "as_published",
)
SIMULATED_FIELDS = (
    *PLANNED_FIELDS,
    "epochs",
    "seed",
    "train_samples",
    "faults",
    "converged_after",
    "snapshot_every",
    "snapshot_to",
)
ALL_FIELDS = tuple(OPTIONS)


def takes_job(*fields: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for a command whose first argument is a Job.  The command gets an option for each of these
    fields instead.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def filled(**values: Any) -> None:
            job_values = {name: values.pop(name) for name in fields}
            job_values["task"] = task_of(job_values["task"], job_values["data"])
            if job_values["data"] is not None:
                _require_data(job_values["task"], job_values["data"])
            if "options" in fields:
                job_values["options"] = parse_options(job_values["options"])
            if "test_samples" in fields and (samples := values.pop("eval_samples")) is not None:
                job_values = {
                    **job_values,
                    **{name: job_values[name] or samples for name in ("validation_samples", "test_samples")},
                }
            if "faults" in job_values:
                job_values["faults"] = "; ".join(job_values["faults"] or ())
            command(Job(**job_values), **values)

        kinds = {name: OPTIONS[name] for name in fields} | (
            {"eval_samples": EvalSamples} if "test_samples" in fields else {}
        )
        unset = ("task", "options", "faults", "eval_samples")
        defaults = {name: None if name in unset else getattr(DEFAULTS, name) for name in kinds}
        return with_options(command, filled, kinds, defaults, "job")

    return decorate


def with_options(
    command: Callable[..., None],
    filled: Callable[..., None],
    kinds: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *replaced: str,
) -> Callable[..., None]:
    """Return `filled` under the command's name, with options of these kinds in place of `replaced`, the command's own
    ones behind them.
    """
    parameters = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.name not in replaced
    ]
    kinds = {**kinds, **{parameter.name: parameter.annotation for parameter in parameters}}
    defaults = {**defaults, **{parameter.name: parameter.default for parameter in parameters}}
    wrapped = functools.wraps(command)(filled)
    wrapped.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kinds[name])
            for name in kinds
        ]
    )
    wrapped.__annotations__ = kinds
    return wrapped


def task_of(task: str | None, data: str | None) -> str:
    """Return the requested task; without a word of it the default, or what one does with data of one's own."""
    return task or (DEFAULTS.task if data is None else "classification")


def _require_data(task: str, data: str) -> None:
    """Refuse a mistyped path before the libraries are loaded, which takes seconds."""
    from workbench.tasks.own import FROM_FILES
    from workbench.tasks.tables import require_data

    if task in FROM_FILES:
        require_data(data)


def parse_options(words: list[str] | None) -> dict[str, Any]:
    """Return the method's settings from KEY=VALUE words."""
    settings: dict[str, Any] = {}
    for word in words or ():
        key, value = key_and_value(word, "reduction=8")
        if key in settings:
            raise ConfigError(
                f"The option '{word}' was given.", f"{key}={settings[key]} was given, too.", "Name it once."
            )
        settings[key] = parsed(value)
    return settings


def key_and_value(word: str, example: str) -> tuple[str, str]:
    """Return the parts of KEY=VALUE.  Raises ConfigError for another word."""
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"The option '{word}' was given.", "It is not KEY=VALUE.", f"Write, for example, --option {example}."
        )
    return key, value


def parsed(text: str) -> Any:
    """Return a value that is written as JSON, or else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # also a number of thousands of digits
        return text


class Command(TyperCommand):
    """A command whose flags have no type in the help, because no word follows them."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, also the one for help."""
        params = super().get_params(ctx)
        for param in params:
            if getattr(param, "is_bool_flag", False) and not param.secondary_opts:
                param.metavar = ""
        return params


HELP_GROUPS = {
    "What": (
        "method",
        "model",
        "task",
        "data",
        "columns",
        "train_samples",
        "validation_samples",
        "test_samples",
        "eval_samples",
    ),
    "Where": ("cluster", "mode", "fidelity"),
    "Output": ("report", "out", "as_json", "help"),
    "Faults and recovery": ("faults", "snapshot_every", "snapshot_to", "resume", "workdir"),
}
"""The groups of a job's options in the help; all others say how the work is done."""
ORDER = ("Options", "What", "Where", "How", "Faults and recovery", "Output")


class JobCommand(Command):
    """A command with a job's options, whose help has groups.

    It ends with the options of a method: the one that is named on the command line, or else the default.
    """

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, each with its group."""
        params = super().get_params(ctx)
        groups = {name: group for group, names in HELP_GROUPS.items() for name in names}
        for param in params:
            param.rich_help_panel = groups.get(param.name, "How" if param.name in OPTIONS else "Options")
        return sorted(params, key=lambda param: ORDER.index(param.rich_help_panel))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options; the help, which is shown at once, depends on another of them."""
        words = (
            [part for word in args for part in word.split("=", 1)]
            if any("--method=" in word for word in args)
            else args
        )
        named = [value for word, value in pairwise(words) if word == "--method"]
        ctx.meta["method"] = named[-1] if named and named[-1] in registered() else DEFAULTS.method
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        super().format_help(ctx, formatter)
        for line in method_help(ctx.meta["method"], ctx.info_name or "run"):
            print_help_line(line)


def print_help_line(line: str) -> None:
    """Print a line after a command's help, wrapped to the terminal's width."""
    width = shutil.get_terminal_size().columns - 1
    print_text(textwrap.fill(line, width, initial_indent=" ", subsequent_indent="   ", break_on_hyphens=False))


def method_help(method: str, command: str) -> list[str]:
    """Return lines on a method's options: each with its default, and the paper's value where that differs; what they
    mean.
    """
    others = ", ".join(name for name in registered() if name != method)
    more = f"Those of {others}: workbench {command} --method NAME --help"
    try:
        declared = declaration_of(method)
    except ConfigError as error:  # a package of someone else's
        return [f"{method}: {error.found}", more]
    published, _ = published_settings(declared.options)
    words = (
        f"{name}={'' if default is None else default}"
        + (f" (paper: {published[name].value})" if name in published else "")
        for name, default in declared.defaults.items()
    )
    lines = [f"Options of {method}, with their defaults (--option KEY=VALUE):", ", ".join(words)]
    # A docstring's entries begin with names; its further lines continue them.
    explained = re.sub(r"\n(?![a-z_]+(, [a-z_]+)*: )", " ", inspect.getdoc(declared.options) or "")
    return [*lines, *explained.splitlines()[1:], "", more]
