"""The analytic memory and time models of forward-only steps."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from workbench.core.errors import ConfigError
from workbench.methods.p_rge.analytic import Machine, adapter_params, parts_at_once, pass_flops, pass_s, step_s
from workbench.methods.p_rge.zeroth_order import TrainableConfig, load_causal_model
from workbench.profiler.descriptions import ModelDescription, describe
from workbench.tasks.prompts import PromptBatch
from workbench_studies.papers.p_rge.counted import (
    MemoryRule,
    first_order_memory,
    first_order_step_s,
    forward_memory,
    free_rows,
)

LLAMA = describe("Llama2-7B")
MACHINE = Machine(flops_per_s=1e14, memory_bytes_per_s=1e12, layer_s=1e-4, sweep_s_per_param=1e-11, step_s=1e-3)
EXECUTIONS = ("sequential", "outer", "inner", "both")


@pytest.mark.parametrize("targets", [1, 6])
def test_flops_are_those_that_torch_counts(targets):
    model = load_causal_model("tiny-llama", TrainableConfig(rank=4))
    layers = model.backbone.layers["0"]
    attention, feed_forward = layers.self_attn, layers.mlp
    described = ModelDescription(
        name="tiny",
        kind="decoder",
        num_layers=model.backbone.num_layers,
        hidden=model.backbone.hidden_size,
        heads=attention.config.num_attention_heads,
        kv_heads=attention.config.num_key_value_heads,
        feed_forward=feed_forward.up_proj.out_features,
        vocab=model.head.weight.shape[0],
        gated=True,
        biases=False,
    )
    rows, length = 3, 8
    positions = torch.arange(length - targets, length).repeat(rows, 1)
    batch = PromptBatch(
        input_ids=torch.ones(rows, length, dtype=torch.int64),
        attention_mask=torch.ones(rows, length, dtype=torch.int64),
        targets=torch.ones_like(positions),
        positions=positions,
        target_mask=torch.ones_like(positions, dtype=torch.bool),
        labels=torch.zeros(rows, dtype=torch.int64),
        indices=tuple(range(rows)),
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.part_losses(batch)
    ours = pass_flops(described, rows=rows, sequence_length=length, rank=4, targets=targets)
    # The counter sees neither fused attention on CPUs nor products that are added in place: x A B's second.
    attention_flops = rows * 4 * described.num_layers * length * length * described.query_width
    in_place = rows * length * 2 * adapter_params(described, 4)[1]
    assert adapter_params(described, 4)[1] == model.trainables.num_values
    assert ours == counter.get_total_flops() + attention_flops + in_place


def test_parts_at_once_and_what_cannot_be():
    assert [parts_at_once(execution, 4) for execution in EXECUTIONS] == [1, 4, 2, 8]
    with pytest.raises(ConfigError, match="needs at least 1"):
        parts_at_once("both", 0)
    with pytest.raises(ConfigError, match="sequential, outer, inner, both"):
        parts_at_once("all", 1)
    with pytest.raises(ConfigError, match="above 0"):
        Machine(flops_per_s=0, memory_bytes_per_s=1)


@pytest.mark.parametrize(("queries", "batch"), [(1, 1), (4, 4), (16, 1), (4, 64)])
def test_fewer_passes_are_never_slower_and_gain_what_does_not_depend_on_rows(queries, batch):
    times = {
        execution: step_s(LLAMA, MACHINE, batch_size=batch, sequence_length=64, queries=queries, execution=execution)
        for execution in EXECUTIONS
    }
    assert times["both"] <= min(times["outer"], times["inner"]) * 1.0001
    assert max(times["outer"], times["inner"]) <= times["sequential"] * 1.0001
    bound = pass_s(LLAMA, MACHINE, rows=batch, sequence_length=64) > MACHINE.layer_s * LLAMA.num_layers * 1.1
    arithmetic = bound and batch > free_rows(LLAMA, MACHINE, sequence_length=64)
    gain = (times["sequential"] - MACHINE.step_s) / (times["both"] - MACHINE.step_s)
    if arithmetic:
        assert gain == pytest.approx(1.0)
    elif 2 * queries * batch <= free_rows(LLAMA, MACHINE, sequence_length=64):
        assert gain == pytest.approx(2 * queries)


def test_dequantizing_is_saved_by_fewer_passes_and_sweeps_cost_by_parameter():
    nf4 = replace(MACHINE, dequantized_per_s=1e10)
    given = {"batch_size": 16, "sequence_length": 256, "weight_bytes": 0.53}
    apart, together = (step_s(LLAMA, nf4, **given, execution=execution) for execution in ("sequential", "inner"))
    plain = [step_s(LLAMA, MACHINE, **given, execution=execution) for execution in ("sequential", "inner")]
    assert plain[0] == pytest.approx(plain[1])
    assert apart - together == pytest.approx((LLAMA.params - 2 * LLAMA.vocab * LLAMA.hidden) / 1e10, rel=1e-3)
    reference = step_s(LLAMA, MACHINE, batch_size=1, sequence_length=64, swept_params=LLAMA.params)
    assert reference - step_s(LLAMA, MACHINE, batch_size=1, sequence_length=64) == pytest.approx(
        4 * LLAMA.params * 1e-11, rel=0.01
    )
    assert first_order_step_s(LLAMA, MACHINE, batch_size=16, sequence_length=256, updated_params=0) == pytest.approx(
        MACHINE.step_s + 3 * pass_s(LLAMA, MACHINE, rows=16, sequence_length=256)
    )


def test_memory_of_a_pass_forgets_layers_and_gathered_logits_all_but_vanish():
    rule = MemoryRule()
    deep = replace(LLAMA, num_layers=64)
    for model in (LLAMA, deep):
        parts = forward_memory(model, rule, rows=32, sequence_length=256)
        assert parts["largest output"] == 8 * 32000 * 32 * 256
        assert (
            forward_memory(model, rule, rows=32, sequence_length=256, targets=1)["largest output"]
            < 0.4 * parts["largest output"]
        )
    kept = [
        first_order_memory(model, rule, "lora_fa", rows=32, sequence_length=256)["activations"]
        for model in (LLAMA, deep)
    ]
    assert kept[1] > 1.9 * kept[0]
    copies = [sum(forward_memory(LLAMA, rule, rows=1, sequence_length=1, copies=count).values()) for count in (1, 2, 5)]
    assert copies[1] - copies[0] == pytest.approx(10 * adapter_params(LLAMA, 16)[1])
    assert all(first < second for first, second in itertools.pairwise(copies))
