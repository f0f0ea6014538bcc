"""A job and a cluster as a command and as Python."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields, is_dataclass
from typing import Any

from workbench.core.catalogue import cluster_names, load_cluster
from workbench.core.cluster import Cluster
from workbench.core.job import Job

_NAMES = {"options": "option", "faults": "fault"}


def _changed(job: Job) -> dict[str, Any]:
    """Return the settings that differ from the defaults."""
    default = Job()
    values = {field.name: getattr(job, field.name) for field in fields(Job)}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


WITHOUT_OPTION = ("weight_decay", "warmup_fraction")
"""Settings of a job that only Python can give."""


def as_command(job: Job, cluster: Cluster) -> str:
    """Return the `workbench run` that does this job on a cluster of the catalogue, or the `workbench simulate` if the
    model has no weights.
    """
    from workbench.models.hub import has_weights

    words = ["workbench", "run" if has_weights(job.model) else "simulate"]
    without: list[str] = []
    # The command line's default task depends on --data.
    for name, value in (_changed(job) | ({} if job.data is None else {"task": job.task})).items():
        option = f"--{_NAMES.get(name, name).replace('_', '-')}"
        if name in WITHOUT_OPTION:
            without.append(f"# `workbench run` has no option for {name} = {value}; the Python has it.")
        elif name == "options":
            for key, setting in value.items():
                words += [option, f"{key}={_written(setting)}"]
        elif name == "faults":
            words += [word for fault in value.split(";") if fault.strip() for word in (option, fault.strip())]
        else:
            words += [option] if value is True else [option, str(value)]
    return "\n".join([shlex.join([*words, "--cluster", cluster.name]), *without])


def _written(value: Any) -> str:
    """Return an option's value as the command line reads it: a text that is no JSON, or JSON."""
    if not isinstance(value, str):
        return json.dumps(value)
    try:
        json.loads(value)
    except ValueError:
        return value
    return json.dumps(value)


def as_python(job: Job, cluster: Cluster) -> str:
    """Return the Python that runs this job on a cluster: one of the catalogue by its name, any other in full."""
    arguments = ", ".join(f"{name}={value!r}" for name, value in _changed(job).items())
    imports = ["from workbench.core.job import Job", "from workbench.experiment import run"]
    if is_known(cluster):
        imports.insert(0, "from workbench.core.catalogue import load_cluster")
        source = f"load_cluster({cluster.name!r})"
    else:
        gets_hot = any(device.sustained for device in cluster.devices)
        imports[:0] = ["from workbench.core.heat import Level"] * gets_hot
        imports.insert(0, "from workbench.core.cluster import Cluster, Device, Link, Processor")
        source = _source(cluster)
    return "\n".join(
        [*imports, "", f"job = Job({arguments})", f"cluster = {source}", 'report = run(job, cluster, "execute")']
    )


def _source(value: Any) -> str:
    """Return the Python of a value: of a dataclass, only what differs from its defaults."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_source, value))}{',' * (len(value) == 1)})"
    if not is_dataclass(value):
        return repr(value)
    changed = [
        (field.name, getattr(value, field.name))
        for field in fields(value)
        if getattr(value, field.name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(f'{name}={_source(entry)}' for name, entry in changed)})"


def is_known(cluster: Cluster) -> bool:
    """Return whether this is a cluster of the catalogue, unchanged."""
    return cluster.name in cluster_names() and load_cluster(cluster.name) == cluster
