"""Keep the backbone's activations of every sample on disk (PAC+, section IV-B): written in epoch 1, read ever after.

A record is one sample's taps, (num_taps, length, width), with no padding. Records lie in one file, in the order
of the samples, and are read through a memory map. A manifest names what they were made from.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from workbench.core.errors import CacheError, ConfigError
from workbench.core.serial import from_json, to_json, write_text

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def cache_dtype(name: str) -> torch.dtype:
    """Return the storage type by name.  Raises ConfigError for an unknown one."""
    if name not in _DTYPES:
        raise ConfigError(f"An activation cache of type '{name}' was asked for.", f"There are {', '.join(_DTYPES)}.", "Choose one.")
    return _DTYPES[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheManifest:
    """What a cache file holds.  fingerprint: of backbone, tokenizer and data.  crc32: of the whole file, None while it is written."""

    fingerprint: str
    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    num_taps: int
    width: int
    dtype: str
    crc32: int | None = None

    @property
    def nbytes(self) -> int:
        """Return the file's size in bytes."""
        return sum(self.lengths) * self.num_taps * self.width * cache_dtype(self.dtype).itemsize


class ActivationCache:
    """The taps of some samples, in a folder of their own."""

    def __init__(self, folder: Path, manifest: CacheManifest) -> None:
        self.folder, self.manifest = folder, manifest
        token = manifest.num_taps * manifest.width
        ends = list(accumulate(length * token for length in manifest.lengths))
        self._start = dict(zip(manifest.samples, [0, *ends][: len(ends)], strict=True))
        self._length = dict(zip(manifest.samples, manifest.lengths, strict=True))
        self._data = (
            torch.from_file(str(folder / "taps.bin"), shared=True, size=ends[-1], dtype=cache_dtype(manifest.dtype))
            if ends
            else torch.empty(0, dtype=cache_dtype(manifest.dtype))
        )

    @classmethod
    def create(cls, folder: Path, manifest: CacheManifest) -> ActivationCache:
        """Make an empty cache, its space on the disk taken at once.  Raises CacheError if the disk is full."""
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir(parents=True)
            with open(folder / "taps.bin", "wb") as file:
                if manifest.nbytes:
                    _allocate(file, manifest.nbytes)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise CacheError(
                f"An activation cache of {manifest.nbytes / 1e6:.1f} MB was asked for in '{folder}'.",
                f"{error.strerror}{_free(folder)}.",
                "Free some space, use fewer samples, or point --workdir or WORKBENCH_CACHE to another disk.",
            ) from error
        return cls(folder, manifest)

    @classmethod
    def open(cls, folder: Path, *, fingerprint: str) -> ActivationCache:
        """Open a finished cache.  Raises CacheError if it is missing, unfinished, stale, truncated or corrupted."""
        asked = f"The activation cache in '{folder}' was to be used."
        again = "It is not used; the backbone has to fill it again."
        try:
            manifest = from_json((folder / "manifest.json").read_bytes(), CacheManifest, source=str(folder / "manifest.json"))
            size, nbytes = (folder / "taps.bin").stat().st_size, manifest.nbytes
        except FileNotFoundError:
            raise CacheError(asked, "It is missing or unfinished.", again) from None
        except (OSError, ConfigError) as error:
            raise CacheError(asked, f"It does not read: {error}", again) from error
        if manifest.fingerprint != fingerprint:
            raise CacheError(asked, "It was made by another backbone, tokenizer or dataset.", again)
        if size != nbytes or len(manifest.samples) != len(manifest.lengths):
            raise CacheError(asked, f"It has {size} bytes instead of {nbytes}.", again)
        if _crc32(folder / "taps.bin") != manifest.crc32:
            raise CacheError(asked, "Its bytes were changed (checksum differs).", again)
        return cls(folder, manifest)

    def finish(self) -> None:
        """Write the manifest with the checksum: from now on the cache can be opened."""
        manifest = CacheManifest(
            fingerprint=self.manifest.fingerprint,
            samples=self.manifest.samples,
            lengths=self.manifest.lengths,
            num_taps=self.manifest.num_taps,
            width=self.manifest.width,
            dtype=self.manifest.dtype,
            crc32=_crc32(self.folder / "taps.bin"),
        )
        write_text(self.folder / "manifest.json", to_json(manifest))

    def remove(self) -> None:
        """Delete the cache from the disk."""
        self._data = torch.empty(0, dtype=self._data.dtype)
        shutil.rmtree(self.folder, ignore_errors=True)

    def record(self, sample: int) -> Tensor:
        """Return one sample's taps, (num_taps, length, width), as a view that may be written."""
        length = self._length[sample]
        shape = (self.manifest.num_taps, length, self.manifest.width)
        start = self._start[sample]
        return self._data[start : start + shape[0] * shape[1] * shape[2]].view(shape)

    def batch(self, samples: Sequence[int], padded_length: int) -> Tensor:
        """Return the taps of some samples, zero-padded: (num_taps, n, padded_length, width)."""
        out = torch.zeros(self.manifest.num_taps, len(samples), padded_length, self.manifest.width, dtype=self._data.dtype)
        for row, sample in enumerate(samples):
            out[:, row, : self._length[sample]] = self.record(sample)
        return out

    def write_batch(self, samples: Sequence[int], taps: Tensor) -> None:
        """Store the taps of some samples.  taps: (num_taps, n, padded_length, width)."""
        for row, sample in enumerate(samples):
            self.record(sample).copy_(taps[:, row, : self._length[sample]])


def _allocate(file: BinaryIO, nbytes: int) -> None:
    # A memory map of a sparse file ends in SIGBUS when the disk is full; taking the space now gives ENOSPC instead.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return
    block = bytes(1 << 20)
    for _ in range(nbytes // len(block)):
        file.write(block)
    file.write(block[: nbytes % len(block)])


def _free(folder: Path) -> str:
    """Return how much room there is, in words; nothing where that cannot be found out."""
    try:
        return f"; {shutil.disk_usage(folder.parent).free / 1e6:.1f} MB are free"
    except OSError:
        return ""


def _crc32(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return crc
