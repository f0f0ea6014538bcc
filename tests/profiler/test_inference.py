"""Profiles of single-shot inference: counted, measured, fitted, scaled."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from workbench.core.catalogue import load_cluster
from workbench.core.errors import ConfigError
from workbench.methods.galaxy_plus.costs import (
    analytic_costs,
    analytic_inference,
    divided_kinds,
    end_bytes,
    layer_flops,
    query_width,
    scaled_to,
    stack_sizes,
    unit_flops,
)
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile, PieceCost
from workbench.methods.galaxy_plus.timing import fit_piece, measure_inference
from workbench.profiler.cache import cached
from workbench.profiler.descriptions import MODELS, ModelDescription

TINY = ModelDescription(name="tiny", kind="encoder", num_layers=2, hidden=32, heads=4, feed_forward=64, vocab=50)
TINY_LLAMA = replace(TINY, name="tiny-llama", kind="decoder", kv_heads=2, gated=True, biases=False, norm_vectors=1)
TINY_T5 = replace(TINY, name="tiny-t5", kind="encoder-decoder", biases=False, norm_vectors=1)


@pytest.mark.parametrize("model", [*MODELS.values(), TINY, TINY_LLAMA, TINY_T5], ids=lambda model: model.name)
def test_the_parts_of_every_stack_are_all_its_parameters(model):
    first, last = end_bytes(model)
    layers = 0
    for sizes in stack_sizes(model):
        layers += sizes.num_layers * (sizes.attention_bytes + sizes.feed_forward_bytes + sizes.layer_bytes)
    assert layers + first + last == 4 * model.params


def test_grouped_heads_are_one_unit_and_a_decoder_has_cross_attention():
    [llama] = stack_sizes(TINY_LLAMA)
    assert (llama.num_units, llama.heads_per_unit, query_width(llama), llama.head_size) == (2, 2, 16, 8)
    assert unit_flops(llama, "UP") == 2 * unit_flops(llama, "DOWN")
    encoder, decoder = stack_sizes("T5-Large")
    assert (encoder.has_cross_attention, decoder.has_cross_attention) == (False, True)
    assert {"CQ", "CKV", "CATT", "COUT"} <= set(divided_kinds(decoder)) - set(divided_kinds(encoder))
    assert layer_flops(decoder, 10, 20) - layer_flops(encoder, 10) == pytest.approx(
        2 * 1024 * 1024 * 2 * (10 + 20) + 4 * 1024 * 10 * 20
    )
    with pytest.raises(ConfigError, match="at least 1"):
        unit_flops(replace(llama, head_size=0), "QKV")


def test_analytic_pieces_are_flops_over_speed_and_traffic_over_bandwidth():
    [sizes] = stack_sizes("BERT-Large")
    costs = analytic_costs(sizes, flops_per_s=1e9)
    kinds = ("QKV", "OUT", "UP", "DOWN")
    seconds = sum(costs.seconds(kind, 284, sizes.columns if kind in ("UP", "DOWN") else 16) for kind in kinds)
    assert seconds == pytest.approx(2 * 284 * 12 * 1024 * 1024 / 1e9)
    assert costs.seconds("ATT", 284 * 284, 16) == pytest.approx(4 * 284 * 284 * 1024 / 1e9)
    assert seconds + costs.seconds("ATT", 284 * 284, 16) == pytest.approx(layer_flops(sizes, 284) / 1e9)
    bound = analytic_costs(sizes, flops_per_s=1e9, memory_bytes_per_s=1e9, operation_s=1e-3)
    assert bound.seconds("CONN", 284) - costs.seconds("CONN", 284) == pytest.approx(1e-3 + 5 * 4 * 1024 * 284 / 1e9)
    streamed = analytic_costs(sizes, flops_per_s=1e9, weight_bytes_per_s=1e9)
    assert streamed.seconds("UP", 1, 4096) - costs.seconds("UP", 1, 4096) == pytest.approx(4 * 1024 * 4096 / 1e9)
    logits = analytic_costs(sizes, flops_per_s=1e9, vocabulary=30522)
    assert logits.seconds("HEAD", 284) - costs.seconds("HEAD", 284) == pytest.approx(2 * 1024 * 30522 / 1e9)


def test_an_analytic_profile_has_a_row_for_every_device():
    cluster = load_cluster("galaxy-env-b")
    profile = analytic_inference("T5-Large", cluster)
    assert (profile.world_size, len(profile.stacks), profile.source) == (4, 2, "analytic")
    for device, (costs, _) in zip(cluster.devices, profile.costs, strict=True):
        columns = 1024 * 100
        computed, read = 10 * 2 * columns / device.flops_per_s, 4 * columns / device.memory_bytes_per_s
        assert costs.seconds("UP", 10, 100) == pytest.approx(computed + read)
    assert (profile.first_bytes, profile.last_bytes) == end_bytes("T5-Large")


def test_a_fit_finds_the_cost_that_made_the_samples():
    piece_cost = PieceCost(fixed_s=2e-5, token_s=1e-7, unit_s=3e-6, token_unit_s=4e-8)
    results = [(tokens, units, piece_cost.seconds(tokens, units)) for tokens in (8, 64, 300) for units in (1, 4, 12)]
    fit = fit_piece("QKV", results)
    assert max(errors(fit, results)) < 1e-6
    assert fit.token_unit_s == pytest.approx(4e-8, rel=1e-4)
    noisy = [
        (tokens, units, seconds * (1.1 if index % 2 else 0.9)) for index, (tokens, units, seconds) in enumerate(results)
    ]
    assert all(0.02 < error < 0.2 for error in errors(fit_piece("QKV", noisy), noisy))
    falling = fit_piece("ADD", [(10, 1, 2e-3), (100, 1, 1e-3)])
    assert falling.token_s == 0 and falling.unit_s == 0, "more work never costs less"
    with pytest.raises(ConfigError, match="Time it longer"):
        fit_piece("ADD", [(10, 1, 0.0)])


def errors(cost, found):
    """Return the relative errors of a fit."""
    return [abs(cost.seconds(tokens, units) / seconds - 1) for tokens, units, seconds in found]


def products(sizes):
    """Return a function to time for every kind of a stack's operations: a product."""
    kinds = (*divided_kinds(sizes), "CONN", "ADD")
    return {
        kind: lambda tokens, units: partial(torch.mm, torch.ones(tokens, 8), torch.ones(8, 8 * units)) for kind in kinds
    }


