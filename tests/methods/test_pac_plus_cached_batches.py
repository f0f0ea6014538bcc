"""The taps of an epoch's steps, read ahead."""

import gc
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.waiting import wait_for
from workbench.methods.pac_plus.handlers import CachedBatches
from workbench.runtime.activation_cache import ActivationCache, CacheManifest

LENGTHS = (4, 2, 6, 3, 5, 1)
STEPS = [([0, 2], 8), ([1, 5], 2), ([4, 3], 5), ([2], 6)]


@pytest.fixture
def cache(tmp_path: Path) -> ActivationCache:
    manifest = CacheManifest(
        fingerprint="x", samples=tuple(range(6)), lengths=LENGTHS, num_taps=3, width=8, dtype="float32"
    )
    cache = ActivationCache.create(tmp_path, manifest)
    for sample, length in enumerate(LENGTHS):
        cache.write_batch([sample], [torch.randn(1, length, 8) for _ in range(3)])
    return cache


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_each_step_gets_its_own_taps(depth: int, packs: bool, cache: ActivationCache) -> None:
    """Buffers are used again, yet what a step was given stays as it is until the next step asks."""
    with CachedBatches(cache, STEPS, depth=depth, packs=packs) as batches:
        for samples, length in STEPS:
            taps = batches.batch(samples, length)
            expected = cache.batch(samples, None if packs else length)
            for mine, theirs in zip(taps, expected, strict=True):
                assert torch.equal(mine, theirs)


def test_a_step_that_was_not_announced_is_a_mistake(cache: ActivationCache) -> None:
    with CachedBatches(cache, STEPS) as batches, pytest.raises(AssertionError, match="order"):
        batches.batch([1, 5], 2)


def test_what_is_lost_reaches_the_step_that_needs_it(cache: ActivationCache) -> None:
    with CachedBatches(cache, [*STEPS, ([99], 4)]) as batches:
        for samples, length in STEPS:
            batches.batch(samples, length)
        with pytest.raises(KeyError):
            batches.batch([99], 4)


def test_buffers_go_with_the_epoch(cache: ActivationCache) -> None:
    """At once: megabytes for each of many epochs would else wait for a garbage collection."""
    gc.disable()
    try:
        with CachedBatches(cache, STEPS) as batches:
            values = [weakref.ref(buffer) for buffer in batches._buffers]
            for samples, length in STEPS:
                batches.batch(samples, length)
        assert len(values) == 3 and not any(buffer() is not None for buffer in values)
    finally:
        gc.enable()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_it_reads_ahead_but_not_further_than_its_buffers(
    depth: int, cache: ActivationCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a step's taps are in use, `depth` more may be read: a buffer is never filled before its reader asks for the
    next."""
    read: list[list[int]] = []
    ahead, request = list[int](), 0

    def note(self: ActivationCache, samples: Sequence[int], *_: object) -> list:
        ahead.append(samples[0] - request)
        read.append(list(samples))
        return []

    monkeypatch.setattr(ActivationCache, "batch", note)
    announced = [([sample], 1) for sample in range(10)]
    with CachedBatches(cache, announced, depth=depth) as batches:
        for request in range(10):
            batches.batch([request], 1)
            expected = [[other] for other in range(min(request + depth + 1, 10))]
            wait_for(lambda: len(read) >= len(expected), f"{len(expected)} batches")  # noqa: B023
            assert read == expected
    assert max(ahead) == min(depth, 9)
    assert not reading()


def test_an_interrupt_in_the_middle_leaves_no_thread(cache: ActivationCache) -> None:
    with pytest.raises(KeyboardInterrupt), CachedBatches(cache, STEPS) as batches:
        batches.batch(*STEPS[0])
        raise KeyboardInterrupt
    with CachedBatches(cache, []):
        assert not reading()


def reading() -> bool:
    return any(thread.name.startswith("read-ahead") for thread in threading.enumerate())
