"""Snapshots: the trained state of a run between two steps, from which the run can continue; when one is taken, and its
files.

A snapshot is every trained parameter with its moments, by name.  On the disk one device writes two sealed files for
each group of layers, the moments first and then the weights; files whose layers cover the model are a complete
snapshot.  After a snapshot is loaded, the steps that follow it are repeated in the order that the job's seed gives, so
that a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.core.errors import MissingDataError
from workbench.core.files import quick_file, remove, whole_file
from workbench.core.job import SnapshotPlace
from workbench.core.run_files import SNAPSHOTS
from workbench.core.sealed import owner_of
from workbench.models.sealed_tensors import Content, content_of, damage_of, write_sealed_tensors
from workbench.runtime.flat_optimizer import STATE_KINDS, Optimizer
from workbench.runtime.state import load_state

MOMENTS, WEIGHTS = KINDS = ("moments", "weights")
SMALL_BYTES = 32_000_000
"""Parameters and moments of a stage of which a device writes a copy while it computes: plans leave room for that.
Of a fine-tuning's they are saved after every step by default.  Saving more would cost more than a crash loses."""

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
    """When and where the state is saved.

    every: steps of the run between two snapshots; 0: only when the devices pause.  There is also one at the end of
    every epoch, always on the disk, from which the epoch's predictions are made.  to: 'disk', the run's folder;
    'neighbour', the memory of the device and of the next one.
    is_small: whether every stage's state is small enough for the disk (see RankJob.small_bytes).  Then the moments of
    all epochs stay on the disk until the run ends, so that a damaged file costs only its epoch.
    """

    every: int
    to: SnapshotPlace = "disk"
    is_small: bool = True

    def is_due(self, steps: int) -> bool:
        """Return whether a snapshot is taken after this number of steps."""
        return bool(self.every) and steps % self.every == 0

    def last(self, steps: int) -> int:
        """Return the number of steps, at most `steps`, after which the last snapshot was taken.  Snapshots at the end
        of epochs do not count.
        """
        return steps - steps % self.every if self.every else 0


class SnapshotFile(NamedTuple):
    """One of a snapshot's files.  kind: 'moments' or 'weights'.  layers: [start, stop)."""

    folder: Path
    kind: str
    position: Position
    layers: tuple[int, int]

    @property
    def path(self) -> Path:
        """Return the file's path."""
        (epoch, step), (start, stop) = self.position, self.layers
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
    """Remove files that differ from what this run wrote, and return a sentence about the damage of each."""
    damage = []
    for path in (file.path for file in snapshot_files(folder)):
        about = path.stat() if path.exists() else path.lstat()
        if why := _damage_of(path, run, about.st_ino, about.st_mtime_ns, about.st_size):
            damage.append(why)
            remove(path)
    return damage


@lru_cache(maxsize=4096)
def _damage_of(path: Path, run: str, *version: int) -> str:
    """Return the damage of a file in a sentence.

    version: identifies the file's content, so that a file is not read again after each lost device.
    """
    return damage_of(path, owner_of(run, path))


def covering(files: Sequence[SnapshotFile], position: Position, num_layers: int, *kinds: str) -> tuple[Path, ...]:
    """Return files that together have the state of all layers at a position.  Empty if a layer is missing.

    kinds: the kinds of files; by default all.
    """
    chosen: list[Path] = []
    for kind in kinds or KINDS:
        cover = _cover([file for file in files if (file.kind, file.position) == (kind, position)], num_layers)
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
    """Yield the files that are only needed to resume the run: all but the weights at the end of an epoch.

    with_moments: whether to include the moments at the end of an epoch.
    """
    for file in snapshot_files(folder):
        if file.position.step or (with_moments and file.kind == MOMENTS):
            yield file.path
    yield from (folder / SNAPSHOTS).glob("*.part")


