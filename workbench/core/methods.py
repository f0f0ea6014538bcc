"""The installed methods and their declarations, without torch.

A distribution registers a method by an entry point of the group `workbench.methods`: the method's name, and a
Declaration in a module that imports nothing heavy.  Ours are in pyproject.toml; docs/a-new-method.md shows one in a
separate package.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, NamedTuple

from workbench.core.errors import ConfigError, check_choice

GROUP = "workbench.methods"


def attribute(name: str) -> Any:
    """Import what 'module:attribute' or 'module:class.attribute' names."""
    module, _, inside = name.partition(":")
    return operator.attrgetter(inside)(importlib.import_module(module))


class Parts(NamedTuple):
    """The method-specific types in the messages of runtime.commands, each as 'module:class'.

    job: type in Train and Prepare.  ended: type in Ended.  done: type in StepDone.  probe: type in Probe.  '': the
    message carries none.
    order: type in Order.  events: further named tuples that the device publishes.
    """

    job: str
    ended: str = ""
    done: str = ""
    probe: str = ""
    order: str = ""
    events: tuple[str, ...] = ()

    def kind(self, name: str) -> Any:
        """Return one of the types by its field name."""
        named = getattr(self, name)
        return attribute(named) | None if named else None


class RequestService(NamedTuple):
    """How a method serves a stream of requests, for `workbench serve`.

    settings: the dataclass of its settings, with defaults.  serve: 'module:function' that serves a stream (see
    methods.common.services.ServeRequests).  figure: 'module:function' that draws the report.
    """

    settings: type[Any]
    serve: str
    figure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FormField:
    """A control of the notebooks' form, for an attribute of the Job or an option of the method.

    values: the option's values by the words that are shown; by default those of the option's type.  Without values the
    control is a number.
    is_typed: whether the values are only examples, and others can be typed.
    at_most, divides: a size of the model (see models.configuration.ModelFacts), which the number must not exceed, or of
    which it must be a divisor.
    """

    label: str
    tooltip: str
    values: Mapping[str, Any] = field(default_factory=dict)
    is_typed: bool = False
    at_most: str = ""
    divides: str = ""


JOB_FIELDS = {
    "method": FormField(label="Method", tooltip="The published method that trains"),
    "model": FormField(
        label="Model",
        tooltip="A name of the list, a folder, or a name on the Hugging Face hub",
        is_typed=True,
        values={
            name: name
            for name in (
                "all-MiniLM-L6-v2",
                "SmolLM2-135M",
                "bert-base-uncased",
                "distilbert-base-uncased",
                "gpt2",
                "t5-small",
            )
        },
    ),
    "task": FormField(label="Task", tooltip="What the model learns; sentiment needs no network"),
    "train_samples": FormField(label="Train samples", tooltip="How many training samples; 0 takes all"),
    "epochs": FormField(label="Epochs", tooltip="Passes over the training samples"),
    "batch_size": FormField(label="Batch size", tooltip="Samples of one optimizer step, over all devices"),
    "micro_batches": FormField(label="Micro-batches", tooltip="Into how many a mini-batch is cut for the pipeline"),
    "seed": FormField(label="Seed", tooltip="Of order, initial weights and dropout"),
}
"""The form of a method that declares no other, before its own options.  Method and task list what there is,
and the models of the list are followed by a tiny one of each family."""
SETTINGS_FIELD = FormField(
    label="Settings",
    tooltip="Where the paper's settings differ: those of the workbench, or the paper's; what you change yourself stays",
    values={"the workbench's": False, "the paper's": True},
)
"""The field `as_published`, last in the form of a method whose paper has other settings than the workbench."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What a method declares.

    options: the dataclass of its settings in Job.options, with defaults.

    title: its name in headings, such as 'PAC+'; '' for its registered name.
    implementation: its methods.base.Method, as 'module:class', which is imported when a job needs it.
    calls: the functions that other devices may call, as 'module:function' or 'module:class.function', each with the
    types of its messages besides dicts: the 'module:class' of its events ('' for none), or Parts if it serves a
    coordinator.
    form: the fields of the notebooks' form, by the name of the Job's attribute or the option.
    load_prompted: 'module:function' that loads a folder of weights that were trained by prompts, as (model,
    TrainedDescription); '' for a method that trains a head.
    trains: False for a method that answers the test split's samples as requests.  backpropagates: False if it trains by
    forward passes only.
    converges: whether an epoch's mean loss decides if training may end.  runs_jax: whether JAX may compute a device's
    layers.
    serves_texts: 'module:function' that starts devices which write texts, for `workbench serve --http` (see
    methods.common.services.ServeTexts); '' without.  serves_requests: how it serves a stream of requests.
    advises_drafts: 'module:function' that compares drafts for the texts that its devices write (a
    methods.common.draft_advice.DraftAdvice); '' without.
    alternatives: sets of options that an adviser compares, by words, such as 'LoRA'.  keeps_data: whether each device
    trains on its own data, which stay there.
    schedules: 'module:table' of the schedules that its paper describes, as schedules.published.Published by name; ''
    without.
    """

    options: type[Any]
    implementation: str
    calls: Mapping[str, str | Parts]
    title: str = ""
    form: Mapping[str, FormField] = field(default_factory=lambda: JOB_FIELDS)
    load_prompted: str = ""
    trains: bool = True
    backpropagates: bool = True
    converges: bool = True
    runs_jax: bool = False
    serves_texts: str = ""
    serves_requests: RequestService | None = None
    advises_drafts: str = ""
    alternatives: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})
    keeps_data: bool = False
    schedules: str = ""

    @property
    def defaults(self) -> dict[str, Any]:
        """Return every option's default."""
        return {option.name: option.default for option in fields(self.options)}

    @property
    def trains_all_weights(self) -> bool:
        """Return whether the method's default technique is full fine-tuning."""
        return self.defaults.get("technique") == "full"


