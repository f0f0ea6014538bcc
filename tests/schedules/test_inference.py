"""Inference schedules: exact in whole numbers for any split, as fast as the closed forms say, overlapped as section III-D promises."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from inference_algebra import run, shape, whole

from workbench.core.errors import ScheduleError
from workbench.core.inference import InferencePlan, StackShape
from workbench.core.schedule import RECV, SEND
from workbench.schedules import check
from workbench.schedules.inference import InferenceLayout, decode_schedule, inference_schedule

ENCODER_DECODER = (shape(2, 6, 12), shape(1, 3, 7, has_cross_attention=True))


def parts(chance: random.Random, total: int, count: int) -> tuple[int, ...]:
    """Cut a number into parts of at least 0."""
    cuts = sorted(chance.choices(range(total + 1), k=count - 1))
    return tuple(end - start for start, end in zip((0, *cuts), (*cuts, total), strict=True))


def random_plan(chance: random.Random, paradigm: str, stacks: tuple[StackShape, ...]) -> InferencePlan:
    """Return any plan: positions without units, columns or tokens, ranks in any order and left out, pieces of any size."""
    count = chance.randint(1, 5)
    layers = sum(stack.num_layers for stack in stacks)
    return InferencePlan(
        method="test",
        paradigm=paradigm,
        ranks=tuple(chance.sample(range(6), count)),
        units=parts(chance, stacks[0].num_units, count),
        columns=parts(chance, stacks[0].columns, count),
        shares=parts(chance, 10, count),
        schemes=tuple(chance.choices((1, 2), k=layers)),
        layers=parts(chance, layers, count),
        overlap=chance.random() < 0.7,
        both_ways=chance.random() < 0.5,
        tile_tokens=chance.choice((0, 0, 1, 2, 5)),
    )


@pytest.mark.parametrize("stacks", [(shape(),), ENCODER_DECODER], ids=["one stack", "encoder-decoder"])
@pytest.mark.parametrize("paradigm", ["hybrid", "tensor", "sequence", "pipeline"])
def test_any_split_gives_the_unsplit_result(paradigm: str, stacks: tuple[StackShape, ...]) -> None:
    """The schedule ends, every value is there once, and the sum over ranks is that of one device, to the last digit."""
    for seed in range(120 if paradigm == "hybrid" else 25):
        chance = random.Random(seed)
        plan = random_plan(chance, paradigm, stacks)
        lengths = tuple(chance.randint(1, 13) for _ in stacks)
        layout = InferenceLayout.build(plan, stacks, lengths)
        schedule = check(inference_schedule(layout, world_size=6))
        ids = tuple(tuple(chance.randrange(1000) for _ in range(length)) for length in lengths)
        assert run(schedule, layout, ids) == whole(stacks, ids), (seed, plan)
        assert all(not ops for rank, ops in enumerate(schedule.ops) if rank not in plan.ranks)


@pytest.mark.parametrize("exchange", ["direct", "star", "allreduce"])
@pytest.mark.parametrize("paradigm", ["hybrid", "pipeline"])
def test_decoding_continues_from_the_cache(paradigm: str, exchange: str) -> None:
    """Token by token with the keys of every position, as one causal pass would have it; of an encoder-decoder the decoder alone."""
    for seed in range(30):
        chance = random.Random(seed)
        for stacks in ((shape(),), ENCODER_DECODER):
            plan = random_plan(chance, paradigm, stacks)
            ids = [chance.randrange(1000) for _ in range(4)]
            memory = tuple(chance.randrange(1000) for _ in range(3))
            caches: dict[str, dict] = {"split": {"memory": memory}, "one": {"memory": memory}}
            for past, token in enumerate(ids):
                layout = InferenceLayout.decode(plan, stacks, past=past, memory_length=3)
                step = check(decode_schedule(layout, exchange=exchange))
                local = replace(plan, paradigm="pipeline", ranks=(0,), units=(), columns=(), shares=(), layers=(sum(s.num_layers for s in stacks),))
                alone = InferenceLayout.decode(local, stacks, past=past, memory_length=3)
                tokens = ((),) * (len(stacks) - 1) + ((token,),)
                assert run(step, layout, tokens, caches["split"]) == run(decode_schedule(alone), alone, tokens, caches["one"])
