"""An activation cache that outlives its run: which runs may use it, and how it is put aside (PAC+, section IV-B)."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from torch import nn

from workbench.core.errors import CacheError, WriteError
from workbench.core.job import Job
from workbench.methods.common.digest import weights_digest
from workbench.methods.pac_plus.prepare import PreparedJob, prepare
from workbench.models.loading import load_stack
from workbench.runtime.context import DEVICES
from workbench.runtime.kept_caches import KeptCaches, KeptDescription


def activation_key(prepared: PreparedJob, backbone: nn.Module) -> str:
    """Return what activations depend on: the backbone and how it is quantized, the tokens in their order, and how they are stored.

    backbone: before it is quantized.  Plan, seed, learning rate, reduction and labels do not matter.
    """
    tokens = hashlib.sha256()
    for ids in prepared.train.ids:
        tokens.update(repr(ids).encode())
    computed = prepared.options.quantization.description
    return "/".join(("activations 1", weights_digest(backbone), computed, tokens.hexdigest(), repr(prepared.record_layout)))


def prepare_from_kept(job: Job) -> PreparedJob:
    """Prepare a job (see prepare); if it keeps its cache, look whether an earlier run kept these activations, whole to the last byte."""
    prepared = prepare(job)
    if not prepared.options.keep_cache:
        return prepared
    key, note = activation_key(prepared, load_stack(job.model)), ""
    try:
        kept = KeptCaches().find(key)
        if kept is not None:
            kept.check(range(len(prepared.train)))
            note = "Every epoch runs from the activation cache that an earlier run kept; the backbone is not run."
    except CacheError as error:
        kept, note = None, str(error)
    needs_emulated = (
        "The option keep_cache was asked for on real devices.",
        "Each would keep its own part on its own disk, where no later run finds it.",
        "Leave it out.",
    )
    notes = (note,) if note else ()
    return replace(prepared, activation_key=key, from_kept=kept is not None, notes=notes, needs_emulated=needs_emulated)


def keep(prepared: PreparedJob, folder: Path) -> tuple[str, ...]:
    """Put a run's shards aside for later runs if that was asked for, and return what is to be told about it."""
    key = prepared.activation_key
    if not key or prepared.from_kept:
        return ()
    shards = sorted(path for path in (folder / DEVICES).glob("*/cache") if path.is_dir())
    description = KeptDescription(
        key=key,
        model=prepared.job.model,
        task=prepared.job.task,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    try:
        filled = KeptCaches().keep(shards, description)
    except (CacheError, WriteError, OSError) as error:
        return (f"The activation cache could not be kept: {error}",)
    return (f"The activation cache is kept for later runs: {filled.num_samples} samples, {filled.nbytes / 1e6:.1f} MB.",)
