"""An activation cache that outlives its run: which runs may use it, and how it is put aside (PAC+, section IV-B)."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path

from torch import nn

from workbench.core.errors import CacheError, WriteError
from workbench.methods.common.digest import weights_digest
from workbench.methods.pac_plus.prepare import PreparedJob
from workbench.runtime.context import DEVICES
from workbench.runtime.kept_caches import KeptCache, KeptCaches, KeptDescription


def activation_key(prepared: PreparedJob, backbone: nn.Module) -> str:
    """Return what activations depend on: the backbone and how it is quantized, the tokens in their order, and how they are stored.

    backbone: before it is quantized.  Plan, seed, learning rate, reduction and labels do not matter.
    """
    tokens = hashlib.sha256()
    for ids in prepared.train.ids:
        tokens.update(repr(ids).encode())
    computed = prepared.options.quantization.description
    return "/".join(("activations 1", weights_digest(backbone), computed, tokens.hexdigest(), repr(prepared.record_layout)))


def find_kept(prepared: PreparedJob, key: str) -> tuple[KeptCache | None, str]:
    """Return the kept cache of these activations, checked to its last byte, and what is to be told about it."""
    try:
        kept = KeptCaches().find(key)
        if kept is None:
            return None, ""
        kept.check(range(len(prepared.train)))
    except CacheError as error:
        return None, str(error)
    return kept, "Every epoch runs from the activation cache that an earlier run kept; the backbone is not run."


def keep(prepared: PreparedJob, key: str, folder: Path) -> str:
    """Put a run's shards aside for later runs and return what is to be told about it."""
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
        return f"The activation cache could not be kept: {error}"
    return f"The activation cache is kept for later runs: {filled.num_samples} samples, {filled.nbytes / 1e6:.1f} MB."
