"""Checkpoints after each epoch: files by layers, written under any plan, that together cover the model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from workbench.core.errors import MissingDataError
from workbench.methods.common.folder import CHECKPOINTS, checkpoint_path, is_whole, moments_path
from workbench.runtime.flat_optimizer import STATE_KINDS, Optimizer
from workbench.runtime.state import State

_LAYERS = re.compile(r"-layers-(\d+)-(\d+)\.\w+$")
_WEIGHT = f"{STATE_KINDS[0]}/"


def save(folder: Path, epoch: int, layers: tuple[int, int], optimizer: Optimizer, *, keeps_former: bool) -> None:
    """Write the moments and parameters of some layers, each file atomically, the parameters last: they make the epoch count.

    keeps_former: whether to keep the moments of all epochs, so that a damaged checkpoint costs only its epoch.
    """
    tensors = optimizer.named_tensors()
    weights = {name: tensor for name, tensor in tensors.items() if name.startswith(_WEIGHT)}
    moments = {name: tensor for name, tensor in tensors.items() if name not in weights}
    State(step=optimizer.num_steps, tensors=moments).save(moments_path(folder, epoch, layers))
    State(step=optimizer.num_steps, tensors=weights).save(checkpoint_path(folder, epoch, layers))
    if not keeps_former:
        moments_path(folder, epoch - 2, layers).unlink(missing_ok=True)


def weights_after(folder: Path, epoch: int, num_layers: int) -> dict[str, Tensor]:
    """Return the trained parameters after an epoch, by name.  Raises MissingDataError if the checkpoint is incomplete."""
    paths = covering(folder, "epoch", epoch, num_layers)
    if not paths:
        asked, found = f"What was trained until epoch {epoch + 1} was asked for.", f"'{folder / CHECKPOINTS}' does not hold it whole."
        raise MissingDataError(asked, found, "Give --workdir a folder that all devices share.")
    return {name.removeprefix(_WEIGHT): tensor for name, tensor in State.load(paths).tensors.items()}


def covering(folder: Path, kind: str, epoch: int, num_layers: int) -> tuple[Path, ...]:
    """Return complete checkpoints of an epoch that together cover all layers, or nothing.  kind: 'epoch' or 'moments'."""
    paths = [path for path in sorted((folder / CHECKPOINTS).glob(f"{kind}-{epoch}-layers-*.safetensors")) if is_whole(path)]
    return cover(paths, num_layers) or ()


def cover(paths: Sequence[Path], num_layers: int, start: int = 0) -> tuple[Path, ...] | None:
    """Return files, named by their layers, that cover the layers from `start` to the last without a gap; None if that is impossible."""
    if start == num_layers:
        return ()
    for path in paths:
        match = _LAYERS.search(path.name)
        if match is not None and int(match.group(1)) == start < int(match.group(2)):
            rest = cover(paths, num_layers, int(match.group(2)))
            if rest is not None:
                return (path, *rest)
    return None
