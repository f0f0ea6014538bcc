"""Whether a setting has an effect on a job.  A setting declares it in its type's annotation; this module checks all of
them.

    bottleneck: Annotated[Width, only(technique=("adapters", "serial"))] = 64

A setting without such a declaration always has an effect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.plan import Plan
from workbench.core.serial import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The data that decides whether a setting has an effect.

    job: the Job, whose settings declare effects themselves.  options: the method's settings.

    prepared, plan: see Method; None while they are not known.
    """

    job: Any
    cluster: Cluster
    options: Any
    prepared: Any = None
    plan: Plan | None = None


class Effect(NamedTuple):
    """When a setting has an effect.

    needed: the condition in words, such as 'technique = lora'.

    reads: the options that decide on it; without them it depends on the job, the cluster or the plan.
    is_refused: the setting says how the work is done, so a run without it would not be the requested one.  It is then
    refused before anything is loaded; `holds` may read neither prepared nor plan.  Other settings are noted.
    """

    holds: Callable[[Situation], bool]
    needed: str
    is_refused: bool = False
    reads: tuple[str, ...] = ()


def only(*, is_refused: bool = False, **values: Any) -> Effect:
    """Return the effect of a setting that is only read with some values of other options; a tuple lists several."""
    allowed = {name: value if isinstance(value, tuple) else (value,) for name, value in values.items()}
    words = (f"{name} = {' or '.join(str(value) for value in choices)}" for name, choices in allowed.items())

    def holds(situation: Situation) -> bool:
        return all(getattr(situation.options, name) in choices for name, choices in allowed.items())

    return Effect(holds, " and ".join(words), is_refused, tuple(allowed))


def prepared(needed: str, holds: Callable[[Any], bool]) -> Effect:
    """Return the effect of a setting that depends on the prepared job, which has the task and the model's shape."""
    return Effect(lambda situation: situation.prepared is None or holds(situation.prepared), needed)


SEVERAL_DEVICES = Effect(lambda situation: situation.cluster.world_size > 1, "two or more devices")
SEVERAL_STAGES = Effect(
    lambda situation: situation.plan is None or len(situation.plan.stages) > 1, "a plan of several stages"
)


class Idle(NamedTuple):
    """A setting that was given and has no effect.  what: 'option' or 'setting' (of the job).  reason: why, in words."""

    what: str
    name: str
    value: Any
    effect: Effect
    reason: str

    @property
    def note(self) -> str:
        """Return the sentence for a report."""
        return f"The {self.what} {self.name} = {shown(self.value)} has no effect {self.reason}."


def idle_settings(situation: Situation) -> Iterator[Idle]:
    """Yield the settings without an effect: options that were given, and job settings that differ from
    their defaults.
    """
    given_options = {name: getattr(situation.options, name) for name in situation.job.options}
    changed = {
        name: getattr(situation.job, name)
        for name, default in _defaults(type(situation.job))
        if getattr(situation.job, name) != default
    }
    for category, owner, values in (("option", situation.options, given_options), ("setting", situation.job, changed)):
        effects = effects_of(type(owner))  # type: ignore[arg-type]  # mypy: a type is hashable
        for name, value in values.items():
            for effect in effects.get(name, ()):
                if not effect.holds(situation):
                    others = " and ".join(f"{other} = {getattr(situation.options, other)}" for other in effect.reads)
                    yield Idle(
                        category,
                        name,
                        value,
                        effect,
                        f"{f'with {others}' if others else 'here'}: it needs {effect.needed}",
                    )
                    break


def refuse_idle(situation: Situation) -> None:
    """Raise ConfigError for a setting without an effect that says how the work is done (see Effect), unless it is the
    default.
    """
    for idle in idle_settings(situation):
        if idle.effect.is_refused and (idle.name, idle.value) not in _defaults(type(situation.options)):
            request = f"The {idle.what} {idle.name} = {shown(idle.value)} of {situation.job.method} was asked for."
            raise ConfigError(request, f"It has no effect {idle.reason}.", "Leave it out, or change the others.")


def _defaults(settings: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((field.name, field.default) for field in fields(settings))


@functools.cache
def effects_of(settings: type) -> dict[str, tuple[Effect, ...]]:
    """Return the effects that a dataclass's fields declare, by name."""
    declared = {name: tuple(_declared(hint)) for name, hint in get_type_hints(settings, include_extras=True).items()}
    return {name: effects for name, effects in declared.items() if effects}


def _declared(hint: Any) -> Iterator[Effect]:
    if get_origin(hint) is Annotated:
        yield from (effect for effect in hint.__metadata__ if isinstance(effect, Effect))
    for part in get_args(hint):
        yield from _declared(part)
