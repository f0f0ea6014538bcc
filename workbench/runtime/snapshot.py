"""Snapshots: the trained state of a run between two steps, from which the run goes on; when one is taken, and its
files.

A snapshot is every trained parameter with its moments, by name.  On the disk one device writes two sealed files for
each group of layers,
the moments first and then the weights; files whose layers cover the model are a whole snapshot.  From a snapshot on,
steps are done again
in the order that the job's seed gives, so that a run that goes on equals an unbroken one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from workbench.core.errors import MissingDataError
from workbench.core.files import quick_file, whole_file
from workbench.core.job import SnapshotPlace
from workbench.core.run_files import SNAPSHOTS
from workbench.core.sealed import owner_of
from workbench.models.sealed_tensors import Content, content_of, damage_of, write_sealed_tensors
from workbench.runtime.flat_optimizer import STATE_KINDS, Optimizer
from workbench.runtime.state import load_state

MOMENTS, WEIGHTS = KINDS = ("moments", "weights")
SMALL_BYTES = 32_000_000
"""Parameters and moments of a stage that are saved after every step by default.  Saving more would cost more than a
crash loses."""

_WEIGHT = f"{STATE_KINDS[0]}/"
_NAME = re.compile(r"(moments|weights)-epoch-(\d+)-step-(\d+)-layers-(\d+)-(\d+)\.safetensors")


class Position(NamedTuple):
    """A moment between two steps: the next one is `step` of `epoch`, counted from 0.  An epoch ends at step 0 of the
    next one.
    """

    epoch: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """When the state is kept, and where.

    every: steps of the run between two snapshots; 0: only at a pause of the devices.  The end of every epoch also is
    one, always on the
    disk: it gives the epoch's predictions.  to: 'disk', the run's folder; 'neighbour', the memory of the device and of
    the next one.
    keeps_moments: the moments of all epochs stay on the disk until the run ends, so that a damaged file costs only its
    epoch.
    """

    every: int
    to: SnapshotPlace = "disk"
    keeps_moments: bool = True

    def is_due(self, steps: int) -> bool:
        """Return whether a snapshot is taken after so many steps of the run."""
        return bool(self.every) and steps % self.every == 0

    def last(self, steps: int) -> int:
        """Return the number of steps, at most so many, after which one was taken; those at the end of epochs do not
        count.
        """
        return steps - steps % self.every if self.every else 0


class SnapshotFile(NamedTuple):
    """One of a snapshot's files.  kind: 'moments' or 'weights'.  layers: [start, stop)."""

    folder: Path
    kind: str
    at: Position
    layers: tuple[int, int]

    @property
    def path(self) -> Path:
        """Return the file's path."""
        (epoch, step), (start, stop) = self.at, self.layers
        return self.folder / SNAPSHOTS / f"{self.kind}-epoch-{epoch}-step-{step}-layers-{start}-{stop}.safetensors"


def snapshot_files(folder: Path) -> list[SnapshotFile]:
    """Return the files in a run's folder, sorted."""
    files = []
    for path in (folder / SNAPSHOTS).glob("*"):
        if match := _NAME.fullmatch(path.name):
            epoch, step, start, stop = map(int, match.groups()[1:])
            files.append(SnapshotFile(folder, match[1], Position(epoch, step), (start, stop)))
    return sorted(files)


def remove_damaged(folder: Path, run: str) -> list[str]:
    """Remove the files that are not as this run wrote them, and return in sentences what was wrong with each."""
    damage = []
    for path in (file.path for file in snapshot_files(folder)):
        about = path.stat()
        if why := _damage_of(path, run, about.st_ino, about.st_mtime_ns, about.st_size):
            damage.append(why)
            path.unlink()
    return damage


@lru_cache(maxsize=4096)
def _damage_of(path: Path, run: str, *version: int) -> str:
    """Return what is wrong with a file.  version: of the file: one that has been read is not read again after each lost
    device.
    """
    return damage_of(path, owner_of(run, path))


