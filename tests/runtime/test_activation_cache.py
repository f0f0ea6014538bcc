from __future__ import annotations

import errno
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from workbench.core.errors import CacheError, ConfigError
from workbench.core.sealed import read_sealed, write_sealed
from workbench.runtime.activation_cache import ActivationCache, CacheManifest, cache_dtype
from workbench.runtime.activation_records import RecordLayout

STORAGE_TYPES = ("float32", "bfloat16", "int8")
MANIFEST = CacheManifest(
    fingerprint="mine", samples=(7, 3, 5), lengths=(4, 2, 6), num_taps=3, width=8, dtype="bfloat16"
)
DECODER = replace(MANIFEST, num_target_taps=2, target_length=3)


def taps(length: int, count: int = 1, manifest: CacheManifest = MANIFEST) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(length)
    own = [torch.randn(count, length, manifest.width, generator=drawn) for _ in range(manifest.num_taps)]
    return own + [
        torch.randn(count, manifest.target_length, manifest.width, generator=drawn)
        for _ in range(manifest.num_target_taps)
    ]


def finished(folder: Path, manifest: CacheManifest = MANIFEST) -> ActivationCache:
    cache = ActivationCache.create(folder, manifest)
    cache.write_batch([7, 5], taps(6, 2, manifest))
    cache.write_batch([3], taps(2, 1, manifest))
    cache.finish()
    return cache


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("manifest", [MANIFEST, DECODER])
@pytest.mark.parametrize("dtype", STORAGE_TYPES)
def test_what_was_written_is_read_in_a_fresh_object(
    dtype: str, manifest: CacheManifest, buffered: bool, tmp_path: Path
) -> None:
    manifest = replace(manifest, dtype=dtype)
    finished(tmp_path / "cache", manifest)
    written = taps(6, 2, manifest)
    cache = ActivationCache.open(tmp_path / "cache", fingerprint="mine")
    buffer = torch.full((cache.manifest.batch_bytes(2, 8),), 77, dtype=torch.uint8) if buffered else None
    read = cache.batch([5, 7], 8, buffer)
    assert len(read) == len(written) == manifest.num_taps + manifest.num_target_taps
    precision = {"float32": 0.0, "bfloat16": 1 / 256, "int8": 1 / 254 + 1 / 256}[dtype]
    for index, (mine, theirs) in enumerate(zip(read, written, strict=True)):
        assert mine.dtype == cache_dtype(dtype)
        if index >= manifest.num_taps:
            torch.testing.assert_close(mine.float(), theirs.flip(0), rtol=precision, atol=precision * 4)
            continue
        assert mine.shape == (2, 8, 8)
        torch.testing.assert_close(mine[0, :6].float(), theirs[1], rtol=precision, atol=precision * 4)
        torch.testing.assert_close(mine[1, :4].float(), theirs[0, :4], rtol=precision, atol=precision * 4)
        assert not mine[1, 4:].any() and not mine[0, 6:].any()  # padding is zero
        assert torch.equal(cache.batch([7], None)[index], mine[1, :4])
    assert len({tap.untyped_storage().data_ptr() for tap in read}) == 1
    assert manifest.nbytes == (tmp_path / "cache" / "taps.bin").stat().st_size
    rows = (4 + 2 + 6) * 3 + 3 * manifest.num_target_taps * manifest.target_length
    assert manifest.nbytes == rows * {"float32": 32, "bfloat16": 16, "int8": 8 + 4}[dtype]


