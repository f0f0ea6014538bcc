"""Valid ranges of counts, sizes, speeds and names.  Each range is declared on its field and checked here when a
dataclass is created.
"""

from __future__ import annotations

import functools
import math
from numbers import Integral, Real
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from msgspec import Meta

from workbench.core.errors import ConfigError, did_you_mean
from workbench.core.serial import shown

Count = Annotated[int, Meta(ge=1, le=10**9)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Tokens = Annotated[int, Meta(ge=0, le=10**6)]
NumBytes = Annotated[int, Meta(ge=1, le=10**18)]
Rate = Annotated[float, Meta(ge=1e-3, le=1e18)]
"""FLOP/s, or bytes per second."""
Latency = Annotated[float, Meta(ge=0, le=3600)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Interval = Annotated[float, Meta(ge=1e-3, le=1e9)]
"""Seconds between repeated events, or a timeout."""
Minutes = Annotated[float, Meta(ge=0.001, le=600)]
Watts = Annotated[float, Meta(ge=0, le=1e6)]
WattHours = Annotated[float, Meta(ge=0, le=1e6)]
JoulesPerByte = Annotated[float, Meta(ge=0, le=1)]
Width = Annotated[int, Meta(ge=1, le=65_536)]
"""A rank, a reduction, a number of queries: sizes inside a model."""
Dropout = Annotated[float, Meta(ge=0, lt=1)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
Share = Annotated[float, Meta(gt=0, le=1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Loss = Annotated[float, Meta(ge=0, le=0.9)]
Slowness = Annotated[float, Meta(ge=1, le=1e6)]
Slowing = Annotated[float, Meta(ge=1e-6, le=1e6)]
"""How many times slower; below 1: faster."""
Port = Annotated[int, Meta(ge=1, le=65_535)]
Name = Annotated[str, Meta(max_length=100)]
Text = Annotated[str, Meta(max_length=4096)]


def require_ranges(value: object, owner: str) -> None:
    """Check a dataclass's fields against the ranges and literal values of their types.

    Call it in __post_init__.  owner: the object in the message, such as "A job".  Raises ConfigError naming the field
    and its value.
    """
    for name, kind, is_optional, exact, least, most in _stated(type(value)):  # type: ignore[arg-type]  # mypy: a type is hashable
        field_value = getattr(value, name)
        if (
            type(field_value) is exact and least <= field_value <= most
        ):  # the common case: planners create links by the thousand
            continue
        if field_value is not None or not is_optional:
            require_range(field_value, kind, owner, name)


def require_range(value: Any, kind: Any, owner: str, name: str, *, unit: float = 1) -> None:
    """Check one value.  kind: an Annotated type, or a Literal.  unit: the unit of `value`, in units of the field.

    Raises ConfigError naming the field and its value.
    """
    request = f"{owner} asks for {name} = {shown(value)}."
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            choices = [str(choice) for choice in get_args(kind)]
            raise ConfigError(request, f"Known are {', '.join(choices)}.", did_you_mean(str(value), choices))
        return
    base, meta = kind.__origin__, kind.__metadata__[0]
    if base is str:
        if not isinstance(value, str) or len(value) > meta.max_length:
            raise ConfigError(request, f"It must be text of at most {meta.max_length:,} characters.", "Shorten it.")
        if not value.isprintable():
            raise ConfigError(request, "It holds a control character.", "Leave that character out.")
        return
    is_whole = base is int and unit == 1
    if isinstance(value, bool) or not isinstance(value, Integral if is_whole else Real):
        raise ConfigError(
            f"{owner} asks for {name} = {shown(repr(value))}.",
            f"It must be a {'whole ' if is_whole else ''}number.",
            "Write a number, without quotes.",
        )
    least, most = meta.gt if meta.ge is None else meta.ge, meta.lt if meta.le is None else meta.le
    if unit != 1:
        least, most = least / unit, most / unit
    is_above = value > least if meta.ge is None else value >= least
    is_below = value < most if meta.le is None else value <= most
    if not (is_above and is_below):  # both are false for NaN
        low = f"{'above' if meta.ge is None else 'at least'} {_number(least)}"
        high = f"{'below' if meta.le is None else 'at most'} {_number(most)}"
        todo = f"Raise {name}." if value <= least else f"Lower {name}." if value >= most else f"Give {name} a number."
        raise ConfigError(request, f"It must be {low} and {high}.", todo)


def range_of(kind: type, name: str) -> Any:
    """Return the Annotated type of a dataclass's field."""
    return next(stated for field, stated, *_ in _stated(kind) if field == name)


@functools.cache
def _stated(kind: type) -> tuple[tuple[str, Any, bool, Any, float, float], ...]:
    """Return the fields with a range: (field, Annotated type or Literal, whether it may be None, and the number's type
    and range).
    """
    rules = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if get_origin(hint) is Annotated and not isinstance(hint.__metadata__[0], Meta):
            hint = hint.__origin__  # other declarations around 'a number or None' (see effects)
        parts = [hint] if get_origin(hint) in (Annotated, Literal) else get_args(hint)
        stated = [
            part
            for part in parts
            if get_origin(part) is Literal or isinstance(getattr(part, "__metadata__", (None,))[0], Meta)
        ]
        if len(stated) == 1 and all(part in (stated[0], NoneType) for part in parts):
            [field_kind], optional = stated, NoneType in parts
            if get_origin(field_kind) is Annotated and field_kind.__origin__ in (int, float):
                meta = field_kind.__metadata__[0]
                least = math.nextafter(meta.gt, math.inf) if meta.ge is None else meta.ge
                most = math.nextafter(meta.lt, -math.inf) if meta.le is None else meta.le
                rules.append((name, field_kind, optional, field_kind.__origin__, least, most))
            else:
                rules.append((name, field_kind, optional, None, 0.0, 0.0))
    return tuple(rules)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
