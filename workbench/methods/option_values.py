"""Read and check a method's options, and say where its settings differ from the paper's."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import (
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from workbench.core.errors import ConfigError, did_you_mean
from workbench.core.job import Job
from workbench.core.methods import declaration_of
from workbench.core.ranges import range_of, require_range
from workbench.core.serial import shown

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Published:
    """The paper's value of a setting whose default is ours; it stands in the annotation of the option, next to the
    default.

    where: the place in the paper.  given: another option and the value with which alone this setting has a meaning.
    Settings of the Job stand in `published_job` of the method's options, by name; it is empty if the defaults are the
    paper's.
    """

    value: Any
    where: str
    given: tuple[str, Any] | None = None


class _Hints(NamedTuple):
    """The types of a dataclass's fields.  stated: with what their annotations state."""

    kinds: Mapping[str, Any]
    stated: Mapping[str, Any]


@functools.cache
def _hints(settings: Any) -> _Hints:
    """Return the types of a class's fields; to evaluate their annotations takes a millisecond."""
    stated = get_type_hints(settings, include_extras=True)
    return _Hints(MappingProxyType(get_type_hints(settings)), MappingProxyType(stated))


def published_settings(settings: type) -> tuple[dict[str, Published], dict[str, Published]]:
    """Return the settings that the paper has otherwise, by name: the method's options, and the Job's.  settings: the
    options' class.
    """
    declared_by_name = {
        name: [marker for marker in getattr(hint, "__metadata__", ()) if isinstance(marker, Published)]
        for name, hint in _hints(cast(Any, settings)).stated.items()
    }
    return {name: declared[0] for name, declared in declared_by_name.items() if declared}, dict(
        getattr(settings, "published_job", {})
    )


def as_published(job: Job) -> Job:
    """Return a job that asks for the paper's settings with them: those not given in options, and those with the Job's
    own default.

    Raises ConfigError for a method that declares none, because no paper is about it.
    """
    if not job.as_published:
        return job
    settings = declaration_of(job.method).options
    options, of_job = published_settings(settings)
    if not options and getattr(settings, "published_job", None) is None:
        request, problem = f"The published settings of {job.method} were asked for.", "It is no paper's own method."
        raise ConfigError(request, problem, "Leave --as-published out.")
    defaults = {field.name: field.default for field in fields(Job)}
    changed = {name: published.value for name, published in of_job.items() if getattr(job, name) == defaults[name]}
    more = {
        name: published.value
        for name, published in options.items()
        if name not in job.options and _applies(published, job)
    }
    return replace(job, **changed, options=job.options | more)


def differences_note(job: Job) -> str:
    """Return a sentence that names each setting in which a job differs from the paper, with the paper's value; ''
    without one.
    """
    declared = declaration_of(job.method)
    options, of_job = published_settings(declared.options)
    defaults = declared.defaults
    values = {
        name: (job.options.get(name, defaults[name]), published)
        for name, published in options.items()
        if _applies(published, job)
    }
    values |= {
        name: (job.peak_learning_rate if name == "learning_rate" else getattr(job, name), published)
        for name, published in of_job.items()
    }
    words = [
        f"{name}={_shown(value)} ({_shown(published.value)})"
        for name, (value, published) in values.items()
        if value != published.value
    ]
    if not words:
        return "All settings that the paper states are the paper's." if job.as_published else ""
    advice = "" if job.as_published else "; --as-published takes them"
    return f"Settings that differ from the paper, whose values are in brackets{advice}: {', '.join(words)}."


def _applies(published: Published, job: Job) -> bool:
    if published.given is None:
        return True
    name, value = published.given
    return bool(job.options.get(name, declaration_of(job.method).defaults[name]) == value)


def _shown(value: Any) -> str:
    return "the planner's choice" if value is None else shown(value)


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def read_options(method: str, settings: type[T], options: Mapping[str, Any]) -> T:
    """Return a method's settings, a dataclass with defaults, from Job.options.  Raises ConfigError that names the wrong
    option.
    """
    kinds, stated = _hints(cast(Any, settings))
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name not in kinds:
            raise ConfigError(
                f"The option '{name}' of {method} was asked for.",
                f"Known: {', '.join(kinds)}.",
                did_you_mean(name, kinds),
            )
        try:
            msgspec.convert(value, kinds[name], strict=False)
        except msgspec.ValidationError:
            request = (
                f"The option {name} = {shown(repr(value) if isinstance(value, str) else value)} of {method} was "
                "asked for."
            )
            raise ConfigError(request, f"It must be {_kind_in_words(kinds[name])}.", "Change it.") from None
        try:
            values[name] = msgspec.convert(value, stated[name], strict=False)
        except msgspec.ValidationError:
            require_range(
                msgspec.convert(value, kinds[name], strict=False),
                range_of(settings, name),
                f"An option of {method}",
                name,
            )
            raise  # msgspec refuses a range that ours accepts
    return settings(**values)


def require_width(method: str, name: str, value: int, model: str, most: int) -> None:
    """Raise ConfigError if a rank or width is too large for a model, before memory is allocated for it."""
    if value > most:
        raise ConfigError(
            f"The option {name} = {value:,} of {method} was asked for.",
            f"For '{model}' it is at most {most:,}.",
            f"Lower {name}.",
        )


def _kind_in_words(kind: Any) -> str:
    """Describe in words the values that a type allows: one of some names, a number, or (if optional) also nothing."""
    if kind in _WORDS:
        return _WORDS[kind]
    parts = [part for part in get_args(kind) if part is not type(None)]
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, parts))}"
    return f"{_kind_in_words(parts[0])}, or left out"
