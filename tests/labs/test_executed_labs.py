"""What students' functions do on emulated devices: a ring of real tensors, and predictions that are measured."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.labs.solutions import ALL, defined
from workbench.profiler.host import HostProfile
from workbench_labs.exercises import devices, layer_cuts, own_cluster
from workbench_labs.probing import MEMORY_PART, Probe, fresh_probes, measure

HOST = HostProfile(
    gemm_flops_per_s=2e10,
    memory_bytes_per_s=8e9,
    storage_bytes_per_s=1e8,
    storage_write_bytes_per_s=5e7,
    storage_is_cold=True,
    cores=2,
    processor="a slow one",
    memory_bytes=8 * 10**9,
    swap_bytes=10**8,
)


def not_written(*_: Any) -> Any:
    raise NotImplementedError


def test_a_students_ring_sums_to_the_whole_network_and_sends_what_the_formula_says() -> None:
    """Also in tiles; what is not written yet is replaced by the workbench's own."""
    mine = [defined(ALL["07"][name])[name] for name in ("mlp_term", "ring", "tile_order")]
    settings = {"megabits": 20.0, "product_s": 0.004}
    tiled = layer_cuts.run_ring(*mine, tiles=4, **settings)
    waiting = layer_cuts.run_ring(not_written, not_written, not_written, overlaps=False, **settings)
    for found in (tiled, waiting):
        assert found.largest_error < 1e-5 and found.executed.source == "emulated"
        assert found.sent_bytes == found.expected_bytes == 3 * 4 * 32 * 64 * 4
    assert tiled.hidden_simulated > 0.9 and waiting.hidden_simulated < 0.1
    assert len(layer_cuts.runs_table({"tiled": tiled, "waiting": waiting}).rows) == 2


def test_an_emulated_device_is_never_faster_than_described_and_predictions_are_compared() -> None:
    cluster = own_cluster.described(own_cluster.GIVEN)
    device = cluster.devices[0]
    assert device.host_share is not None
    mine = {
        "flops_per_s": device.host_share * HOST.gemm_flops_per_s,
        "memory_bytes_per_s": MEMORY_PART * device.host_share * HOST.memory_bytes_per_s,
        "latency_s": cluster.link(0, 1).latency_s,
        "bytes_per_s": cluster.link(0, 1).bytes_per_s,
    }
    model = defined(ALL["01"]["seconds_of"])["seconds_of"]
    probes = fresh_probes(Random(0), cluster, 0, HOST, 0.02)
    assert len(set(probes)) == 12 and {probe.kind for probe in probes} == {"product", "vector", "message"}
    few = [probes[0], probes[4], probes[8]]
    for probe, seconds in zip(few, measure(cluster, 0, few, HOST, "paced"), strict=True):
        assert seconds > 0.9 * model(probe.amounts, mine), probe
    verdict = devices.twelve(model, mine, cluster, 0, HOST, most_s=0.005, seed=1)
    assert "of 12 predictions are within 10%" in verdict.message
    assert verdict.details is not None and len(verdict.details.rows) == 12


def test_a_text_that_cannot_be_emulated_is_replaced() -> None:
    alone = "[[device]]\nname = 'oak'\nmodel = 'laptop-core'\n"
    own = own_cluster.GIVEN.replace("garden", "park")
    assert [own_cluster.usable_cluster(text) for text in (own, None, "", "not TOML", alone)] == [own] + [
        own_cluster.GIVEN
    ] * 4


def test_amounts_are_those_of_the_lab() -> None:
    assert Probe("product", 10).amounts == {"flops": 2000, "memory_bytes": 1200, "sent_bytes": 0}
    assert str(Probe("message", 1000)) == "message of 1,000 bytes"
