"""Activation caches that stay after their run, for the next one on the same backbone and data (PAC+, section IV-B).

What is kept does not depend on plan, seed, learning rate or reduction: the key is a fingerprint of backbone, quantization, tokenizer,
data and storage type.  The ranks' shards are moved as they are, and a later run with other shards reads across all of them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from workbench.core.errors import CacheError, ConfigError, WorkbenchError
from workbench.core.serial import from_json, to_json, write_text
from workbench.fetch import cache_folder
from workbench.runtime.activation_cache import MANIFEST, ActivationCache, CacheManifest, read_batch
from workbench.runtime.activation_records import RecordLayout
from workbench.runtime.work_folder import require_disk

INDEX = "kept.json"
_NEW, _FORMER = "new", "former"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptDescription:
    """What lies in a kept cache's folder.  shards: folder and fingerprint of each.  created: ISO 8601, UTC.  nbytes: of all records."""

    key: str
    model: str
    task: str
    created: str
    shards: tuple[tuple[str, str], ...] = ()
    num_samples: int = 0
    nbytes: int = 0
    dtype: str = ""


class KeptCache:
    """The records of several shards as one cache; only for reading."""

    def __init__(self, shards: Sequence[ActivationCache]) -> None:
        self._shards = shards
        self._shard_of = {sample: shard for shard in shards for sample in shard.samples}
        self.layout: RecordLayout = shards[0].layout

    @property
    def samples(self) -> tuple[int, ...]:
        """Return the samples that have a record."""
        return tuple(sorted(self._shard_of))

    def check(self, samples: Iterable[int]) -> None:
        """Raise CacheError if a record of these samples is missing or differs from its checksum."""
        wanted = set(samples)
        missing = wanted - self._shard_of.keys()
        if missing:
            raise CacheError(
                "A kept activation cache was to be used.", f"It lacks {len(missing)} samples.", "The backbone has to fill it again."
            )
        for shard in self._shards:
            shard.check(wanted.intersection(shard.samples))

    def read(self, sample: int) -> list[Tensor]:
        """Return one sample's taps (see ActivationCache.read)."""
        return self._shard_of[sample].read(sample)

    def batch(self, samples: Sequence[int], padded_length: int | None, buffer: Tensor | None = None) -> list[Tensor]:
        """Return the taps of some samples (see ActivationCache.batch)."""
        return read_batch([(self._shard_of[sample], sample) for sample in samples], self.layout, padded_length, buffer)

    def batch_bytes(self, num_samples: int, padded_length: int) -> int:
        """Return how large a buffer `batch` needs for so many samples."""
        return self.layout.batch_bytes(num_samples, padded_length)


class KeptCaches:
    """The folder of all kept caches: `activations` in the workbench's cache folder unless another root is given."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = cache_folder() / "activations" if root is None else root

    def folder(self, key: str) -> Path:
        """Return where the cache of a key lies."""
        return self.root / hashlib.sha256(key.encode()).hexdigest()[:24]

    def keep(self, shards: Sequence[Path], description: KeptDescription) -> KeptDescription:
        """Move the folders of finished caches here, in place of what was kept for the key, and return the description filled in.

        Raises CacheError, and leaves the shards where they are, if one of them is not finished.
        """
        folder = self.folder(description.key)
        self.root.mkdir(parents=True, exist_ok=True)
        opened = [ActivationCache.open(shard, fingerprint=fingerprint_of(shard), verify=False) for shard in shards]
        manifests = [cache.manifest for cache in opened if cache.samples]
        sources = [cache.folder for cache in opened if cache.samples]
        for cache in opened:
            cache.close()
        filled = replace(
            description,
            shards=tuple((f"shard-{index}", manifest.fingerprint) for index, manifest in enumerate(manifests)),
            num_samples=sum(len(manifest.samples) for manifest in manifests),
            nbytes=sum(manifest.nbytes for manifest in manifests),
            dtype=manifests[0].dtype if manifests else "",
        )
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=self.root))
        try:
            (part / _NEW).mkdir()
            for source, (name, _) in zip(sources, filled.shards, strict=True):
                shutil.move(source, part / _NEW / name)  # a rename on the same disk
            write_text(part / _NEW / INDEX, to_json(filled))
            while True:
                with contextlib.suppress(FileNotFoundError):
                    folder.rename(part / _FORMER)  # at once, so that another run finds the old cache whole or the new one
                try:
                    (part / _NEW).rename(folder)
                    break
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise  # otherwise another run has kept the same meanwhile: its cache is as good, and makes room
                    shutil.rmtree(part / _FORMER, ignore_errors=True)
            shutil.rmtree(part, ignore_errors=True)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        return filled

    def find(self, key: str) -> KeptCache | None:
        """Return what is kept for a key, None if there is nothing.  Its bytes are not read yet: call `check` for those in use.

        Raises CacheError for a cache that is there and cannot be used.
        """
        folder = self.folder(key)
        if not folder.is_dir():
            return None
        description = _describe(folder)
        if description is None or description.key != key:
            raise CacheError(
                f"The kept activation cache in '{folder}' was to be used.",
                "Its index does not read.",
                "It is not used; the backbone has to fill it again.",
            )
        if not description.shards:
            return None
        return KeptCache([ActivationCache.open(folder / name, fingerprint=mine, verify=False) for name, mine in description.shards])

    def list(self) -> tuple[KeptDescription, ...]:
        """Return what is kept, the newest first."""
        folders = self.root.iterdir() if self.root.is_dir() else ()
        found = [description for folder in folders if (description := _describe(folder)) is not None]
        return tuple(sorted(found, key=lambda description: description.created, reverse=True))

    def clear(self, keys: Iterable[str] | None = None) -> int:
        """Delete the caches of these keys, or whatever lies in the folder, broken ones too; return the bytes that were freed."""
        everything = self.root.iterdir() if self.root.is_dir() else ()
        folders = [*everything] if keys is None else [self.folder(key) for key in keys]
        freed = 0
        for folder in folders:
            freed += sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.root.rmdir()
        return freed


def fingerprint_of(folder: Path) -> str:
    """Return the fingerprint in a cache's manifest.  Raises CacheError if it does not read."""
    try:
        return from_json((folder / MANIFEST).read_bytes(), CacheManifest, source=str(folder / MANIFEST)).fingerprint
    except (OSError, ConfigError) as error:
        raise CacheError(
            f"The activation cache in '{folder}' was to be kept.", f"It does not read: {error}", "It is left there."
        ) from error


def require_fits(nbytes: int, budget_bytes: int | None, folder: Path) -> None:
    """Raise CacheError, before anything has started, if a run's activations exceed the disk budget or the free disk.

    nbytes: that the run adds to the folder at most.  budget_bytes: what the user grants, None for all that is free.
    """
    if budget_bytes is not None and nbytes > budget_bytes:
        raise CacheError(
            f"The activation cache needs {nbytes / 1e6:.1f} MB in '{folder}' while it is redistributed.",
            f"The disk budget is {budget_bytes / 1e6:.1f} MB.",
            "Raise disk_budget_bytes, store the cache as int8 (cache_dtype), use fewer samples, or train 1 epoch.",
        )
    require_disk(folder, nbytes)


def _describe(folder: Path) -> KeptDescription | None:
    try:
        return from_json((folder / INDEX).read_bytes(), KeptDescription, source=str(folder / INDEX))
    except (OSError, WorkbenchError):
        return None