def covering(files: Sequence[SnapshotFile], at: Position, num_layers: int, *kinds: str) -> tuple[Path, ...]:
    """Return files that together have the state of all layers at a position; nothing if some layer lacks.  kinds: by
    default all.
    """
    chosen: list[Path] = []
    for kind in kinds or KINDS:
        cover = _cover([file for file in files if (file.kind, file.at) == (kind, at)], num_layers)
        if cover is None:
            return ()
        chosen += [file.path for file in cover]
    return tuple(chosen)


def _cover(files: Sequence[SnapshotFile], num_layers: int, start: int = 0) -> tuple[SnapshotFile, ...] | None:
    if start == num_layers:
        return ()
    for file in files:
        if file.layers[0] == start < file.layers[1]:
            rest = _cover(files, num_layers, file.layers[1])
            if rest is not None:
                return (file, *rest)
    return None


def passing(folder: Path, *, with_moments: bool = True) -> Iterator[Path]:
    """Yield the files that serve only to go on with the run: all but the weights at the end of an epoch.

    with_moments: also those at the end of an epoch.
    """
    for file in snapshot_files(folder):
        if file.at.step or (with_moments and file.kind == MOMENTS):
            yield file.path
    yield from (folder / SNAPSHOTS).glob("*.part")


def weights_after(folder: Path, run: str, epoch: int, num_layers: int) -> dict[str, Tensor]:
    """Return the trained parameters at the end of an epoch, by name.  run: its fingerprint.

    Raises MissingDataError if the snapshot is incomplete, DamagedError if it was changed.
    """
    paths = covering(snapshot_files(folder), Position(epoch + 1, 0), num_layers, WEIGHTS)
    if not paths:
        asked, found = (
            f"What was trained until epoch {epoch + 1} was asked for.",
            f"'{folder / SNAPSHOTS}' does not hold it whole.",
        )
        raise MissingDataError(asked, found, "Give --workdir a folder that all devices share.")
    return {name.removeprefix(_WEIGHT): tensor for name, tensor in load_state(paths, run).items()}


class SnapshotWriter:
    """Writes the snapshots of some layers into a run's folder.

    Between the ends of epochs it keeps two, because the devices are at most one apart; the next one takes the place of
    the older one.
    """

    def __init__(self, folder: Path, run: str, layers: tuple[int, int], optimizer: Optimizer) -> None:
        """run: its fingerprint.  layers: [start, stop)."""
        self._folder, self._run, self._layers, self._optimizer = folder, run, layers, optimizer
        self._shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in optimizer.named_tensors().items()}
        self._passing = sorted({file.at for file in snapshot_files(folder) if file.layers == layers and file.at.step})

    def write(self, at: Position, *, keeps_moments: bool) -> None:
        """Save the optimizer's state.  keeps_moments: see Snapshot.  Raises WriteError if the system refuses."""
        former = self._passing.pop(0) if at.step and len(self._passing) > 1 else None
        contents = self._contents()
        for kind in KINDS:
            path = self._path(kind, at)
            with quick_file(path, former and self._path(kind, former)) if at.step else whole_file(path) as part:
                of_kind = {name: one for name, one in contents.items() if name.startswith(_WEIGHT) == (kind == WEIGHTS)}
                write_sealed_tensors(part, owner_of(self._run, path), of_kind)
        if at.step and at not in self._passing:
            self._passing.append(at)
        elif not at.step and not keeps_moments:
            self._path(MOMENTS, Position(at.epoch - 2, 0)).unlink(missing_ok=True)

    def _path(self, kind: str, at: Position) -> Path:
        return SnapshotFile(self._folder, kind, at, self._layers).path

    def _contents(self) -> Mapping[str, Content]:
        """Return the state by name.  It lies one tensor after the other in a few vectors: looking at these is
        quicker.
        """
        contents, rest = {}, memoryview(b"")
        vectors = iter(
            self._optimizer.state_vectors()
        )  # an optimizer that keeps versions has other vectors after every step
        for name, (dtype, shape) in self._shapes.items():
            nbytes = dtype.itemsize * math.prod(shape)
            if nbytes and not rest:
                rest = content_of(next(vectors)).data
            contents[name], rest = Content(dtype, shape, rest[:nbytes]), rest[nbytes:]
        return contents
