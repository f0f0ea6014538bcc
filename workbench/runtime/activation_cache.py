"""Cache the backbone's activations of every sample on disk (PAC+, section IV-B): written in epoch 1, read in later
epochs.

A record holds one sample's taps without padding (see activation_records).  All records lie in one file, in sample
order, which is read through a memory map.  A sealed manifest names the cache's owner, model and data, and holds a
checksum for each record.  While the cache is being written, a second file holds the checksums of the complete records,
so that an interrupted epoch can continue.
"""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from workbench.core.errors import CacheError, ConfigError, DamagedError, WriteError
from workbench.core.files import LIMITS
from workbench.core.sealed import checksum, read_sealed, write_sealed
from workbench.core.units import size_words
from workbench.runtime.activation_records import RecordLayout, allocate, as_array, decoded_dtype, map_file

cache_dtype = decoded_dtype
DATA, MANIFEST, WRITTEN = "taps.bin", "manifest.json", "written.bin"
_NOT_WRITTEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheManifest(RecordLayout):
    """Describes the contents of a cache file.

    fingerprint: hash of backbone, quantization, tokenizer and data.  owner: the device's name.

    checksums: one for each record (see core.sealed); None while the cache is being written.
    """

    fingerprint: str
    owner: str = ""
    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    checksums: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Return the size of the file in bytes."""
        return self.total_bytes(self.lengths)


class ActivationCache:
    """The cached taps of a set of samples, stored in one folder."""

    def __init__(self, folder: Path, manifest: CacheManifest) -> None:
        self.folder, self.manifest = folder, manifest
        ends = list(accumulate(map(self.manifest.rows, manifest.lengths)))
        self._place = {sample: place for place, sample in enumerate(manifest.samples)}
        self._starts = [0, *ends][: len(ends)]  # rows
        # (all records' rows, row_bytes) uint8
        self._memory = map_file(folder / DATA, manifest.nbytes)
        self.rows = as_array(self._memory, np.uint8, (ends[-1] if ends else 0, self.manifest.row_bytes))
        self._data = torch.from_numpy(self.rows)
        self._checksums = np.full(len(ends), _NOT_WRITTEN, dtype=np.int64)

    @classmethod
    def create(cls, folder: Path, manifest: CacheManifest) -> ActivationCache:
        """Create an empty cache and reserve its disk space at once.  Raises CacheError if the disk is full."""
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir(parents=True)
            with open(folder / DATA, "wb") as file:
                if manifest.nbytes:
                    allocate(file, manifest.nbytes)
            np.full(len(manifest.samples), _NOT_WRITTEN, dtype=np.int64).tofile(folder / WRITTEN)
            write_sealed(folder / MANIFEST, manifest.owner, manifest)
        except (OSError, WriteError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            todo = "Free some space, use fewer samples, or point --workdir or WORKBENCH_CACHE to another disk."
            raise CacheError(
                f"An activation cache of {size_words(manifest.nbytes)} was asked for in '{folder}'.",
                f"{error.found.rstrip('.') if isinstance(error, WriteError) else error.strerror}{_free(folder)}.",
                LIMITS.get(error.errno or 0, todo) if isinstance(error, OSError) else todo,
            ) from error
        cache = cls(folder, manifest)
        cache._map_checksums()
        return cache

    @classmethod
    def open(cls, folder: Path, *, fingerprint: str, owner: str = "", verify: bool = True) -> ActivationCache:
        """Open a finished cache.

        Raises CacheError if it is missing, unfinished, stale, truncated, another device's, or (with verify) corrupted.
        """
        manifest = _read_manifest(folder, fingerprint, owner)
        if manifest.checksums is None:
            raise _unusable(folder, "It is missing or unfinished.")
        cache = cls(folder, manifest)
        cache._checksums = np.asarray(manifest.checksums, dtype=np.int64)
        if verify and cache._damaged(range(len(manifest.samples))):
            raise _unusable(folder, "Its bytes were changed (checksum differs).")
        return cache

    @classmethod
    def open_as(cls, folder: Path, manifest: CacheManifest) -> ActivationCache:
        """Open a finished cache that has exactly these samples and taps (see open)."""
        cache = cls.open(folder, fingerprint=manifest.fingerprint, owner=manifest.owner)
        _require_alike(folder, cache.manifest, manifest)
        return cache

    @classmethod
    def reopen(cls, folder: Path, manifest: CacheManifest, *, verify: bool = True) -> ActivationCache:
        """Open the cache of an interrupted run, finished or not, to continue writing; `written` lists the complete
        records.

        With verify, a record that differs from its checksum counts as not written.  Raises CacheError if the cache is
        missing, truncated or was made for another manifest.
        """
        stored = _read_manifest(folder, manifest.fingerprint, manifest.owner)
        _require_alike(folder, stored, manifest)
        cache = cls(folder, replace(manifest, checksums=None))
        if stored.checksums is not None:
            np.asarray(stored.checksums, dtype=np.int64).tofile(folder / WRITTEN)
        elif not (folder / WRITTEN).is_file() or (folder / WRITTEN).stat().st_size != 8 * len(manifest.samples):
            raise _unusable(folder, "Its list of complete records is missing or truncated.")
        cache._map_checksums()
        if verify:
            cache._checksums[cache._damaged(range(len(manifest.samples)))] = _NOT_WRITTEN
        return cache

    @property
    def written(self) -> frozenset[int]:
        """Return the samples whose records are complete."""
        return frozenset(sample for sample, place in self._place.items() if self._checksums[place] != _NOT_WRITTEN)

    @property
    def samples(self) -> tuple[int, ...]:
        """Return the samples that this cache covers."""
        return self.manifest.samples

    def finish(self) -> None:
        """Write the manifest with all checksums.  After this the cache can be opened."""
        for place in np.flatnonzero(self._checksums == _NOT_WRITTEN):
            self._checksums[place] = self._checksum(int(place))
        self.manifest = replace(self.manifest, checksums=tuple(self._checksums.tolist()))
        write_sealed(self.folder / MANIFEST, self.manifest.owner, self.manifest)
        (self.folder / WRITTEN).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file.  Nothing can be read afterwards."""
        self._memory = None
        self.rows = np.empty((0, self.manifest.row_bytes), dtype=np.uint8)
        self._data = torch.from_numpy(self.rows)
        self._checksums = np.array(self._checksums)

    def moved(self, folder: Path) -> ActivationCache:
        """Move a finished cache to another folder, replacing that folder, and return the moved cache."""
        self.close()
        shutil.rmtree(folder, ignore_errors=True)
        self.folder.rename(folder)
        return ActivationCache.open(
            folder, fingerprint=self.manifest.fingerprint, owner=self.manifest.owner, verify=False
        )

    def remove(self) -> None:
        """Delete the cache from the disk."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def raw(self, sample: int) -> Tensor:
        """Return a writable view of one sample's record as bytes, (rows, row_bytes) uint8."""
        place = self._place[sample]
        start = self._starts[place]
        return self._data[start : start + self.manifest.rows(self.manifest.lengths[place])]

    def raw_taps(self, sample: int, first: int, count: int) -> Tensor:
        """Return a writable view of the bytes of taps [first, first + count) of a record, (rows, row_bytes) uint8."""
        return self.raw(sample)[self.manifest.run(first, count, self.manifest.lengths[self._place[sample]])]

    def batch(self, samples: Sequence[int], padded_length: int | None, buffer: Tensor | None = None) -> list[Tensor]:
        """Return a batch of taps in the decoded dtype: (n, padded_length, width) each, then (n, target_length, width)
        each.

        The taps are zero-padded views of one tensor.  padded_length: None packs the samples' tokens, (tokens, width)
        each.
        buffer: memory to reuse for the batch (see RecordLayout.batch_bytes); None allocates new memory.
        """
        layout, places = self.manifest, [self._place[sample] for sample in samples]
        starts, lengths = [self._starts[place] for place in places], [layout.lengths[place] for place in places]
        self._will_need(starts, lengths)
        rows, padding = layout.batch_rows(starts, lengths, padded_length)
        raw = layout.raw_part(buffer, len(rows))
        if len(rows):
            # numpy's take runs on one core and releases the GIL, which suits a prefetch thread.
            np.take(self.rows, rows, axis=0, out=raw.numpy(), mode="clip")
        raw.numpy()[padding] = 0
        taps = layout.split(layout.decode(raw, layout.decoded_part(buffer, len(rows))), len(samples))
        if padded_length is None:
            return taps
        shapes = [padded_length] * layout.num_taps + [layout.target_length] * layout.num_target_taps
        return [tap.view(len(samples), length, layout.width) for tap, length in zip(taps, shapes, strict=True)]

    def write_batch(self, samples: Sequence[int], taps: Sequence[Tensor]) -> None:
        """Store the taps of a batch, of any float dtype: (n, padded_length, width) each, then (n, target_length, width)
        each.
        """
        if len(taps) != self.manifest.num_taps + self.manifest.num_target_taps:
            raise ValueError(
                f"{len(taps)} taps were given for {self.manifest.num_taps} + {self.manifest.num_target_taps}"
            )
        for row, sample in enumerate(samples):
            place = self._place[sample]
            self._checksums[place] = _NOT_WRITTEN  # until the record is complete again
            length = self.manifest.lengths[place]
            hidden_states = [tap[row, :length] for tap in taps[: self.manifest.num_taps]] + [
                tap[row] for tap in taps[self.manifest.num_taps :]
            ]
            self.manifest.encode(torch.cat(hidden_states), self.raw(sample))
            self._checksums[place] = self._checksum(place)

    def _will_need(self, starts: Sequence[int], lengths: Sequence[int]) -> None:
        """Ask the operating system to prefetch records from disk, all at once and in the background."""
        if self._memory is None or not hasattr(self._memory, "madvise"):
            return
        for start, length in zip(starts, lengths, strict=True):
            first = start * self.manifest.row_bytes
            page = first // mmap.PAGESIZE * mmap.PAGESIZE
            self._memory.madvise(mmap.MADV_WILLNEED, page, first - page + self.manifest.record_bytes(length))

    def _map_checksums(self) -> None:
        count = len(self.manifest.samples)
        self._checksums = as_array(map_file(self.folder / WRITTEN, 8 * count), np.int64, (count,))

    def _checksum(self, place: int) -> int:
        start, manifest = self._starts[place], self.manifest
        # The record's own name comes first: a record in another's place, or of another device, differs.
        expected = checksum(f"{manifest.owner} {manifest.fingerprint} {manifest.samples[place]}")
        return checksum(
            expected, memoryview(self.rows[start : start + manifest.rows(manifest.lengths[place])].reshape(-1))
        )

    def _damaged(self, places: Iterable[int]) -> list[int]:
        """Return the records that differ from their checksum.  A record without a checksum does not count."""
        checksums = self._checksums.tolist()
        return [
            place for place in places if checksums[place] != _NOT_WRITTEN and checksums[place] != self._checksum(place)
        ]