@functools.cache
def registered() -> dict[str, EntryPoint]:
    """Return the entry points of all installed methods by name, ours first.  Raises ConfigError if two distributions
    take one name.
    """
    points: dict[str, EntryPoint] = {}
    for point in sorted(
        entry_points(group=GROUP), key=lambda point: (not point.value.startswith("workbench."), point.name)
    ):
        other = points.setdefault(point.name, point)
        if other.value != point.value:
            raise ConfigError(
                f"The methods that are installed (entry points '{GROUP}') were asked for.",
                f"'{point.name}' is both {other.value} and {point.value}{_of(point)}.",
                "Uninstall one of the two packages, or rename its method.",
            )
    if not points:
        raise ConfigError(
            f"The methods that are installed (entry points '{GROUP}') were asked for.",
            "There are none, not even the workbench's own: its installation is older than its code.",
            "Install it again: `make setup`, or `pip install --no-deps -e .` in its folder.",
        )
    return points


def declaration_of(method: str) -> Declaration:
    """Return what a method declares.  Raises ConfigError for an unknown name, which lists the known ones, or a broken
    package.
    """
    points = registered()
    check_choice("method", method, points)
    return _loaded(points[method])


def title_of(method: str) -> str:
    """Return a method's name in headings.  For a method that is not installed, as in a report from another machine,
    this is the name itself.
    """
    try:
        return declaration_of(method).title or method
    except ConfigError:
        return method


Ability = Literal["serves_texts", "serves_requests", "advises_drafts"]


def methods_with(ability: Ability) -> list[str]:
    """Return the methods that declare an ability, ours first.  A package that cannot be imported has none."""
    return [name for name in registered() if _declares(name, ability)]


def method_with(ability: Ability, method: str = "") -> str:
    """Return the method, by default the first that declares an ability.

    Raises ConfigError for a method that does not declare it, and as declaration_of.
    """
    able = methods_with(ability)
    name = method or next(iter(able), "")
    if name and getattr(declaration_of(name), ability):
        return name
    verb, thing = ability.split("_")
    raise ConfigError(
        f"A method that {verb} {thing} was asked for.",
        f"'{method}' does not declare it." if method else "None of the installed methods declares it.",
        f"Choose {' or '.join(able)}." if able else "Install one that does.",
    )


def _declares(name: str, ability: Ability) -> bool:
    try:
        return bool(getattr(declaration_of(name), ability))
    except ConfigError:
        return False


@functools.cache
def _loaded(point: EntryPoint) -> Declaration:
    request = f"The method '{point.name}' was asked for."
    try:
        declaration = point.load()
    except Exception as error:  # whatever the package's own code raises
        problem = f"{point.value}{_of(point)} cannot be imported: {type(error).__name__}: {error}."
        raise ConfigError(request, problem, "Fix that package, or uninstall it.") from error
    if not isinstance(declaration, Declaration):
        problem = f"{point.value}{_of(point)} is a {type(declaration).__name__}."
        raise ConfigError(request, problem, "Name a workbench.core.methods.Declaration in its entry point.")
    return declaration


def _of(point: EntryPoint) -> str:
    return "" if point.dist is None else f" of the package {point.dist.name}"
