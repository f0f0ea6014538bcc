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
    """Inside the context, keep the results of functions marked with `once`, and those of a context around this one.
    Files must not change meanwhile.
    """
    outer = _RESULTS.get()
    token = _RESULTS.set({} if outer is None else outer)
    try:
        yield
    finally:
        _RESULTS.reset(token)


def once(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function compute each result once inside `shared_results`, and always outside.  An argument that cannot be
    hashed counts as the same only if it is the same object.
    """

    @functools.wraps(function)
    def cached_call(*args: P.args, **kwargs: P.kwargs) -> T:
        def key() -> tuple[object, ...]:
            return (function, *args, *(part for pair in sorted(kwargs.items()) for part in pair))

        return once_for(key, lambda: function(*args, **kwargs))

    return cached_call


def once_for(key: Callable[[], tuple[object, ...]], compute: Callable[[], T]) -> T:
    """Return what `compute` returns, inside `shared_results` once for a key (see `once`).  Outside nobody asks for the
    key.
    """
    results = _RESULTS.get()
    if results is None:
        return compute()
    parts = key()
    hashable = tuple(map(_key, parts))
    if hashable not in results:
        results[hashable] = compute(), parts  # the key stays alive, so that no other object gets its id
    return results[hashable][0]


def _key(argument: object) -> Hashable:
    try:
        hash(argument)
    except TypeError:
        return "object", id(argument)
    return argument