def _read_manifest(folder: Path, fingerprint: str, owner: str) -> CacheManifest:
    """Return the manifest of a cache whose data file has the right size.  Raises CacheError otherwise."""
    try:
        manifest = read_sealed(folder / MANIFEST, owner, CacheManifest)
        size, nbytes = (folder / DATA).stat().st_size, manifest.nbytes
    except FileNotFoundError:
        raise _unusable(folder, "It is missing or unfinished.") from None
    except DamagedError as error:
        raise _unusable(folder, error.found) from error
    except (OSError, ConfigError) as error:
        raise _unusable(folder, f"It does not read: {error}") from error
    if manifest.fingerprint != fingerprint:
        raise _unusable(folder, "It was made by another backbone, quantization, tokenizer or dataset.")
    counts = {len(manifest.samples), len(manifest.lengths), len(manifest.checksums or manifest.lengths)}
    if size != nbytes or len(counts) > 1:
        raise _unusable(folder, f"It has {size} bytes instead of {nbytes}, or its lists of samples do not match.")
    return manifest


def _require_alike(folder: Path, stored: CacheManifest, manifest: CacheManifest) -> None:
    if replace(stored, checksums=None) != replace(manifest, checksums=None):
        raise _unusable(folder, "It was made for other samples or taps.")


def _unusable(folder: Path, problem: str) -> CacheError:
    return CacheError(
        f"The activation cache in '{folder}' was to be used.",
        problem,
        "It is not used; the backbone has to fill it again.",
    )


def _free(folder: Path) -> str:
    """Describe the free disk space in words.  Returns an empty text if it is unknown."""
    try:
        return f"; {size_words(shutil.disk_usage(folder.parent).free)} are free"
    except OSError:
        return ""
