import threading

import pytest
import torch.distributed as dist

from tests.waiting import LIMIT_S
from workbench.core.cluster import Link
from workbench.core.errors import ConfigError
from workbench.profiler.host import (
    MOST_BYTES,
    LinkSample,
    fit_link,
    lasting_equally,
    measure_link,
    measure_links,
)

SIZES = (1, 1 << 16)


class Arrived:
    def wait(self):
        return True


class Wire:
    """A process group of two threads over one slow wire: 1 ms and 10 MB/s each way, in a time of its own."""

    def __init__(self):
        self.boxes = {0: [], 1: []}
        self.ready = threading.Condition()
        self.now = 0.0

    def clock(self):
        return self.now

    def rank(self, me):
        wire = self

        class Rank:
            def size(self):
                return 2

            def send(self, tensors, destination, tag):
                with wire.ready:
                    wire.now += 1e-3 + tensors[0].nbytes / 10e6
                    wire.boxes[destination].append(tensors[0])
                    wire.ready.notify_all()
                return Arrived()

            def recv(self, tensors, source, tag):
                with wire.ready:
                    assert wire.ready.wait_for(lambda: wire.boxes[me], timeout=LIMIT_S)
                    assert wire.boxes[me].pop(0).nbytes == tensors[0].nbytes
                return Arrived()

        return Rank()


def in_threads(count, function):
    results, failures = {}, []

    def run(rank):
        try:
            results[rank] = function(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=LIMIT_S)
    assert not failures
    return results


def test_a_wire_of_known_rate_is_measured():
    wire = Wire()
    sizes = (1, 1 << 18, 1 << 20)
    results = in_threads(
        2, lambda rank: measure_link(wire.rank(rank), rank, 0, 1, sizes=sizes, repeats=3, clock=wire.clock)
    )
    assert results[1] == ()
    assert [sample.nbytes for sample in results[0]] == list(sizes)
    link = fit_link(results[0])
    assert link.bytes_per_s == pytest.approx(10e6, rel=0.01)
    assert link.latency_s == pytest.approx(1e-3, rel=0.01)


def test_every_link_of_a_gloo_group():
    store = dist.HashStore()
    groups = in_threads(3, lambda rank: dist.ProcessGroupGloo(store, rank, 3))
    results = in_threads(3, lambda rank: measure_links(groups[rank], rank, sizes=SIZES, repeats=2))
    assert [sorted(results[rank]) for rank in range(3)] == [[(0, 1), (0, 2)], [(1, 0), (1, 2)], [(2, 0), (2, 1)]]
    for samples in (samples for links in results.values() for samples in links.values()):
        assert [sample.nbytes for sample in samples] == list(SIZES)
        assert all(sample.seconds > 0 for sample in samples)


def sample(nbytes, seconds):
    return LinkSample(source=0, destination=1, nbytes=nbytes, round_trip_s=seconds)


def test_the_fit_recovers_latency_and_rate():
    link = fit_link([sample(size, 2e-3 + size / 5e6) for size in (1, 1 << 10, 1 << 16, 1 << 22)])
    assert link.bytes_per_s == pytest.approx(5e6, rel=0.01)
    assert link.latency_s == pytest.approx(2e-3, rel=0.01)


def test_messages_that_last_as_long_as_that_over_the_slowest_link() -> None:
    links = [Link(bytes_per_s=1e6, latency_s=0.1), Link(bytes_per_s=4e6), Link(bytes_per_s=1e9)]
    assert lasting_equally(links, 100_000) == (100_000, 800_000, MOST_BYTES)
    assert lasting_equally(links[:1], 1) == (1,)


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ConfigError, match="itself"):
        measure_link(None, 0, 1, 1)
    with pytest.raises(ConfigError):
        measure_link(None, 0, 0, 1, repeats=0)
    with pytest.raises(ConfigError):
        measure_link(None, 0, 0, 1, sizes=())
    with pytest.raises(ConfigError, match="two message sizes"):
        fit_link([sample(5, 1.0)])
    assert measure_link(None, 2, 0, 1) == ()
