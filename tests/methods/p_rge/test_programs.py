"""The program that the driver simulates is the one that every rank executes, and its sizes are those of the tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from methods.conftest import four_devices
from methods.p_rge.worlds import STEPS, chain, prepared_job, profile_for, shared
from workbench.core import Plan
from workbench.core.schedule import STEP
from workbench.methods.p_rge.method import PRGE
from workbench.methods.p_rge.prepare import PreparedJob
from workbench.methods.p_rge.rank_job import Change, QueryResult, QueryShape, planned_step
from workbench.methods.p_rge.worker import QueryHandlers, StageCompute, load_model
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


def test_a_finished_steps_losses_are_not_known_as_those_of_the_next_one() -> None:
    """A device that learns between two steps that another is lost knows no loss of the second."""
    prepared, cluster = prepared_job(), four_devices()
    job = PRGE().rank_job(prepared, profile_for(prepared, cluster), cluster, shared(4))
    step, result, contents = job.query_step(), QueryResult(rank=0), {}
    handlers = QueryHandlers(
        rank=0,
        rank_job=job,
        query_step=step,
        compute=StageCompute(job, 0, 6),
        batch=job.batch(job.phases()[0].steps(0)[0]),
        step=0,
        result=result,
        wants_pause=lambda: False,
    )
    for op in step.schedule.ops[0]:
        reads = [contents.get(value) for value in op.reads]
        contents |= zip(op.writes, handlers.table()[op.kind](op, reads), strict=True)
        assert bool(result.losses) == (op.kind == "F") and len(result.records) == (op.kind == STEP)


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
