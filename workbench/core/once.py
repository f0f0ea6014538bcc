"""Compute what several compared jobs share once: data, tokens, a model's shape."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_RESULTS: ContextVar[dict[Hashable, Any] | None] = ContextVar("results", default=None)


@contextmanager
def shared_results() -> Iterator[None]:
    """Inside the context, keep the results of functions marked with `once`.  Files must not change meanwhile."""
    token = _RESULTS.set({})
    try:
        yield
    finally:
        _RESULTS.reset(token)


def once(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function compute each result once inside `shared_results`, and always outside.  An argument that cannot be
    hashed counts as the same only if it is the same object.
    """

    @functools.wraps(function)
    def found(*args: P.args, **kwargs: P.kwargs) -> T:
        results = _RESULTS.get()
        if results is None:
            return function(*args, **kwargs)
        key = (function, *map(_key, args), *((name, _key(value)) for name, value in sorted(kwargs.items())))
        if key not in results:
            results[key] = function(*args, **kwargs), args, kwargs  # alive, so that no other object gets its id
        return results[key][0]

    return found


def _key(argument: object) -> Hashable:
    try:
        hash(argument)
    except TypeError:
        return "object", id(argument)
    return argument