def test_measured_pieces_are_fitted_scaled_and_kept(tmp_path, monkeypatch):
    stacks = stack_sizes(TINY_T5)
    piece_cost = PieceCost(fixed_s=1e-4, token_s=1e-6, unit_s=1e-6, token_unit_s=1e-7)
    timed = []

    def time_them(cells, *, budget_s, clock):
        timed.append(budget_s)
        return {
            cell: piece_cost.seconds(cell[2] ** 2 if cell[1] in ("ATT", "CATT") else cell[2], cell[3]) for cell in cells
        }

    monkeypatch.setattr("workbench.methods.galaxy_plus.timing.time_calls", time_them)

    def measure():
        makers = [products(sizes) for sizes in stacks]
        return measure_inference(
            "tiny-t5", stacks, makers, tokens=(4, 9), shares=(0.5, 1.0), budget_s=3.0, first_bytes=7
        )

    first, note = cached({"model": "tiny-t5"}, measure, InferenceProfile, folder=tmp_path)
    again, _ = cached({"model": "tiny-t5"}, measure, InferenceProfile, folder=tmp_path)
    assert "measured now" in note
    assert first == again
    assert timed == [3.0]
    host = first
    assert (host.source, host.world_size, host.first_bytes) == ("measured", 1, 7)
    assert set(first.costs[0][1].pieces) >= {
        "QKV",
        "ATT",
        "OUT",
        "CQ",
        "CKV",
        "CATT",
        "COUT",
        "UP",
        "DOWN",
        "CONN",
        "ADD",
    }
    cells = [
        (stack, kind, count, units)
        for stack in (0, 1)
        for kind in first.costs[0][stack].pieces
        for count in (4, 9)
        for units in (1, 2)
    ]
    for stack, kind, count, units in cells:
        if units == 1 or kind not in ("CONN", "ADD"):
            tokens = count**2 if kind in ("ATT", "CATT") else count
            assert (
                max(errors(first.costs[0][stack].pieces[kind], [(tokens, units, piece_cost.seconds(tokens, units))]))
                < 1e-6
            )
    cluster = load_cluster("laptop")
    scaled = scaled_to(host, cluster)
    assert scaled.source == "scaled"
    for rank, device in enumerate(cluster.devices):
        total, own = host.costs[0][1].seconds("CATT", 36, 3), scaled.costs[rank][1].seconds("CATT", 36, 3)
        assert own == pytest.approx(total / device.host_share)
    with pytest.raises(ConfigError, match="one core, one device"):
        scaled_to(scaled, cluster)
    with pytest.raises(ConfigError, match="no host_share"):
        scaled_to(host, load_cluster("galaxy-env-d"))
    with pytest.raises(ConfigError, match="sets of calls"):
        measure_inference("tiny-t5", stacks, [{}], tokens=(4, 9), shares=(0.5, 1.0), budget_s=3.0)


def test_timing_this_host_gives_costs_above_zero():
    [sizes] = stack_sizes(TINY)
    result = measure_inference("tiny", [sizes], [products(sizes)], tokens=(4, 64), shares=(0.5, 1.0), budget_s=0.3)
    [[costs]] = result.costs
    for kind, cost in costs.pieces.items():
        assert cost.seconds(64 * 64, 4) > 0, kind
    assert costs.seconds("UP", 64, 64) == costs.pieces["UP"].seconds(64, 64)
