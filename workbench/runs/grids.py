"""Make the points of a grid of settings: each a job on a cluster, or a notebook with parameters."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta

from workbench.core.catalogue import DEFAULT_CLUSTER, load_cluster
from workbench.core.cluster import MEGABIT_BYTES, Cluster, Link
from workbench.core.errors import ConfigError, did_you_mean
from workbench.core.job import Fidelity, Job, Mode
from workbench.core.ranges import range_of, require_range
from workbench.core.serial import from_builtins, read_toml, shown, text_digest, to_json
from workbench.methods import load_method
from workbench.methods.checked import require_possible
from workbench.methods.devices import over_ssh, require_emulated
from workbench.runs.comparison import words_of
from workbench.runs.notebooks import require_parameters

OPTION = "option."


_JOB = {name: kind for name, kind in get_type_hints(Job, include_extras=True).items() if name != "options"}


_EVALUATED = ("validation_samples", "test_samples")


_OTHERS = ("cluster", "bandwidth", "eval_samples")


Grid = Mapping[str, Sequence[Any]]
"""Values by name: a field of Job, 'option.NAME', 'cluster' (name or file), 'bandwidth' (Mbit/s of every link), or
'eval_samples'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """The settings of the sweep itself in a grid's file.  repeats: runs of each point.  simulate: run the points in
    virtual time.
    """

    repeats: Annotated[int, Meta(ge=1, le=1000)] = 1
    simulate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run of a sweep.  settings: those that differ between points.  repeat: from 1.

    notebook: run this notebook with `parameters` instead of the job; it writes report.json into the folder named by its
    parameter `output`.
    """

    job: Job
    cluster: Cluster
    mode: Mode = "execute"
    fidelity: Fidelity = "auto"
    repeat: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    notebook: Path | None = None
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the name of its files.  It depends only on job, cluster, mode, fidelity and repeat (or on notebook and
        parameters).
        """
        parts = [to_json(self.job), to_json(self.cluster), self.mode, self.fidelity, str(self.repeat)]
        if self.notebook is not None:
            parts += [self.notebook.read_text(encoding="utf-8"), to_json(self.parameters)]
        kind = self.job.method if self.notebook is None else self.notebook.stem
        return f"{kind}-{text_digest(chr(0).join(parts), 12)}"

    @property
    def words(self) -> str:
        """Return its settings as text."""
        return words_of(self.settings) or "the only point"


def read_grid(path: Path) -> tuple[dict[str, list[Any]], dict[str, dict[str, list[Any]]], SweepSettings]:
    """Read a TOML file: return its grid, the grids of single methods, and the settings of the sweep itself.

    [options] holds options of the method; [METHOD] and [METHOD.options] apply to that method's points only.
    """
    tables = read_toml(path, "the grid")
    settings = {field.name: tables.pop(field.name) for field in fields(SweepSettings) if field.name in tables}
    sweep = from_builtins(settings, SweepSettings, source=f"the grid '{path}'")
    by_method = {
        name: _flat(table) for name, table in list(tables.items()) if isinstance(table, dict) and name != "options"
    }
    return _flat({name: value for name, value in tables.items() if name not in by_method}), by_method, sweep


def make_points(
    grid: Grid,
    by_method: Mapping[str, Grid] | None = None,
    *,
    mode: Mode = "execute",
    fidelity: Fidelity = "auto",
    repeats: int = 1,
) -> list[Point]:
    """Return every combination of the grid's values, each once, in the order of the names.

    by_method: grids that replace the values of the same names for one method.  Raises ConfigError for impossible
    combinations.
    """
    methods = [_value("method", value) for value in grid.get("method", [Job().method])]
    for name in by_method or {}:
        if name not in methods:
            raise ConfigError(
                f"Settings of '{shown(name)}' were given.",
                f"The methods of the sweep are {', '.join(methods)}.",
                did_you_mean(name, methods, "Add it, or leave them out."),
            )
    if repeats > 1 and mode == "simulate":
        raise ConfigError(
            f"{repeats} repeats of simulated points were asked for.", "All would be the same.", "Vary the seed instead."
        )
    combined = []
    for method in methods:
        method_grid = {**grid, **(by_method or {}).get(method, {}), "method": [method]}
        names = ["method", *(name for name in method_grid if name != "method")]
        choices = [[_value(name, value) for value in _some(name, method_grid[name])] for name in names]
        combined += [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*choices)]
    differing = [
        name
        for name in dict.fromkeys(itertools.chain.from_iterable(combined))
        if len({str(choice.get(name)) for choice in combined}) > 1
    ]
    points: dict[str, Point] = {}
    for chosen, repeat in itertools.product(combined, range(1, repeats + 1)):
        settings = {name: chosen[name] for name in differing if name in chosen} | (
            {"repeat": repeat} if repeats > 1 else {}
        )
        point = replace(_point(chosen), mode=mode, fidelity=fidelity, repeat=repeat, settings=settings)
        if mode == "execute" and point.cluster.is_real and "bandwidth" in chosen:
            raise ConfigError(
                f"Another bandwidth of '{point.cluster.name}' was asked for.",
                "They are real: their links are as fast as they are.",
                "Leave it out, or simulate.",
            )
        points.setdefault(point.name, point)
    for point in points.values():
        require_possible(load_method(point.job.method), point.job, point.cluster)
        if mode == "execute" and point.cluster.is_real:
            over_ssh(point.cluster)
        elif mode == "execute":
            require_emulated(point.cluster)
    return list(points.values())