def weights_after(folder: Path, run: str, epoch: int, num_layers: int) -> dict[str, Tensor]:
    """Return the trained parameters at the end of an epoch, by name.

    run: the run's fingerprint.
    Raises MissingDataError if the snapshot is incomplete, DamagedError if it was changed.
    """
    paths = covering(snapshot_files(folder), Position(epoch + 1, 0), num_layers, WEIGHTS)
    if not paths:
        request, problem = (
            f"What was trained until epoch {epoch + 1} was asked for.",
            f"'{folder / SNAPSHOTS}' does not hold it completely.",
        )
        raise MissingDataError(request, problem, "Give --workdir a folder that all devices share.")
    return {name.removeprefix(_WEIGHT): tensor for name, tensor in load_state(paths, run).items()}


class SnapshotWriter:
    """Writes the snapshots of some layers into a run's folder.  Close it.

    Between the ends of epochs it keeps three snapshots; the next one replaces the oldest.  Two would not be enough: the
    devices are at most one step apart, and each may still be writing its newest.
    """

    def __init__(self, folder: Path, run: str, layers: tuple[int, int], optimizer: Optimizer) -> None:
        """run: the run's fingerprint.  layers: [start, stop)."""
        self._folder, self._run, self._layers, self._optimizer = folder, run, layers, optimizer
        self._shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in optimizer.named_tensors().items()}
        self._passing = sorted(
            {file.position for file in snapshot_files(folder) if file.layers == layers and file.position.step}
        )
        self._copies: tuple[Tensor, ...] = ()
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    @property
    def is_small(self) -> bool:
        """Return whether there is room for a copy of the state (see SMALL_BYTES)."""
        return sum(vector.nbytes for vector in self._optimizer.state_vectors()) <= SMALL_BYTES

    def write(self, position: Position, *, keeps_moments: bool) -> None:
        """Save the optimizer's state, once the snapshot before it is written.

        keeps_moments: whether those of the epoch before the last stay.  Raises WriteError if the system refuses this
        one or the one before.
        """
        self.wait()
        self._write(position, self._optimizer.state_vectors(), keeps_moments)

    def write_copy(self, position: Position, written: Callable[[], None]) -> None:
        """Copy the optimizer's state, and save the copy in a thread while the device computes: for a small state.

        written: called in that thread afterwards.  Raises the WriteError of the snapshot before.
        """
        self.wait()
        vectors = self._optimizer.state_vectors()
        if not self._copies:
            self._copies = tuple(torch.empty_like(vector) for vector in vectors)
            self._thread = ThreadPoolExecutor(1, "snapshots")
        for copy, vector in zip(self._copies, vectors, strict=True):
            copy.copy_(vector)

        def write() -> None:
            self._write(position, self._copies, True)
            written()

        assert self._thread is not None
        self._writing = self._thread.submit(write)

    def wait(self) -> None:
        """Wait until the last snapshot is written.  Raises WriteError if the system refused it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Wait as `wait` does, and end the thread."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()

    def _write(self, position: Position, vectors: Sequence[Tensor], keeps_moments: bool) -> None:
        former = self._passing.pop(0) if position.step and len(self._passing) > 2 else None
        contents = self._contents(vectors)
        for kind in KINDS:
            path = self._path(kind, position)
            with quick_file(path, former and self._path(kind, former)) if position.step else whole_file(path) as part:
                of_kind = {
                    name: tensor for name, tensor in contents.items() if name.startswith(_WEIGHT) == (kind == WEIGHTS)
                }
                write_sealed_tensors(part, owner_of(self._run, path), of_kind)
        if position.step and position not in self._passing:
            self._passing.append(position)
        elif not position.step and not keeps_moments:
            self._path(MOMENTS, Position(position.epoch - 2, 0)).unlink(missing_ok=True)

    def _path(self, kind: str, position: Position) -> Path:
        return SnapshotFile(self._folder, kind, position, self._layers).path

    def _contents(self, vectors: Sequence[Tensor]) -> Mapping[str, Content]:
        """Return the state by name.  It lies one tensor after the other in a few vectors: looking at these
        is quicker.
        """
        contents, rest = {}, memoryview(b"")
        vector = iter(vectors)
        for name, (dtype, shape) in self._shapes.items():
            nbytes = dtype.itemsize * math.prod(shape)
            if nbytes and not rest:
                rest = content_of(next(vector)).data
            contents[name], rest = Content(dtype, shape, rest[:nbytes]), rest[nbytes:]
        return contents
