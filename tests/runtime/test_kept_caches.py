from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from workbench.core.errors import CacheError
from workbench.runtime.activation_cache import ActivationCache, CacheManifest
from workbench.runtime.kept_caches import KeptCaches, KeptDescription, require_fits
from workbench.runtime.network import child_environment

LENGTHS = (4, 2, 6, 3, 5, 1)
DESCRIPTION = KeptDescription(key="backbone and data", model="tiny-bert", task="made up", created="2026-01-01T00:00:00Z")


def shard(folder: Path, rank: int, samples: tuple[int, ...], dtype: str) -> Path:
    manifest = CacheManifest(
        fingerprint=f"{DESCRIPTION.key}/{rank}",
        samples=samples,
        lengths=tuple(LENGTHS[sample] for sample in samples),
        num_taps=2,
        width=8,
        dtype=dtype,
        num_target_taps=1,
        target_length=2,
    )
    cache = ActivationCache.create(folder / f"rank-{rank}", manifest)
    for sample in samples:
        cache.write_batch([sample], taps_of(sample))
    cache.finish()
    return cache.folder


def taps_of(sample: int) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(sample)
    lengths = (LENGTHS[sample], LENGTHS[sample], 2)
    return [torch.randn(1, length, 8, generator=drawn) for length in lengths]


def kept(tmp_path: Path, dtype: str = "float32") -> KeptCaches:
    caches = KeptCaches(tmp_path / "activations")
    shards = [shard(tmp_path, 0, (5, 0, 2), dtype), shard(tmp_path, 1, (), dtype), shard(tmp_path, 2, (3, 1, 4), dtype)]
    caches.keep(shards, DESCRIPTION)
    return caches


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_any_batch_is_read_across_the_shards(dtype: str, tmp_path: Path) -> None:
    caches = kept(tmp_path, dtype)
    assert not list(tmp_path.glob("rank-[02]"))  # moved, not copied
    cache = caches.find(DESCRIPTION.key)
    assert cache is not None and cache.samples == (0, 1, 2, 3, 4, 5)
    cache.check(cache.samples)
    samples = tuple(range(6))
    whole = ActivationCache.open(shard(tmp_path / "whole", 9, samples, dtype), fingerprint=f"{DESCRIPTION.key}/9")
    buffer = torch.full((cache.batch_bytes(4, 8),), 77, dtype=torch.uint8)
    for length in (8, None):
        for mine, theirs in zip(cache.batch([2, 3, 5, 4], length, buffer), whole.batch([2, 3, 5, 4], length), strict=True):
            assert torch.equal(mine, theirs)
    for mine, theirs in zip(cache.read(1), whole.read(1), strict=True):
        assert torch.equal(mine, theirs)


def test_listed_and_cleared(tmp_path: Path) -> None:
    caches = kept(tmp_path)
    (found,) = caches.list()
    assert replace(found, shards=(), num_samples=0, nbytes=0, dtype="") == DESCRIPTION
    assert (found.num_samples, found.dtype, found.nbytes) == (6, "float32", sum(32 * (2 * length + 2) for length in LENGTHS))
    assert caches.clear(["another"]) == 0
    assert caches.clear([DESCRIPTION.key]) >= found.nbytes
    assert caches.list() == () and caches.find(DESCRIPTION.key) is None
    assert not caches.root.exists()


def test_what_is_broken_is_cleared_too(tmp_path: Path) -> None:
    caches = kept(tmp_path)
    (caches.root / ".part-left-by-a-kill").mkdir()
    (caches.folder(DESCRIPTION.key) / "kept.json").write_text("{")
    assert caches.list() == ()
    with pytest.raises(CacheError, match="index does not read"):
        caches.find(DESCRIPTION.key)
    assert caches.clear() > 0
    assert not caches.root.exists()


def test_the_newest_takes_the_place_of_the_older(tmp_path: Path) -> None:
    caches = kept(tmp_path)
    again = shard(tmp_path / "again", 0, (1, 2), "float32")
    caches.keep([again], replace(DESCRIPTION, created="2026-02-02T00:00:00Z"))
    assert [found.num_samples for found in caches.list()] == [2]


_KEEPER = """
import sys
from pathlib import Path
from tests.runtime.test_kept_caches import DESCRIPTION, shard
from workbench.runtime.kept_caches import KeptCaches
folder, root = Path(sys.argv[1]), Path(sys.argv[2])
made = [[shard(folder / str(number), 0, (1, 2, 3), "float32")] for number in range(60)]
print("ready", flush=True)
sys.stdin.readline()
for shards in made:
    KeptCaches(root).keep(shards, DESCRIPTION)
"""


def test_two_runs_that_keep_the_same_do_not_disturb_each_other(tmp_path: Path) -> None:
    root, pipe = tmp_path / "activations", subprocess.PIPE
    command = [sys.executable, "-c", _KEEPER]
    runs = [
        subprocess.Popen([*command, str(tmp_path / name), str(root)], stdin=pipe, stdout=pipe, text=True, env=child_environment())
        for name in ("one", "two")
    ]
    with runs[0], runs[1]:
        for run in runs:
            assert run.stdout is not None
            assert run.stdout.readline() == "ready\n"
        for run in runs:
            assert run.stdin is not None
            run.stdin.write("\n")
            run.stdin.flush()
        assert [run.wait(60) for run in runs] == [0, 0]
    caches = KeptCaches(root)
    found = caches.find(DESCRIPTION.key)
    assert found is not None
    found.check((1, 2, 3))
    assert list(root.iterdir()) == [caches.folder(DESCRIPTION.key)]


def test_an_unfinished_shard_is_not_kept(tmp_path: Path) -> None:
    whole = shard(tmp_path, 0, (0, 1), "float32")
    manifest = CacheManifest(fingerprint="x", samples=(2,), lengths=(6,), num_taps=2, width=8, dtype="float32")
    unfinished = ActivationCache.create(tmp_path / "rank-1", manifest).folder
    caches = KeptCaches(tmp_path / "activations")
    with pytest.raises(CacheError, match="unfinished"):
        caches.keep([whole, unfinished], DESCRIPTION)
    assert whole.is_dir() and unfinished.is_dir() and caches.find(DESCRIPTION.key) is None


def test_damage_is_noticed_where_it_is_used(tmp_path: Path) -> None:
    caches = kept(tmp_path)
    data = caches.folder(DESCRIPTION.key) / "shard-0" / "taps.bin"
    content = bytearray(data.read_bytes())
    content[5] ^= 1  # in the record of sample 5
    data.write_bytes(content)
    cache = caches.find(DESCRIPTION.key)
    assert cache is not None
    cache.check([0, 1, 2])
    with pytest.raises(CacheError, match="checksum"):
        cache.check([5, 1])
    with pytest.raises(CacheError, match="lacks 1 samples"):
        cache.check([0, 6])


def test_a_lost_shard_is_told(tmp_path: Path) -> None:
    caches = kept(tmp_path)
    shutil.rmtree(caches.folder(DESCRIPTION.key) / "shard-1")
    with pytest.raises(CacheError, match="missing"):
        caches.find(DESCRIPTION.key)


def test_a_budget_or_disk_that_is_too_small_is_refused(tmp_path: Path) -> None:
    require_fits(1000, 1000, tmp_path)
    with pytest.raises(CacheError, match=r"2\.5 MB.*disk budget is 2\.4 MB.*int8"):
        require_fits(2_500_000, 2_400_000, tmp_path)
    with pytest.raises(CacheError, match="MB are free"):
        require_fits(10**18, None, tmp_path)