def make_notebook_points(notebook: Path, grid: Grid, *, repeats: int = 1) -> list[Point]:
    """Return every combination of values of a notebook's parameters; 'cluster' sets its parameter cluster_name."""
    named = {"cluster_name" if name == "cluster" else name: values for name, values in grid.items()}
    require_parameters(notebook, named | {"output": []})
    choices = [
        [_value(name, value) if name in _JOB else value for value in _some(name, values)]
        for name, values in named.items()
    ]
    points = []
    for values, repeat in itertools.product(itertools.product(*choices), range(1, repeats + 1)):
        chosen = dict(zip(named, values, strict=True))
        settings = {name: chosen[name] for name in named if len(named[name]) > 1} | (
            {"repeat": repeat} if repeats > 1 else {}
        )
        points.append(replace(_point({}), repeat=repeat, settings=settings, notebook=notebook, parameters=chosen))
    return points


def _flat(table: Mapping[str, Any]) -> dict[str, list[Any]]:
    options = table.get("options", {})
    if not isinstance(options, dict):
        raise ConfigError(
            f"The options {shown(repr(options))} were given.",
            "They are no table.",
            "Write [options] and a line for each.",
        )
    named = {name: value for name, value in table.items() if name != "options"} | {
        f"{OPTION}{name}": options[name] for name in options
    }
    return {name: value if isinstance(value, list) else [value] for name, value in named.items()}


def _some(name: str, values: Sequence[Any]) -> Sequence[Any]:
    """Return a setting's values.  Raises ConfigError if there are none, which would leave no point."""
    if not values:
        raise ConfigError(
            f"The setting '{name}' was to be varied.", "It has no values.", "Give one, or leave the setting out."
        )
    return values


def _value(name: str, value: Any) -> Any:
    """Convert one value of a grid to its setting's type."""
    if name.startswith(OPTION):
        return value
    if name == "bandwidth":
        try:
            value = float(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"The bandwidth '{shown(value)}' was asked for.", "It is no number.", "Give it in Mbit/s."
            ) from None
        require_range(value, range_of(Link, "bytes_per_s"), "The sweep", "bandwidth", unit=MEGABIT_BYTES)
        return value
    if name == "cluster":
        return str(value)
    kind = _JOB.get("test_samples" if name == "eval_samples" else name)
    if kind is None:
        names = (*_JOB, *_OTHERS)
        raise ConfigError(
            f"The setting '{shown(name)}' was to be varied.",
            f"There are {', '.join(names)}.",
            did_you_mean(name, names),
        )
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"The value '{shown(value)}' of {name} was asked for.", f"{error}.", "Change it.") from None


def _point(chosen: Mapping[str, Any]) -> Point:
    cluster = load_cluster(chosen.get("cluster", DEFAULT_CLUSTER))
    if "bandwidth" in chosen:
        cluster = cluster.with_bandwidth(chosen["bandwidth"])
    options = {name.removeprefix(OPTION): value for name, value in chosen.items() if name.startswith(OPTION)}
    named = dict.fromkeys(_EVALUATED, chosen["eval_samples"]) if "eval_samples" in chosen else {}
    named |= {name: value for name, value in chosen.items() if name in _JOB}
    return Point(job=Job(**named, options=options), cluster=cluster)