@pytest.mark.parametrize("width", [384, 768, 100, 7])
def test_int8_keeps_the_equations_bound(width: int) -> None:
    """Each value is within half a step of its block's scale (Eq. 1-2), an outlier harms its own block alone, and zero
    stays zero."""
    layout = RecordLayout(dtype="int8", width=width, num_taps=1)
    assert width % layout.block_size == 0 and layout.block_size <= 64
    values = torch.randn(50, width, generator=torch.Generator().manual_seed(0))
    values[3, 0] = 1e4  # an outlier
    values[4] = 0
    raw = torch.zeros(50, layout.row_bytes, dtype=torch.uint8)
    layout.encode(values, raw)
    decoded = layout.decode(raw, torch.empty(50, width)).unflatten(1, (-1, layout.block_size))
    blocks = values.unflatten(1, (-1, layout.block_size))
    bound = blocks.abs().amax(dim=2, keepdim=True) / 254 * (1 + 1e-5)
    assert ((decoded - blocks).abs() <= bound).all()
    assert not decoded[4].any()
    assert ((decoded - blocks).abs() > 0.9 * bound).any()  # the bound is tight
    rounded = layout.decode(raw).unflatten(1, (-1, layout.block_size))  # as the side network reads it
    assert ((rounded - blocks).abs() <= bound + decoded.abs() / 256).all()


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("dtype", STORAGE_TYPES)
def test_packed_tokens_are_the_padded_ones_without_padding(dtype: str, buffered: bool, tmp_path: Path) -> None:
    cache = finished(tmp_path, replace(DECODER, dtype=dtype))
    buffer = torch.full((cache.manifest.batch_bytes(3, 6),), 77, dtype=torch.uint8) if buffered else None
    packed = cache.batch([3, 5, 7], None, buffer)
    padded = cache.batch([3, 5, 7], 6)
    for index, (mine, theirs) in enumerate(zip(packed, padded, strict=True)):
        lengths = (2, 6, 4) if index < DECODER.num_taps else (3, 3, 3)
        assert torch.equal(mine, torch.cat([row[:length] for row, length in zip(theirs, lengths, strict=True)]))


def test_int8_takes_little_more_than_a_quarter() -> None:
    sizes = {
        dtype: RecordLayout(dtype=dtype, width=384, num_taps=7).record_bytes(26)
        for dtype in ("float32", "bfloat16", "int8")
    }
    assert sizes["bfloat16"] == sizes["float32"] / 2 == 7 * 26 * 384 * 2
    assert sizes["int8"] == sizes["float32"] * (1 / 4 + 1 / 64)


def test_a_stages_taps_are_one_run_of_bytes(tmp_path: Path) -> None:
    """What two stages taped, copied by raw_taps, is what a whole tape holds: encoder, border and decoder."""
    reference = finished(tmp_path / "whole", DECODER)
    joined = ActivationCache.create(tmp_path / "joined", DECODER)
    for first, count in ((0, 2), (2, 2), (4, 1)):
        for sample in DECODER.samples:
            joined.raw_taps(sample, first, count).copy_(reference.raw_taps(sample, first, count))
    for sample in DECODER.samples:
        assert torch.equal(joined.raw(sample), reference.raw(sample))
    assert reference.raw_taps(7, 2, 2).shape[0] == 4 + 3


def test_an_empty_cache_is_whole(tmp_path: Path) -> None:
    ActivationCache.create(tmp_path, replace(MANIFEST, samples=(), lengths=())).finish()
    assert [tap.shape for tap in ActivationCache.open(tmp_path, fingerprint="mine").batch([], 4)] == [(0, 4, 8)] * 3


def test_removed_leaves_nothing(tmp_path: Path) -> None:
    finished(tmp_path / "cache").remove()
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_number_of_taps_is_refused(tmp_path: Path) -> None:
    cache = ActivationCache.create(tmp_path, DECODER)
    with pytest.raises(ValueError, match="3 taps were given for 3 \\+ 2"):
        cache.write_batch([7], taps(6))


def _edit(folder: Path, **changes: object) -> None:
    manifest = read_sealed(folder / "manifest.json", "", CacheManifest)
    write_sealed(folder / "manifest.json", "", replace(manifest, **changes))


def _replace_in(path: Path, old: bytes, new: bytes) -> None:
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new, 1))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "missing or unfinished"),
        (lambda folder: (folder / "taps.bin").unlink(), "missing or unfinished"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "was cut"),
        (lambda folder: _replace_in(folder / "manifest.json", b"7,3,5", b"3,7,5"), "was changed after it was written"),
        (lambda folder: _edit(folder, dtype="float16"), "does not read"),
        (lambda folder: _edit(folder, samples=(7, 3)), "bytes instead of"),
        (lambda folder: _edit(folder, checksums=(1, 2)), "do not match"),
        (lambda folder: os.truncate(folder / "taps.bin", 10), "10 bytes instead of 576"),
        (lambda folder: (folder / "taps.bin").write_bytes(bytes(576)), "checksum"),
        (lambda folder: _edit(folder, samples=(3, 7, 5), lengths=(2, 4, 6)), "checksum"),
        (lambda folder: _edit(folder, fingerprint="another"), "another backbone"),
    ],
)
def test_what_cannot_be_used_is_told(damage, said: str, tmp_path: Path) -> None:
    finished(tmp_path)
    damage(tmp_path)
    with pytest.raises(CacheError, match=f"{said}.*has to fill it again"):
        ActivationCache.open(tmp_path, fingerprint="mine")


