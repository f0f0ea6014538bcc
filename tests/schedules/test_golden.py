"""Golden schedules of the five methods and the baselines: text out, text in."""

from __future__ import annotations

import pytest
from inference_algebra import shape
from schedule_plans import GOLDEN, assert_golden, equal_plan, plan_of, recomputing, workers_of

from tests.plans import inference_plan
from workbench.core.schedule import Schedule
from workbench.methods.galaxy_plus.schedules import InferenceLayout, inference_schedule
from workbench.schedules import (
    asynchronous_1f1b,
    backpropagation,
    cached_step,
    gpipe_order,
    hetpipe,
    hybrid_1f1b,
    insert_transfers,
    ring_allgather_gemm,
    ring_gemm_reducescatter,
    split_heads,
)
from workbench.schedules.published import build_published


def inference_layout(
    paradigm: str, *, is_decoding: bool = False, encoder_decoder: bool = False, **given
) -> InferenceLayout:
    """Return three unequal devices on six tokens: 2, 1 and 1 units, 3, 2 and 1 tokens."""
    stacks = (shape(1, 4, 6), shape(1, 4, 6, has_cross_attention=True)) if encoder_decoder else (shape(2, 4, 6),)
    settings = {
        "units": (2, 1, 1),
        "columns": (3, 2, 1),
        "shares": (3, 2, 1),
        "schemes": (1, 2),
        "layers": (1, 1, 0),
        "overlap": True,
    }
    plan = inference_plan(paradigm, **settings | given)
    if is_decoding:
        return InferenceLayout.decode(plan, stacks, past=6)
    return InferenceLayout.build(plan, stacks, (6,) * len(stacks))


SCHEDULES = {
    "gpipe_2_stages_3_micro_batches": lambda: insert_transfers(
        backpropagation(equal_plan(2), (1, 1, 1), order=gpipe_order)
    ),
    "1f1b_3_stages_4_micro_batches": lambda: insert_transfers(backpropagation(equal_plan(3), (1, 1, 1, 1))),
    "1f1b_1_stage": lambda: backpropagation(equal_plan(1), (2, 1)),
    "backpropagation_2_1": lambda: insert_transfers(backpropagation(plan_of((3, 1), (4,)), (4, 4, 2))),
    "backpropagation_data_parallel": lambda: insert_transfers(backpropagation(plan_of((3, 2, 1)), (6,))),
    "backpropagation_shared_words": lambda: insert_transfers(
        backpropagation(plan_of((1,), (1,), (1, 1)), (2, 2), shared=((0, 2),))
    ),
    "backpropagation_shared_tables": lambda: insert_transfers(
        backpropagation(equal_plan(3), (1, 1), shared=((0, 1), (1, 2), (0, 1, 2)))
    ),
    "recomputing_first_of_2_stages": lambda: insert_transfers(
        backpropagation(recomputing(plan_of((1,), (1,), layers=(3, 2)), 0), (1, 1))
    ),
    "recomputing_asynchronous_1f1b": lambda: insert_transfers(
        asynchronous_1f1b(recomputing(plan_of((1,), (1,), layers=(2, 2))), 2, num_begun=1, ahead=1)
    ),
    "pac_plus_hybrid_2_1": lambda: insert_transfers(hybrid_1f1b(plan_of((3, 1), (4,)), (4, 4, 2))),
    "pac_plus_hybrid_2_2": lambda: insert_transfers(hybrid_1f1b(plan_of((1, 3), (2, 2)), (4, 4))),
    "pac_plus_cached_step": lambda: cached_step(plan_of((4, 2, 1)).stages[0], (4, 0, 2)),
    "hetpipe_two_virtual_workers": lambda: insert_transfers(hetpipe(workers_of((3, 1), (2, 2)), 2)),
    "hetpipe_one_virtual_worker": lambda: insert_transfers(hetpipe(workers_of((1, 1)), 2)),
    "confidant_asynchronous_1f1b": lambda: insert_transfers(asynchronous_1f1b(equal_plan(3), 5)),
    "confidant_split_heads": lambda: split_heads((8, 4), num_layers=2),
    "ringada_depth_1": lambda: build_published("ring", {"ranks": 3, "micro_batches": 3, "unfrozen_layers": 1}),
    "ringada_two_initiators": lambda: build_published(
        "ring", {"ranks": 3, "micro_batches": 1, "unfrozen_layers": 3, "initiators": 2}
    ),
    "galaxy_plus_allgather_overlapped": lambda: ring_allgather_gemm(4),
    "galaxy_plus_allgather_sequential": lambda: ring_allgather_gemm(3, overlapped=False),
    "galaxy_plus_reducescatter_overlapped": lambda: ring_gemm_reducescatter(3),
    "galaxy_plus_hybrid": lambda: inference_schedule(inference_layout("hybrid")),
    "galaxy_plus_hybrid_pieces_both_ways": lambda: inference_schedule(
        inference_layout("hybrid", both_ways=True, tile_tokens=2)
    ),
    "galaxy_plus_hybrid_waiting": lambda: inference_schedule(inference_layout("hybrid", overlap=False)),
    "galaxy_plus_hybrid_encoder_decoder": lambda: inference_schedule(inference_layout("hybrid", encoder_decoder=True)),
    "galaxy_plus_decoding": lambda: inference_schedule(inference_layout("hybrid", is_decoding=True)),
    "megatron_lm": lambda: inference_schedule(inference_layout("tensor")),
    "sequence_parallel": lambda: inference_schedule(inference_layout("sequence")),
    "edgeshard": lambda: inference_schedule(inference_layout("pipeline")),
    "p_rge_one_device": lambda: build_published("query_step", {"ranks": 1, "queries": 2}),
    "p_rge_two_devices": lambda: build_published("query_step", {"ranks": 2, "queries": 3}),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_golden_schedule(name: str) -> None:
    """Each builder still makes the schedule that was read and found right."""
    assert_golden(name, SCHEDULES[name]())


def test_every_golden_file_is_compared() -> None:
    """No file lies there unread."""
    ours = {path.stem for path in GOLDEN.glob("*.txt")}
    assert set(SCHEDULES) == ours
    for path in GOLDEN.glob("*.txt"):
        assert Schedule.from_text(path.read_text(encoding="utf-8")).to_text() == path.read_text(encoding="utf-8")
