"""The program that the driver simulates is the one that every rank executes, and its sizes are those of the tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from methods.conftest import four_devices
from methods.p_rge.worlds import STEPS, chain, prepared_job, profile_for, shared
from workbench.core import Plan
from workbench.methods.p_rge.method import PRGE
from workbench.methods.p_rge.prepare import PreparedJob
from workbench.methods.p_rge.rank_job import Change, QueryShape, planned_step
from workbench.methods.p_rge.worker import load_model
from workbench.runtime.messages import decode, encode

MODELS = ("tiny-llama", "tiny-t5", "tiny-bert")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("plan", [shared(2, 1, 1), chain(2, 4, 6, ranks=(0, 1, 2))], ids=["shared", "chain"])
def test_driver_and_ranks_make_one_program(model: str, plan: Plan) -> None:
    prepared, cluster = prepared_job(model), four_devices()
    job, own = PRGE().rank_job(prepared, profile_for(prepared, cluster), cluster, plan), load_model(prepared)
    (phase,), (received,) = job.phases(), decode(encode(job), type(job), "A job").phases()
    for step in range(STEPS):
        epoch, at = divmod(step, prepared.steps_per_epoch)
        planned = phase.steps(epoch)[at]
        shape = planned.shape
        assert isinstance(shape, QueryShape)
        assert received.program(received.steps(epoch)[at].shape).to_text() == phase.program(shape).to_text()
        batch = job.batch(planned)
        packing = own.packing(batch)
        assert (shape.rows, shape.tokens) == (tuple(batch.input_ids.shape) if packing is None else packing.shape)
        assert shape.target_length == (0 if batch.decoder_ids is None else batch.decoder_ids.shape[1])


@pytest.mark.parametrize(
    ("precision", "compute_dtype"), [("float32", None), ("bfloat16", None), ("int8", None), ("nf4", "bfloat16")]
)
def test_the_hidden_states_are_of_the_models_type(precision: str, compute_dtype: str | None) -> None:
    prepared = prepared_job("tiny-llama", precision=precision, compute_dtype=compute_dtype)
    model = load_model(prepared)
    assert prepared.crossing.dtype == str(model.dtype).removeprefix("torch.")
    assert prepared.crossing.hidden_size == model.backbone.hidden_size


def test_packs_take_the_place_of_rows() -> None:
    """Among the prompts there are batches that are computed as packs, and others; a sample's tokens are counted on
    average."""
    prepared = prepared_job("tiny-llama", batch_size=4)
    change = Change(0, 0, prepared.setting)
    unpacked = replace(prepared, facts=replace(prepared.facts, is_causal=False))
    shapes, padded = ([shape_at(one, change, step) for step in range(20)] for one in (prepared, unpacked))
    assert all(shape.rows == 4 for shape in padded) and any(shape.rows < 4 for shape in shapes)
    assert all(packed.lengths <= full.lengths == (full.tokens,) for packed, full in zip(shapes, padded, strict=True))


def shape_at(prepared: PreparedJob, change: Change, step: int) -> QueryShape:
    """Return the shape of a step."""
    shape = planned_step(prepared, change, step).shape
    assert isinstance(shape, QueryShape)
    return shape