def test_another_devices_cache_is_refused(tmp_path: Path) -> None:
    """Also one with the same samples of the same run."""
    finished(tmp_path / "alpha", replace(MANIFEST, owner="alpha"))
    with pytest.raises(CacheError, match=r"It belongs to alpha\..*has to fill it again"):
        ActivationCache.open(tmp_path / "alpha", fingerprint="mine", owner="beta")
    with pytest.raises(CacheError, match=r"It belongs to alpha"):
        ActivationCache.reopen(tmp_path / "alpha", replace(MANIFEST, owner="beta"))
    assert ActivationCache.open(tmp_path / "alpha", fingerprint="mine", owner="alpha").written == {7, 3, 5}


def test_every_byte_is_checked(tmp_path: Path) -> None:
    finished(tmp_path)
    content = (tmp_path / "taps.bin").read_bytes()
    for at in range(0, len(content), 37):
        (tmp_path / "taps.bin").write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(CacheError, match="checksum"):
            ActivationCache.open(tmp_path, fingerprint="mine")


def test_unfinished_is_not_opened(tmp_path: Path) -> None:
    ActivationCache.create(tmp_path / "cache", MANIFEST)
    with pytest.raises(CacheError, match="unfinished"):
        ActivationCache.open(tmp_path / "cache", fingerprint="mine")


def test_an_interrupted_tape_goes_on(tmp_path: Path) -> None:
    cache = ActivationCache.create(tmp_path, MANIFEST)
    cache.write_batch([7, 5], taps(6, 2))
    assert cache.written == {7, 5}
    again = ActivationCache.reopen(tmp_path, MANIFEST)
    assert again.written == {7, 5}
    assert torch.equal(torch.stack(again.batch([5], None)), torch.stack(cache.batch([5], None)))
    again.write_batch([3], taps(2))
    again.finish()
    reference = finished(tmp_path / "whole")
    read = ActivationCache.open(tmp_path, fingerprint="mine")
    assert all(torch.equal(read.raw(sample), reference.raw(sample)) for sample in MANIFEST.samples)
    assert read.written == {7, 3, 5}
    assert not (tmp_path / "written.bin").exists()
    assert ActivationCache.reopen(tmp_path, MANIFEST).written == {
        7,
        3,
        5,
    }  # finished, but the epoch's last step was not


def test_a_damaged_record_of_an_interrupted_tape_is_written_again(tmp_path: Path) -> None:
    cache = ActivationCache.create(tmp_path, MANIFEST)
    cache.write_batch([7, 5], taps(6, 2))
    cache.raw(5)[3, 1] ^= 1
    again = ActivationCache.reopen(tmp_path, MANIFEST)
    assert again.written == {7}
    again.write_batch([5], [tap[1:] for tap in taps(6, 2)])
    assert again.written == {7, 5}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fingerprint": "another"}, "another backbone"),
        ({"samples": (3, 7, 5)}, "other samples"),
        ({"num_taps": 1, "width": 24}, "other samples or taps"),
    ],
)
def test_an_interrupted_tape_of_anything_else_is_refused(change: dict, said: str, tmp_path: Path) -> None:
    ActivationCache.create(tmp_path, MANIFEST)
    with pytest.raises(CacheError, match=said):
        ActivationCache.reopen(tmp_path, replace(MANIFEST, **change))


def test_an_interrupted_tape_that_was_cut_is_refused(tmp_path: Path) -> None:
    ActivationCache.create(tmp_path, MANIFEST)
    os.truncate(tmp_path / "written.bin", 8)
    with pytest.raises(CacheError, match="truncated"):
        ActivationCache.reopen(tmp_path, MANIFEST)
    os.truncate(tmp_path / "taps.bin", 100)
    with pytest.raises(CacheError, match="100 bytes"):
        ActivationCache.reopen(tmp_path, MANIFEST)


def test_a_full_disk_leaves_nothing_and_is_told_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuses, raising=False)
    huge = replace(MANIFEST, lengths=(10**6, 2, 6))
    with pytest.raises(CacheError, match=r"48\.0 MB.*No space left.*B are free.*WORKBENCH_CACHE"):
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
    with pytest.raises(ConfigError, match="float32, bfloat16, int8"):
        cache_dtype("float16")
