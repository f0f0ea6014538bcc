"""Prepare a job, after checks of what would end it later."""

from __future__ import annotations

from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.device_faults import parse_faults
from workbench.core.errors import ConfigError, MissingDataError
from workbench.core.job import Job
from workbench.core.methods import declaration_of, registered
from workbench.core.serial import user_path
from workbench.methods.base import Method, Notify
from workbench.runtime.engine_service import Engines
from workbench.tasks.own import FROM_FILES


def require_possible(method: Method, job: Job, cluster: Cluster, engines: Engines | None = None) -> None:
    """Check what needs neither the model nor the data: the method's settings, the faults' devices, the place of the
    data.

    engines: the real devices' engines.  Raises ConfigError or MissingDataError.
    """
    declared = declaration_of(job.method)
    with_jax = [device.name for device in cluster.devices if device.framework == "jax"]
    if with_jax and not declared.runs_jax:
        problem = (
            f"Only {' and '.join(name for name in registered() if declaration_of(name).runs_jax)} have layers that "
            "JAX computes."
        )
        raise ConfigError(
            f"{job.method} on '{with_jax[0]}', which computes with JAX, was asked for.", problem, "Leave framework out."
        )
    method.require_known(job, cluster)
    if parse_faults(job.faults, cluster) and not declared.trains:
        request = f"The faults '{job.faults}' in a run of {job.method} were asked for."
        raise ConfigError(
            request, "It answers one request after the other and does not train.", "Use `workbench serve --fault`."
        )
    if job.faults and engines is not None and not engines.loses_devices:
        raise ConfigError(
            f"The faults '{job.faults}' were asked for.",
            "They are injected into emulated devices, and real ones over SSH.",
            "Leave them out.",
        )
    if job.converged_after and not declared.converges:
        request = f"An end of {job.method} once its loss has not fallen for {job.converged_after} epochs was asked for."
        raise ConfigError(request, "It does not train by epochs.", "Leave converged_after out.")
    if job.data is not None and job.task not in FROM_FILES and not (data := user_path(job.data, "The data")).is_dir():
        problem, todo = "There is no such folder.", "Name a folder that holds the task's files."
        if data.exists():
            problem = f"It is a file, and the task '{job.task}' has its own data."
            todo = f"For data of your own, choose a task among {', '.join(FROM_FILES)}."
        raise MissingDataError(f"The data in '{job.data}' was asked for.", problem, todo)


def prepared_job(
    method: Method,
    job: Job,
    cluster: Cluster,
    notify: Notify,
    *,
    warms_up: bool = False,
    engines: Engines | None = None,
) -> Any:
    """Return the job as its method prepares it.  Raises ConfigError for more samples than a split has, or for
    impossible faults.

    warms_up: import the engines' libraries in another process meanwhile; both finish before anything is measured.
    engines: the real devices' engines.
    """
    require_possible(method, job, cluster, engines)
    if warms_up:
        from workbench.runtime.engine_starter import settle, warm_up

        warm_up()
        try:
            prepared = method.prepare(job, notify)
        finally:
            settle()
    else:
        prepared = method.prepare(job, notify)
    for name in ("train", "validation", "test"):
        num_samples, split = getattr(job, f"{name}_samples"), getattr(prepared.task, name)
        if num_samples is not None and num_samples > len(split):
            problem = f"The {name} split of '{job.task}' has {len(split)}."
            raise ConfigError(
                f"A job with {name}_samples = {num_samples} was asked for.",
                problem,
                f"Lower {name}_samples, or leave it out.",
            )
    for fault in parse_faults(job.faults, cluster):
        num_steps = prepared.steps_on(cluster.world_size)
        if fault.unit == "step" and fault.start >= num_steps:
            request = f"The fault '{fault.kind}' of '{cluster.devices[fault.rank].name}' {fault.when} was asked for."
            raise ConfigError(request, f"The run has {num_steps} steps.", "Name an earlier step, or do more steps.")
    return prepared
