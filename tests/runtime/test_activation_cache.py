from __future__ import annotations

import errno
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from workbench.core.errors import CacheError, ConfigError
from workbench.core.serial import from_json, to_json
from workbench.runtime.activation_cache import ActivationCache, CacheManifest, cache_dtype

MANIFEST = CacheManifest(fingerprint="mine", samples=(7, 3, 5), lengths=(4, 2, 6), num_taps=3, width=8, dtype="bfloat16")


def taps(length: int, count: int = 1) -> torch.Tensor:
    return (
        torch.arange(MANIFEST.num_taps * count * length * MANIFEST.width).view(MANIFEST.num_taps, count, length, MANIFEST.width).bfloat16()
    )


def finished(folder: Path) -> ActivationCache:
    cache = ActivationCache.create(folder, MANIFEST)
    cache.write_batch([7, 5], taps(6, 2))
    cache.write_batch([3], taps(2))
    cache.finish()
    return cache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_written_is_read_in_a_fresh_object(dtype: str, tmp_path: Path) -> None:
    manifest = replace(MANIFEST, dtype=dtype)
    cache = ActivationCache.create(tmp_path / "cache", manifest)
    written = torch.randn(3, 2, 6, 8).to(cache_dtype(dtype))
    cache.write_batch([7, 5], written)
    cache.finish()
    read = ActivationCache.open(tmp_path / "cache", fingerprint="mine").batch([5, 7], 8)
    assert read.shape == (3, 2, 8, 8)
    assert torch.equal(read[:, 0, :6], written[:, 1])
    assert torch.equal(read[:, 1, :4], written[:, 0, :4])
    assert not read[:, 1, 4:].any() and not read[:, 0, 6:].any()  # padding is zero
    assert manifest.nbytes == (4 + 2 + 6) * 3 * 8 * cache_dtype(dtype).itemsize == (tmp_path / "cache" / "taps.bin").stat().st_size


def test_an_empty_cache_is_whole(tmp_path: Path) -> None:
    ActivationCache.create(tmp_path, replace(MANIFEST, samples=(), lengths=())).finish()
    assert ActivationCache.open(tmp_path, fingerprint="mine").batch([], 4).shape == (3, 0, 4, 8)


def test_removed_leaves_nothing(tmp_path: Path) -> None:
    finished(tmp_path / "cache").remove()
    assert list(tmp_path.iterdir()) == []


def _edit(folder: Path, **changes: object) -> None:
    manifest = from_json((folder / "manifest.json").read_bytes(), CacheManifest)
    (folder / "manifest.json").write_text(to_json(replace(manifest, **changes)))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "missing or unfinished"),
        (lambda folder: (folder / "taps.bin").unlink(), "missing or unfinished"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "does not read"),
        (lambda folder: _edit(folder, dtype="float16"), "does not read"),
        (lambda folder: _edit(folder, samples=(7, 3)), "bytes instead of"),
        (lambda folder: os.truncate(folder / "taps.bin", 10), "10 bytes instead of 576"),
        (lambda folder: (folder / "taps.bin").write_bytes(bytes(576)), "checksum"),
        (lambda folder: _edit(folder, fingerprint="another"), "another backbone"),
    ],
)
def test_what_cannot_be_used_is_told(damage, said: str, tmp_path: Path) -> None:
    finished(tmp_path)
    damage(tmp_path)
    with pytest.raises(CacheError, match=f"{said}.*has to fill it again"):
        ActivationCache.open(tmp_path, fingerprint="mine")


def test_unfinished_is_not_opened(tmp_path: Path) -> None:
    ActivationCache.create(tmp_path / "cache", MANIFEST)
    with pytest.raises(CacheError, match="unfinished"):
        ActivationCache.open(tmp_path / "cache", fingerprint="mine")


def test_a_full_disk_leaves_nothing_and_is_told_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuses, raising=False)
    huge = replace(MANIFEST, lengths=(10**6, 2, 6))
    with pytest.raises(CacheError, match=r"48\.0 MB.*No space left.*MB are free.*WORKBENCH_CACHE"):
        ActivationCache.create(tmp_path / "cache", huge)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="files there are never sparse")
@pytest.mark.parametrize("has_fallocate", [True, False])
def test_the_space_is_taken_at_once(has_fallocate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory map of a file with holes would end in SIGBUS when the disk is full."""
    if not has_fallocate:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    cache = ActivationCache.create(tmp_path, replace(MANIFEST, lengths=(40_000, 2, 6)))
    status = (tmp_path / "taps.bin").stat()
    assert status.st_size == cache.manifest.nbytes
    assert status.st_blocks * 512 >= status.st_size


def test_unknown_type() -> None:
    with pytest.raises(ConfigError, match="float32, bfloat16"):
        cache_dtype("float16")
